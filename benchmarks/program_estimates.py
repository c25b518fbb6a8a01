"""Compare the estimated with the measured seconds and memory of training steps of PyG's convolutions as programs.

    weft probe --out machine.json
    WEFT_DATA=shared/data python benchmarks/program_estimates.py --machine machine.json --graphs tolokers --out NAME

--machine is a profile of this machine, measured before. Each model is a linear layer, a convolution that runs as a
program in tiles of edges, and a linear layer, under `single`, with the convolutions of message_functions.py. Seconds
are those of a training step with loss and optimizer. Memory is the peak of tensors in a step.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kernels import save
from message_functions import EDGE_FEATURES, convolutions
from steps import train_step
from torch import Tensor, nn

import weft
from weft.autotune import Cluster, epoch_time
from weft.comm import Group
from weft.cost import Profile
from weft.data import Graph, GraphShape
from weft.nn import Workload, convert
from weft.runtime.kernel_selection import select_kernels
from weft.runtime.memory.heap import keep_freed_memory
from weft.runtime.memory.limit import memory_limit_bytes
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.strategies import Placed
from weft.strategies.single import SinglePlan
from weft.training.tasks.metrics import NodeTask
from weft.utils.errors import InputError


class Model(nn.Module):
    """A convolution between two linear layers.

    Args:
        conv: The convolution.
        graph: The graph, whose features and classes are the ends of the model.
        width: Number of columns of the convolution's rows.
    """

    def __init__(self, conv: nn.Module, graph: Graph, width: int) -> None:
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(graph.num_features, width), conv, nn.LazyLinear(graph.num_classes)
        self.has_initial = "x_0" in inspect.signature(conv.forward).parameters
        self.reads_edges = "edge_attr" in inspect.signature(conv.forward).parameters

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        x = self.first(x).relu()
        rows = (x, x) if self.has_initial else (x,)
        y = self.conv(*rows, edge_index, edge_attr) if self.reads_edges else self.conv(*rows, edge_index)
        logits: Tensor = self.last(y.relu())
        return logits


def main() -> None:
    options = parse()
    keep_freed_memory()
    machine = Profile.read(Path(options.machine))
    select_kernels(machine.choices)
    threads, memory_bytes = torch.get_num_threads(), memory_limit_bytes()
    cluster = Cluster(profile=machine, ranks=1, hosts=1, threads=threads, memory_bytes=memory_bytes)
    rows: list[dict[str, Any]] = []
    for name in options.graphs.split(","):
        plain = weft.load(name)
        with_edges = replace(plain, edge_features=torch.rand(plain.num_edges, EDGE_FEATURES))
        for kind, (make, reads_edges) in convolutions(options.width, torch.bincount(plain.in_edges.degree)).items():
            if options.only and kind not in options.only.split(","):
                continue
            torch.manual_seed(0)
            graph = with_edges if reads_edges else plain
            try:
                rows.append({"graph": name, "convolution": kind, **measured(make(), graph, cluster, options)})
                report(rows[-1])
            except InputError as error:  # GENConv, for its batch norm
                print(f"{kind} is left out: {error}")
    for field in ("seconds", "bytes"):
        for name in options.graphs.split(","):
            ratios = [row[f"told_{field}"] / middle(row[field]) for row in rows if row["graph"] == name]
            errors = [abs(ratio - 1) for ratio in ratios]
            print(f"{name}, {field}: median error {statistics.median(errors):.1%}, worst {max(errors):.0%}")
    if options.out:
        save(options.out, {"options": vars(options), "profile": machine.record()["host"], "rows": rows})


def measured(conv: nn.Module, graph: Graph, cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    """Return the estimated and the measured seconds and bytes of a training step."""
    model = Model(conv, graph, options.width)
    edge_attr = None if graph.edge_features is None else graph.edge_features[:1]
    assert isinstance(graph.x, Tensor)
    with torch.no_grad():  # so that the last layer gets its width
        model.eval()(graph.x[:1], torch.zeros(2, 1, dtype=torch.int64), edge_attr)
    inputs = [] if edge_attr is None else ["edge_attr"]
    plan = SinglePlan(Workload(convert(model, edge_inputs=inputs, shape=GraphShape.of(graph)), graph))
    told_seconds = epoch_time(plan, cluster).total
    told_bytes = plan.layouts[True].step_memory(0, training=True).most
    placed = plan.place(Group())
    task = NodeTask(placed.graph, placed.rows, placed.group, placed.empty_rows)
    optimizer, seconds = torch.optim.Adam(placed.model.parameters()), []
    for epoch in range(options.rounds + 1):
        begin = time.perf_counter()
        train(placed, task, optimizer, epoch)
        seconds.append(time.perf_counter() - begin)
    gc.collect()
    with TensorPeak() as peak:
        train(placed, task, optimizer, options.rounds + 1)
    ratio = [told_seconds / each for each in seconds[1:]]
    return {
        "seconds": seconds[1:],
        "told_seconds": told_seconds,
        "ratio": ratio,
        "bytes": peak.most,
        "told_bytes": told_bytes,
    }


def train(placed: Placed, task: NodeTask, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Do a training step."""
    (step,) = placed.steps(epoch)
    train_step(placed, task, step)
    optimizer.step()
    optimizer.zero_grad()


def middle(value: Any) -> float:
    """Return the median of a list, or a number."""
    return float(statistics.median(value) if isinstance(value, list) else value)


def report(row: dict[str, Any]) -> None:
    seconds = middle(row["seconds"])
    print(
        f"{row['graph'][:16]:16} {row['convolution']:18} {seconds * 1e3:8.1f} ms, estimated / measured "
        f"{row['told_seconds'] / seconds:5.2f}; {row['bytes'] / 1e6:8.1f} MB, {row['told_bytes'] / row['bytes']:5.2f}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="profile from weft probe")
    parser.add_argument("--graphs", default="tolokers,amazon_photo", help="names of graphs")
    parser.add_argument("--width", type=int, default=64, help="columns of the convolution's rows")
    parser.add_argument("--rounds", type=int, default=7, help="measured steps")
    parser.add_argument("--only", default="", help="names of convolutions, separated by commas")
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
