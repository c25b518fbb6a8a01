"""Compare strategies by validation score per epoch, next to the vertices sampled and the training time so far.

    python benchmarks/accuracy.py --graphs "coauthor_physics;tolokers" --out NAME
    python benchmarks/accuracy.py --graphs tolokers --contenders split:fanout=10,split:sampling=labor:fanout=14

A contender is a strategy with options, as `weft compare` takes it. Contenders run one after the other on the same graph
and seed. To compare samplers at an equal number of vertices, choose the fanout of LABOR that samples as many.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

from kernels import save

import weft
from weft.cli.parser import parse_strategies

EPOCHS = (1, 2, 3, 5, 10, 20, 30, 50)


def main() -> int:
    options = parse()
    rows: list[dict[str, Any]] = []
    for graph in options.graphs.split(";"):
        names = ["layers", "workers", "epochs", "metrics"] + ["batch_size", "fanout"] * bool(options.fanout)
        settings: dict[str, Any] = {name: getattr(options, name) for name in names}
        with tempfile.TemporaryDirectory() as folder:
            runs = weft.compare(
                graph,
                options.model,
                strategies=parse_strategies(options.contenders),
                out=Path(folder) / "runs",
                quiet=True,
                **settings,
            )
            curves = [{"graph": graph, "contender": name, **curve(run.records)} for name, run in runs.items()]
        report(graph, curves)
        rows += curves
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def curve(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return three lists with an item for each epoch: validation score, total vertices sampled, total seconds."""
    epochs = [line for line in records if line["kind"] == "epoch"]
    num_sampled = [0] * len(epochs)
    for line in records:
        if line["kind"] == "rank" and line["phase"] == "train":
            num_sampled[line["epoch"]] += line["sampled"].get("vertices", 0)
    score = next(name for name in epochs[0] if name.startswith("val_"))
    return {
        "score": [line[score] for line in epochs],
        "vertices": list(accumulate(num_sampled)),
        "seconds": list(accumulate(line["seconds"] for line in epochs)),
    }


def report(graph: str, rows: list[dict[str, Any]]) -> None:
    """Print a line for each contender: validation score, million vertices and seconds after the `EPOCHS`."""
    epochs = [epoch for epoch in EPOCHS if epoch <= len(rows[0]["score"])]
    print(f"{graph}: validation score (million vertices sampled, seconds) after epochs {', '.join(map(str, epochs))}")
    for row in rows:
        cells = (
            f"{row['score'][epoch - 1]:.4f} ({row['vertices'][epoch - 1] / 1e6:.2f}, {row['seconds'][epoch - 1]:.2f})"
            for epoch in epochs
        )
        print(f"  {row['contender']:40} {'  '.join(cells)}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--graphs", default="coauthor_physics;tolokers", help="graphs to train on, separated by semicolons"
    )
    parser.add_argument("--contenders", default="communicated,split,split:sampling=labor,sampled")
    parser.add_argument("--model", default="sage")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", default="512")
    parser.add_argument(
        "--fanout",
        default="10",
        help="in-edges to sample per vertex, by hop; empty if no contender samples mini-batches",
    )
    parser.add_argument(
        "--metrics", default="", help="the score to compare, such as roc_auc; empty: the default of the task"
    )
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
