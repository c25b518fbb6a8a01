"""Compare the counted memory of chunked aggregates with the memory of the process, measured from outside.

    python benchmarks/working_set.py --limits 16MB,64MB --work sum,attend

A watched process runs the aggregates of one training step under `tensor` on one rank, forward and backward, in chunks.
All N rows of vertex data are in files. The watcher reads the anonymous memory of the process (RssAnon) every
millisecond; the working set is the increase over the value before the first aggregate.
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
"""First words of the lines that the watched process prints."""
WORK = ("sum", "max", "attend", "attend_edges")


def main() -> int:
    options = parse()
    if options.watched:
        make_products(options)
        return 0
    print(
        f"{options.graph}, width {options.width}: bytes of the rows of an unchunked aggregate {rows_bytes(options):,}"
    )
    for kind in options.work.split(","):
        for limit in options.limits.split(","):
            counted, chunks, measured = watch(options, kind, limit)
            allowed = parse_bytes(limit, "--limits")
            print(
                f"{kind:>7} limit {allowed:>13,}  counted {counted:>13,}  measured {measured:>13,}  "
                f"{chunks:>5} chunks  {'within the limit' if max(counted, measured) <= allowed else 'OVER THE LIMIT'}",
                flush=True,
            )
    return 0


def rows_bytes(options: argparse.Namespace) -> int:
    graph = weft.load(options.graph)
    return 2 * 4 * graph.num_vertices * options.width


def watch(options: argparse.Namespace, kind: str, limit: str) -> tuple[int, int, int]:
    """Run a process with one kind of aggregate, and return its counted bytes, number of chunks and measured bytes.

    Args:
        options: The command line options.
        kind: Kind of the aggregate, one of `WORK`.
        limit: Device memory, such as 16MB.
    """
    command = [sys.executable, __file__, "--graph", options.graph, "--width", str(options.width)]
    command += ["--work", kind, "--limits", limit, "--watched"]
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }  # freed memory returns to the system
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        words = process.stdout.readline().split()
        assert words[0] == READY, words
        before = most = anonymous(process.pid)
        while process.poll() is None:
            most = max(most, anonymous(process.pid))
            time.sleep(1e-3)
        _, counted, chunks = process.stdout.readline().split()
    return int(counted), int(chunks), most - before


def anonymous(pid: int) -> int:
    """Return the resident anonymous memory of a process in bytes; 0 if it has ended."""
    try:
        match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match.group(1)) * 1024 if match else 0


def make_products(options: argparse.Namespace) -> None:
    """Run the aggregates in the watched process, once to create what is cached, and once to be measured."""
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
    needs = plan.layout.chunk_working_set(op, width)
    rows_in = rows_out = column_layout(plan.layout.row_bounds, width)
    columns = {op.first: slice(None)}
    if isinstance(op, EdgeSoftmax):
        attention = plan.layout.attention(op)
        rows_in, op = attention.layout(sums=False), attention.rank_part(op, 0)
        columns = dict(zip((*op.source, *op.target), attention.own_columns(0), strict=True))
    column_pass = ColumnPass(rounds_of(op, needs), op, columns, rows_in, rows_out)
    column_pass.activations.shared = {name: torch.ones(width) for name in op.shared}
    column_pass.activations.arrays = [
        column_pass.runtime.zeros(graph.num_vertices, port.width) for port in column_pass.activations.segment.live
    ]
    for rows in column_pass.activations.arrays:
        rows.tensor().fill_(1)
    step(column_pass)  # creates what is cached: scales, loops, thread pools
    print(READY, flush=True)
    time.sleep(0.2)
    step(column_pass)
    print(DONE, column_pass.runtime.num_bytes, len(column_pass.runtime.rounds(0)), flush=True)


def step(column_pass: ColumnPass) -> None:
    """Run all chunks forward and backward, without exchanges between ranks."""
    runtime, activations = column_pass.runtime, column_pass.activations
    y, aggregates = runtime.pool.alloc(runtime.num_results, column_pass.width), ChunkAggregates(runtime, activations, 0)
    for round_, loaded, result in aggregates.results(AggregateStep.forward(activations.segment, 0)):
        y.write(round_.results.start, result)
        del loaded, result
    gradients = [runtime.zeros(runtime.num_rows, rows.width) for rows in activations.segment.live]
    back = AggregateStep.backward(activations.segment, 0, saved=False, retained=False, on_cpu=True)
    for round_, loaded, backward in aggregates.backward(back, Gradients(live=dict(enumerate(gradients)))):
        backward.back(y.read(round_.results.start, round_.results.stop))
        del loaded, backward
    runtime.pool.free(y, *gradients)


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
