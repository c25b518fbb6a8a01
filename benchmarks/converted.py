"""Time training epochs of models written for PyG: run by PyG, and converted by weft.nn.convert under `single`.

    WEFT_DATA=shared/data python benchmarks/converted.py --graph tolokers --out NAME

The script first compares the logits of both in evaluation. Then epochs of PyG and of weft alternate; each is a forward
pass, cross entropy, a backward pass and a step of Adam. PyG gets the edges as edge_index, sorted by target. The models
are in pyg_models.py.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from kernels import save
from pyg_models import BY_TYPE, PYG_MODELS, TYPED, Widths
from steps import make_plan, train_step, whole_step
from torch.nn.functional import cross_entropy

import weft
from weft.comm import Group
from weft.config.config import Config
from weft.nn import Workload, convert
from weft.training.tasks.task import make_task

TOLERANCE = 1e-3  # relative to the largest logit: float32 sums in another order
WITHOUT_EDGES = [name for name in PYG_MODELS if "edges" not in name and name not in TYPED | BY_TYPE]


def main() -> int:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    graph = weft.load(options.graph)
    rows = []
    for name in options.models.split(",") if options.models else WITHOUT_EDGES:
        rows.append({"model": name, **measure(name, graph, options)})
        report(rows[-1])
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def measure(name: str, graph: weft.Graph, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of both libraries in each round, and how far their logits differ.

    Raises:
        SystemExit: The logits differ by more than `TOLERANCE`.
    """
    torch.manual_seed(0)
    model = PYG_MODELS[name](Widths(graph.num_features, options.hidden, graph.num_classes))
    data = SimpleNamespace(x=graph.x, edge_index=torch.stack(graph.in_edges.edges()))
    theirs, placed = copy.deepcopy(model), make_plan("single", Workload(convert(model), graph)).place(Group())
    task = make_task(Config(), placed)
    assert graph.y is not None
    y, rows = graph.y, graph.train_mask
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (theirs, placed.model)]
    inputs = (data,) if name.startswith("pyg-sage") else (data.x, data.edge_index)
    with torch.no_grad():
        evaluation = placed.evaluation(0)  # computes the labelled vertices
        scored = slice(None) if evaluation.vertices is None else evaluation.vertices
        expected, actual = theirs.eval()(*inputs)[scored], placed.forward(evaluation)
    difference = float((actual - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise SystemExit(f"{name}: logits differ by {difference:.1e} of the largest, more than {TOLERANCE}")
    theirs.train()

    def epoch_of_pyg(_: int) -> None:
        logits = theirs(*inputs)
        cross_entropy(logits[rows], y[rows]).backward()

    def epoch_of_weft(number: int) -> None:
        train_step(placed, task, whole_step(placed, number))

    seconds: list[list[float]] = [[], []]
    for number in range(options.rounds + 1):
        for optimizer, run, spent in zip(optimizers, (epoch_of_pyg, epoch_of_weft), seconds, strict=True):
            start = time.perf_counter()
            optimizer.zero_grad()
            run(number)
            optimizer.step()
            spent.append(time.perf_counter() - start)
    return {"apart": difference, "pyg": seconds[0][1:], "weft": seconds[1][1:]}


def report(row: dict[str, Any]) -> None:
    """Print the line of a model."""
    ratios = [theirs / ours for theirs, ours in zip(row["pyg"], row["weft"], strict=True)]
    print(
        f"{row['model']:16} PyG {statistics.median(row['pyg']):7.3f} s  weft {statistics.median(row['weft']):7.3f} s  "
        f"{statistics.median(ratios):5.2f}x ({min(ratios):.2f} to {max(ratios):.2f})   logits {row['apart']:.0e} apart",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--graph", default="tolokers", help="graph to train on, without repeated self-loops (PyG drops these)"
    )
    parser.add_argument(
        "--models", default="", help="separated by commas; empty: all models without edge features or types"
    )
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="number of threads (0: one for each core)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
