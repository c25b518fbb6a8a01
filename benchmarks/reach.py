"""Measure what is saved by training only on the receptive field of the labelled vertices (`reach`).

    WEFT_DATA=shared/data python benchmarks/reach.py --graphs "cora;rmat:vertices=2m,edges=40m,features=64,classes=16" \
        --labelled 0,0.01 --out NAME

The optimisation `reach` skips every row that no training vertex's loss depends on; `--disable reach` computes all rows.
Strategies run on one rank; for several ranks, use `dependencies.py --labelled 0.01 --contenders hybrid,hybrid-reach`.
Losses and gradients are compared first; then steps with and without the optimisation take turns. Rows and edges are
those of a training step, summed over the layers. Memory is the estimate for a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from dependencies import load, with_labels
from kernels import save
from steps import make_plan, train_step, whole_step

from weft.comm import Group
from weft.config.config import Config
from weft.config.optimisations import Optimisations
from weft.data import Graph
from weft.nn import ReceptiveField, Workload, make_model
from weft.strategies import ResidentPlan
from weft.strategies.offload.plan import OffloadPlan
from weft.training.tasks.metrics import NodeTask
from weft.training.tasks.task import make_task

TOLERANCE = 1e-3  # of float32 losses and gradients, relative to the largest: sums in another order


def main() -> int:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = []
    labelled = list(map(float, options.labelled.split(",")))
    graphs = options.graphs.split(";")
    for name, share in zip(graphs, labelled if len(labelled) > 1 else labelled * len(graphs), strict=True):
        graph = with_labels(load(name, options.features), share)
        for strategy in options.strategies.split(","):
            measured = measure(graph, strategy, options)
            if isinstance(measured, str):
                print(f"{name}, {strategy}: reach skips nothing: {measured}", flush=True)
            else:
                rows.append({"graph": name, "labelled": share, "strategy": strategy, **measured})
                report(rows[-1])
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


class Runner:
    """A strategy with or without the optimisation: its plan, its placed model, and the seconds of its steps."""

    def __init__(self, graph: Graph, strategy: str, without: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model = make_model(
            options.model, graph.num_features, graph.num_classes, hidden=options.hidden, layers=options.layers
        )
        start = time.perf_counter()
        self.plan = make_plan(strategy, Workload(model, graph, Optimisations.without(without)))
        self.placed = self.plan.place(Group())
        self.setup_seconds = time.perf_counter() - start
        task = make_task(Config(), self.placed)
        assert isinstance(task, NodeTask)
        self.task = task
        self.optimizer = torch.optim.Adam(self.placed.model.parameters(), lr=0.01)
        self.seconds: list[float] = []

    def step(self, epoch: int) -> float:
        """Run a training step and return its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        train_step(self.placed, self.task, whole_step(self.placed, epoch))
        self.optimizer.step()
        return time.perf_counter() - start

    def first(self) -> list[torch.Tensor]:
        """Return the loss and the gradients of the first step, without updating the parameters."""
        (step,) = self.placed.steps(0)
        logits = self.placed.forward(step)
        loss, grad = self.task.loss(logits, step)
        self.placed.backward(logits, grad)
        return [loss[None], *(p.grad.clone() for p in self.placed.model.parameters() if p.grad is not None)]


def measure(graph: Graph, strategy: str, options: argparse.Namespace) -> dict[str, Any] | str:
    """Return the measurements with and without the optimisation, or the reason why it skips nothing."""
    plan = Runner(graph, strategy, "", options).plan  # also loads what PyTorch imports lazily, before steps are timed
    assert isinstance(plan, ResidentPlan | OffloadPlan)
    field = plan.receptive_field if isinstance(plan, OffloadPlan) else plan.receptive_fields[True]
    if not isinstance(field, ReceptiveField):
        return field or "it would save little"
    runners = {without: Runner(graph, strategy, without, options) for without in ("", "reach")}
    for actual, expected in zip(*(runner.first() for runner in runners.values()), strict=True):
        difference = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        if not difference <= TOLERANCE:
            raise SystemExit(f"{strategy}: losses or gradients differ by {difference:.1e} of the largest")
    for epoch in range(1, options.rounds + 2):
        for runner in runners.values():
            runner.seconds.append(runner.step(epoch))
    plans = [runner.plan for runner in runners.values()]
    return {
        "vertices": graph.num_vertices,
        "training": runners[""].task.num_labelled["train"],
        "rows": [sum(field.rows), len(field.rows) * graph.num_vertices],
        "edges": [sum(field.edges), len(field.edges) * graph.num_edges],
        "edges_x_width": [plan.trace(training=True).edges for plan in plans],
        "flops": [plan.trace(training=True).flops for plan in plans],
        "step_bytes": [plan.memory() for plan in plans if isinstance(plan, ResidentPlan)],
        "setup_seconds": [runner.setup_seconds for runner in runners.values()],
        "seconds": [runner.seconds[1:] for runner in runners.values()],
    }


def report(row: dict[str, Any]) -> None:
    """Print the line of a graph and a strategy."""
    with_it, without = row["seconds"]
    ratio = statistics.median(slow / fast for fast, slow in zip(with_it, without, strict=True))
    shares = ", ".join(
        f"{kind} {row[kind][0] / max(row[kind][1], 1):.1%}" for kind in ("rows", "edges", "edges_x_width", "flops")
    )
    memory = " of ".join(f"{taken / 1e6:.0f} MB" for taken in row["step_bytes"])
    print(
        f"{row['graph']} ({row['vertices']:,} vertices, {row['training']:,} to train on), {row['strategy']}: "
        f"{statistics.median(with_it):.4f} s ({min(with_it):.4f} to {max(with_it):.4f}) against "
        f"{statistics.median(without):.4f} s ({min(without):.4f} to {max(without):.4f}): {ratio:.2f}x  "
        f"computes {shares}  {f'memory of a step {memory}  ' if memory else ''}"
        f"setup {row['setup_seconds'][0]:.2f} against {row['setup_seconds'][1]:.2f} s",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="cora", help="graphs to train on, separated by semicolons")
    parser.add_argument(
        "--labelled",
        default="0",
        help="fraction of the vertices to train on, one for all graphs or one for each (0: the graph's split)",
    )
    parser.add_argument("--strategies", default="single")
    parser.add_argument("--model", default="gcn")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="number of threads (0: one for each core)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
