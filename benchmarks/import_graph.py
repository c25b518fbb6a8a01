"""Measure the time and the memory for converting a binary edge list into a stored graph.

    python benchmarks/import_graph.py --edges 50m --vertices 5m --out NAME

One process writes the edges (.npy) and computes a checksum that does not depend on their order. In every round a new
process loads the file, transposes, saves and opens the graph, with the file in the page cache. Its peak memory includes
Python, PyTorch and mapped files. Then the checksums of the stored edges, in both directions, are compared with the
file's; if one differs, the script stops without a result.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernels import save
from numpy.typing import NDArray
from processes import ask, start
from torch import Tensor

import weft
from weft.data import Graph
from weft.data.io.generate import rmat_block
from weft.runtime.memory.limit import peak_memory_bytes
from weft.utils.recipe import number

BLOCK_EDGES = 1 << 20
TARGET_SECONDS, TARGET_RATIO = 15, 3  # for 50 million edges; peak memory relative to the stored graph
MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64: Steele, Lea, Flood 2014


def main() -> None:
    options = parse()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        edges = Path(folder, "edges.npy")
        sums = start(write_and_check, vars(options), edges)
        expected = sums.recv()
        for turn in range(options.rounds):
            store = Path(folder, f"round-{turn}")
            rounds.append(start(import_edges, edges, store, options.threads).recv())
            actual = ask(sums, store)
            if actual != expected:
                sys.exit(f"NO RESULT: the stored edges differ from those of the file: {actual}, expected {expected}")
    report(options, rounds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", default="50m")
    parser.add_argument("--vertices", default="5m")
    parser.add_argument("--kind", default="rmat", choices=("rmat", "uniform"))
    parser.add_argument("--dtype", default="int32", choices=("int32", "int64"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


def import_edges(path: Path, store: Path, threads: int, pipe: Connection) -> None:
    """Import the edges once, and send the seconds and the peak memory of each step, and the size of the stored graph.

    Args:
        path: File of the edges.
        store: Folder to write the graph to.
        threads: Number of threads.
        pipe: Connection to the parent.
    """
    torch.set_num_threads(threads)
    idle, steps = peak_memory_bytes(), {}

    def step(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = work(*arguments)
        steps[name] = {"seconds": time.perf_counter() - begin, "peak_bytes": peak_memory_bytes()}
        return result

    graph = step("load", weft.load, path)
    step("transpose", getattr, graph.in_edges, "transpose")
    step("degree", getattr, graph.in_edges, "degree")
    step("save", graph.save, store)
    del graph
    step("open", Graph.open, store)
    stored = sum(file.stat().st_size for file in store.iterdir())
    pipe.send({"steps": steps, "idle_bytes": idle, "peak_bytes": peak_memory_bytes(), "stored_bytes": stored})


def write_and_check(options: dict[str, Any], path: Path, pipe: Connection) -> None:
    """Write random edges and send their checksums; then send the checksums of each graph whose folder is received.

    Args:
        options: The command line options.
        path: File to write.
        pipe: Connection to the parent.
    """
    num_edges, num_vertices = (round(number("import", key, options[key])) for key in ("edges", "vertices"))
    edges = np.lib.format.open_memmap(path, mode="w+", dtype=options["dtype"], shape=(2, num_edges))
    total = filled = 0
    for block in draw(options["kind"], num_vertices):
        block = block[:, : num_edges - filled]
        edges[:, filled : filled + block.shape[1]] = block
        total, filled = total + checksum(*block), filled + block.shape[1]
        if filled == num_edges:
            break
    edges.flush()
    pipe.send(dict.fromkeys(("in-edges", "transpose"), (num_edges, total % 2**64)))
    while True:
        try:
            graph = Graph.open(pipe.recv(), verify=False)
        except EOFError:
            return
        forward, back = graph.in_edges, graph.in_edges.transpose
        pipe.send(
            {
                "in-edges": check_rows(forward.indptr, forward.indices, backwards=False),
                "transpose": check_rows(back.indptr, back.indices, backwards=True),
            }
        )


def draw(kind: str, num_vertices: int) -> Iterator[NDArray[Any]]:
    """Yield blocks of random edges without end: sources and targets, [2, edges of the block]."""
    random = np.random.default_rng(0)
    levels = (num_vertices - 1).bit_length()
    while True:
        if kind == "uniform":
            yield random.integers(0, num_vertices, (2, BLOCK_EDGES))
        else:
            pairs = rmat_block(levels, BLOCK_EDGES, random, np.int64)
            yield pairs[:, (pairs < num_vertices).all(0)]


def check_rows(indptr: Tensor, indices: Tensor, *, backwards: bool) -> tuple[int, int]:
    """Return the number of edges and their checksum, or -1 if the indices of a row do not ascend.

    Args:
        indptr: Start of each row, [n + 1].
        indices: Columns of the entries, [E].
        backwards: Whether rows are sources (the transpose), not targets.
    """
    pointers, columns, total = indptr.numpy(), indices.numpy(), 0
    for begin in range(0, len(columns), BLOCK_EDGES):
        ends = columns[begin : begin + BLOCK_EDGES].astype(np.int64)
        rows = np.searchsorted(pointers, np.arange(begin, begin + len(ends)), side="right") - 1
        if np.any((np.diff(ends) < 0) & (np.diff(rows) == 0)):
            return len(columns), -1
        total += checksum(rows, ends) if backwards else checksum(ends, rows)
    return len(columns), total % 2**64


def checksum(source: NDArray[Any], target: NDArray[Any]) -> int:
    """Return the sum of a hash of every edge, which does not depend on the order of the edges."""
    bits = (source.astype(np.uint64) << np.uint64(32)) ^ target.astype(np.uint64)
    for factor, shift in zip(MIX, (30, 27), strict=True):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return int((bits ^ (bits >> np.uint64(31))).sum())


def report(options: argparse.Namespace, rounds: list[dict[str, Any]]) -> None:
    """Print the seconds and the peak memory of each step; write them to a file if --out is set."""
    kind = f"{options.kind} edges as {options.dtype}"
    print(f"{options.edges} {kind}, {options.vertices} vertices, {options.threads} threads")
    for name in rounds[0]["steps"]:
        steps = [turn["steps"][name] for turn in rounds]
        peak = statistics.median(step["peak_bytes"] for step in steps)
        print(f"{name:>10} {spread([step['seconds'] for step in steps])} s  {peak / 1e9:6.2f} GB peak so far")
    totals = [sum(step["seconds"] for step in turn["steps"].values()) for turn in rounds]
    print(f"{'total':>10} {spread(totals)} s  target for 50m edges: {TARGET_SECONDS} s")
    ratios = [turn["peak_bytes"] / turn["stored_bytes"] for turn in rounds]
    print(f"{'stored':>10} {rounds[0]['stored_bytes'] / 1e9:8.3f} GB")
    print(f"{'idle':>10} {rounds[0]['idle_bytes'] / 1e9:8.3f} GB before the load")
    print(f"{'peak':>10} {spread(ratios)} times the stored graph  target: {TARGET_RATIO}")
    if options.out:
        save(options.out, {"options": vars(options), "target": [TARGET_SECONDS, TARGET_RATIO], "rounds": rounds})


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
