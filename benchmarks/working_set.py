"""What aggregates chunk by chunk have in memory, counted by us and seen from outside, in a process that is watched.

    python benchmarks/working_set.py --limits 16MB,64MB --work sum,attend

The process makes the aggregates of one training step under tensor on one rank, forward and backward, in chunks; all
N rows of vertex data are in files, as they are on the host. The watcher reads the process's anonymous memory (RssAnon)
every millisecond: beyond what it had before the first aggregate, that is the working set.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

import weft
from weft.comm import Group, column_layout
from weft.nn import Aggregate, Attend, AttendEdges, EdgeSoftmax, Max, Sum, Workload
from weft.parallel.chunks.program.stages import AggregateStep
from weft.parallel.chunks.run.activations import Gradients
from weft.parallel.chunks.run.chunk_aggregates import ChunkAggregates
from weft.parallel.columns.column_pass import ColumnPass
from weft.strategies.tensor.plan import TensorOptions, TensorPlan
from weft.utils.units import parse_bytes

READY, DONE = "ready", "done"
"""What the watched process says."""
WORK = ("sum", "max", "attend", "attend_edges")


def main() -> int:
    options = parse()
    if options.watched:
        make_products(options)
        return 0
    print(f"{options.graph}, width {options.width}: bytes of a whole aggregate's rows {rows_bytes(options):,}")
    for kind in options.work.split(","):
        for limit in options.limits.split(","):
            counted, chunks, seen = watch(options, kind, limit)
            allowed = parse_bytes(limit, "--limits")
            print(
                f"{kind:>7} limit {allowed:>13,}  counted {counted:>13,}  seen {seen:>13,}  {chunks:>5} chunks  "
                f"{'kept' if max(counted, seen) <= allowed else 'NOT KEPT'}",
                flush=True,
            )
    return 0


def rows_bytes(options: argparse.Namespace) -> int:
    graph = weft.load(options.graph)
    return 2 * 4 * graph.num_vertices * options.width


def watch(options: argparse.Namespace, kind: str, limit: str) -> tuple[int, int, int]:
    """Bytes counted, number of chunks, and the most anonymous bytes that were seen beyond those before."""
    command = [sys.executable, __file__, "--graph", options.graph, "--width", str(options.width)]
    command += ["--work", kind, "--limits", limit, "--watched"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # freed is gone
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        said = process.stdout.readline().split()
        assert said[0] == READY, said
        before = most = anonymous(process.pid)
        while process.poll() is None:
            most = max(most, anonymous(process.pid))
            time.sleep(1e-3)
        _, counted, chunks = process.stdout.readline().split()
    return int(counted), int(chunks), most - before


def anonymous(pid: int) -> int:
    """The anonymous bytes that a process has resident; 0 once it is gone."""
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


def make_products(options: argparse.Namespace) -> None:
    """The watched process."""
    torch.set_num_threads(1)
    graph, width, heads = weft.load(options.graph), options.width, 4
    work = Workload(weft.nn.make_model("gcn", graph.num_features, graph.num_classes), graph)
    plan = TensorPlan(work, 1, TensorOptions(device_memory=parse_bytes(options.limits, "--limits")))
    rounds_of = plan.place(Group()).columns.chunked
    heads_at = tuple(width // heads * head for head in range(heads + 1))
    op: Aggregate = {
        "sum": Sum(norm="gcn"),
        "max": Max(),
        "attend": Attend(heads_at, 0.2),
        "attend_edges": AttendEdges(bounds=heads_at, logit_bounds=heads_at, slope=0.2, separate_left=False),
    }[options.work]
    needs = plan.chunk_working_set(op, width)
    rows_in = rows_out = column_layout(plan.row_bounds, width)
    columns = {op.first: slice(None)}
    if isinstance(op, EdgeSoftmax):
        attention = plan.attention(op)
        rows_in, op = attention.layout(sums=False), attention.rank_part(op, 0)
        columns = dict(zip((*op.source, *op.target), attention.own_columns(0), strict=True))
    made = ColumnPass(rounds_of(op, needs), op, columns, rows_in, rows_out)
    made.activations.shared = {name: torch.ones(width) for name in op.shared}
    made.activations.arrays = [made.runtime.zeros(graph.num_vertices, port.width) for port in made.activations.segment.live]
    for rows in made.activations.arrays:
        rows.tensor().fill_(1)
    step(made)  # what is made once: scalings, loops, thread pools
    print(READY, flush=True)
    time.sleep(0.2)
    step(made)
    print(DONE, made.runtime.num_bytes, len(made.runtime.rounds(0)), flush=True)


def step(made: ColumnPass) -> None:
    """All chunks forward and backward, without what crosses the network."""
    runtime, table = made.runtime, made.activations
    y, aggregates = runtime.pool.alloc(runtime.num_results, made.width), ChunkAggregates(runtime, table, 0)
    for round_, loaded, result in aggregates.results(AggregateStep.forward(table.segment, 0)):
        y.write(round_.results.start, result)
        del loaded, result
    found = [runtime.zeros(runtime.num_rows, rows.width) for rows in table.segment.live]
    back = AggregateStep.backward(table.segment, 0, saved=False, retained=False, on_cpu=True)
    for round_, loaded, backward in aggregates.backward(back, Gradients(live=dict(enumerate(found)))):
        backward.back(y.read(round_.results.start, round_.results.stop))
        del loaded, backward
    runtime.pool.free(y, *found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="rmat:vertices=200k,edges=4m,features=1,classes=2")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--work", default=",".join(WORK))
    parser.add_argument("--limits", default="16MB,64MB,256MB")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
