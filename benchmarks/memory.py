"""Compare the memory of a training step, as the plan estimates it, with the peak of the live tensors.

    WEFT_DATA=shared/data python benchmarks/memory.py --graph coauthor_physics --ranks 1,2,4 --out NAME

The memory of a step is that of all tensors which it creates, with the gradients, until the step of Adam. Tensors that
live from epoch to epoch do not count. Each row is of the rank that uses most.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from kernels import save
from processes import start
from steps import make_plan, train_step, whole_step

import weft
from weft.comm import Group, join
from weft.nn import Workload, make_model
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.runtime.meter import Meter
from weft.strategies import STRATEGIES, ResidentPlan, get_strategy
from weft.training.tasks.metrics import NodeTask

STEPS = 5
"""Number of training steps: the first one creates what is kept between epochs, `stale` exchanges in the last one."""
RESIDENT = tuple(name for name, plan in STRATEGIES.items() if issubclass(plan, ResidentPlan))


def main() -> int:
    options = parse()
    rows = []
    print(f"{'strategy':14} {'model':6} {'ranks':>5} {'estimated':>14} {'measured':>14} {'ratio':>6}")
    for size in map(int, options.ranks.split(",")):
        ranks = on_ranks(size, options)
        for case_rows in zip(*ranks, strict=True):  # the rows of all ranks for one strategy and model
            row = max(case_rows, key=lambda rank_row: rank_row["seen"])
            rows.append(row | {"ranks": size, "ratio": row["foreseen"] / row["seen"]})
            memory = f"{row['foreseen']:14,} {row['seen']:14,} {rows[-1]['ratio']:6.3f}"
            print(f"{row['strategy']:14} {row['model']:6} {size:5} {memory}", flush=True)
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def on_ranks(size: int, options: argparse.Namespace) -> list[list[dict]]:
    """Measure all cases on `size` ranks and return the rows of each rank."""
    if size == 1:
        return [list(cases(Group(), options))]
    with tempfile.TemporaryDirectory() as folder:
        every = {"WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        pipes = [
            start(one_rank, folder, options, RANK=str(rank), LOCAL_RANK=str(rank), **every) for rank in range(size)
        ]
        return [pipe.recv() for pipe in pipes]


def one_rank(folder: str, options: argparse.Namespace, pipe: Connection) -> None:
    torch.set_num_threads(1)
    group = join(timeout_seconds=600, meter=Meter(), init_method=f"file://{Path(folder) / 'meet'}")
    pipe.send(list(cases(group, options)))
    group.close()


def cases(group: Group, options: argparse.Namespace) -> Iterator[dict]:
    graph = weft.load(options.graph)
    for strategy in options.strategies.split(","):
        if (get_strategy(strategy).max_ranks or group.size) < group.size:
            continue
        for model in options.models.split(","):
            torch.manual_seed(0)
            widths = {"hidden": options.hidden, "layers": options.layers}
            net = make_model(model, graph.num_features, graph.num_classes, **widths)
            plan = make_plan(strategy, Workload(net, graph), group.size)
            placed = plan.place(group)
            task = NodeTask(graph, placed.rows, group, placed.empty_rows, placed.rows_device)
            peaks = []
            for epoch in range(STEPS):
                placed.model.zero_grad()
                with TensorPeak() as peak:
                    train_step(placed, task, whole_step(placed, epoch))
                peaks.append(peak.most)
            estimate = plan.memory(group.rank)
            yield {"strategy": strategy, "model": model, "foreseen": estimate, "seen": max(peaks[1:])}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="coauthor_physics")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--strategies", default=",".join(RESIDENT))
    parser.add_argument("--models", default="gcn,sage,gat,gatv2")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--out", default="", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
