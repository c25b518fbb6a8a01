"""What leaving out the rows saves that no training vertex's loss depends on (`--disable reach` reads all of them).

    WEFT_DATA=shared/data python benchmarks/reach.py --graphs "cora;rmat:vertices=2m,edges=40m,features=64,classes=16" \
        --labelled 0,0.01 --out NAME

Strategies run on one rank (`dependencies.py --labelled 0.01 --contenders hybrid,hybrid-reach` has several).
Losses and gradients are compared first; then steps with and without take turns. Rows and edges are those of a training
step, of all levels and hops together. Memory is what a step makes, as foreseen.
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
from weft.nn import Workload, make_model
from weft.partition import ReceptiveField
from weft.strategies import ResidentPlan
from weft.strategies.offload.plan import OffloadPlan
from weft.training.tasks.metrics import NodeTask
from weft.training.tasks.task import make_task

TOLERANCE = 1e-3  # of float32 losses and gradients, relative to the largest: sums have another order


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
            found = measure(graph, strategy, options)
            if isinstance(found, str):
                print(f"{name}, {strategy}: nothing is left out: {found}", flush=True)
            else:
                rows.append({"graph": name, "labelled": share, "strategy": strategy, **found})
                report(rows[-1])
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


class Runner:
    """A strategy with or without the optimisation."""

    def __init__(self, graph: Graph, strategy: str, without: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model = make_model(
            options.model, graph.num_features, graph.num_classes, hidden=options.hidden, layers=options.layers
        )
        start = time.perf_counter()
        self.plan = make_plan(strategy, Workload(model, graph, Optimisations.without(without)))
        self.placed = self.plan.place(Group())
        self.setup_seconds = time.perf_counter() - start
        self.task = make_task(Config(), self.placed)
        assert isinstance(self.task, NodeTask)
        self.optimizer = torch.optim.Adam(self.placed.model.parameters(), lr=0.01)
        self.seconds: list[float] = []

    def step(self, epoch: int) -> float:
        """A training step; its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        train_step(self.placed, self.task, whole_step(self.placed, epoch))
        self.optimizer.step()
        return time.perf_counter() - start

    def first(self) -> list[torch.Tensor]:
        """The loss and the gradients of a step that is not taken."""
        (step,) = self.placed.steps(0)
        logits = self.placed.forward(step)
        loss, grad = self.task.loss(logits, step)
        self.placed.backward(logits, grad)
        return [loss[None], *(p.grad.clone() for p in self.placed.model.parameters() if p.grad is not None)]


def measure(graph: Graph, strategy: str, options: argparse.Namespace) -> dict[str, Any] | str:
    """What both ways take, and what one leaves out; or why that is nothing."""
    plan = Runner(graph, strategy, "", options).plan  # and PyTorch has loaded what it loads late
    assert isinstance(plan, ResidentPlan | OffloadPlan)
    reach = plan.receptive_field if isinstance(plan, OffloadPlan) else plan.receptive_fields[True]
    if not isinstance(reach, ReceptiveField):
        return reach or "that would save little"
    runners = {without: Runner(graph, strategy, without, options) for without in ("", "reach")}
    for one, other in zip(*(runner.first() for runner in runners.values()), strict=True):
        apart = float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))
        if not apart <= TOLERANCE:
            raise SystemExit(f"{strategy}: losses or gradients differ by {apart:.1e} of the largest")
    for epoch in range(1, options.rounds + 2):
        for runner in runners.values():
            runner.seconds.append(runner.step(epoch))
    plans = [runner.plan for runner in runners.values()]
    return {
        "vertices": graph.num_vertices,
        "training": runners[""].task.num_labelled["train"],
        "rows": [sum(reach.rows), len(reach.rows) * graph.num_vertices],
        "edges": [sum(reach.edges), len(reach.edges) * graph.num_edges],
        "edges_x_width": [one.trace(training=True).edges for one in plans],
        "flops": [one.trace(training=True).flops for one in plans],
        "step_bytes": [one.memory() for one in plans if isinstance(one, ResidentPlan)],
        "setup_seconds": [runner.setup_seconds for runner in runners.values()],
        "seconds": [runner.seconds[1:] for runner in runners.values()],
    }


def report(row: dict[str, Any]) -> None:
    """One line."""
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
        f"has {shares}  {f'a step makes {memory}  ' if memory else ''}"
        f"setup {row['setup_seconds'][0]:.2f} against {row['setup_seconds'][1]:.2f} s",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="cora", help="separated by semicolons")
    parser.add_argument("--labelled", default="0", help="the share to train on, of all graphs or each; 0: their own")
    parser.add_argument("--strategies", default="single")
    parser.add_argument("--model", default="gcn")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
