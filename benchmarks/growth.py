"""Time weft's training epochs on graphs of several sizes, to see whether the time per edge stays the same.

    python benchmarks/growth.py --model gcn --edges 4m,40m --out NAME

The graphs are R-MAT graphs of one mean degree, so that vertices (and the dense work) grow with the edges. Self-loops
and repeated edges are removed; the edges that remain are counted. Each size runs in its own process; they take turns.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from epoch import start_contender
from kernels import save
from processes import ask, take_turns

from weft.utils.recipe import number

TARGET = 1.5  # largest ratio of seconds per edge to the smallest size


def main() -> None:
    options = parse()
    sizes = [round(number("growth", "edges", text)) for text in options.edges.split(",")]
    pipes = {str(size): start_contender("weft", vars(options) | {"graph": recipe(size, options)}) for size in sizes}
    graphs = {size: pipe.recv()["graph"] for size, pipe in pipes.items()}
    take_turns(pipes, options.warmups)
    seconds = take_turns(pipes, options.rounds)
    rows: list[dict[str, Any]] = []
    for size, graph in graphs.items():
        per_edge = statistics.median(seconds[size]) / graph["edges"]
        row = {"graph": graph, "seconds": seconds[size], "seconds_per_edge": per_edge}
        row["ratio"] = per_edge / (rows[0] if rows else row)["seconds_per_edge"]
        row["peak_bytes"] = ask(pipes[size], "peak")
        rows.append(row)
        print(line(row), flush=True)
    print(f"{options.model}, {options.threads} threads: the target is at most {TARGET}x")
    if options.out:
        save(options.out, {"options": vars(options), "target": TARGET, "rows": rows})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", default="4m,40m", help="numbers of edges, the smallest first")
    parser.add_argument("--degree", type=float, default=23)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--classes", type=int, default=40)
    parser.add_argument("--model", default="gcn", choices=("gcn", "sage", "gat"))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--warmups", type=int, default=2, help="number of rounds before those that count")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


def recipe(num_edges: int, options: argparse.Namespace) -> str:
    vertices = max(1, round(num_edges / options.degree))
    return f"rmat:vertices={vertices},edges={num_edges},features={options.features},classes={options.classes}"


def line(row: dict[str, Any]) -> str:
    graph, seconds = row["graph"], row["seconds"]
    return (
        f"{graph['edges']:>12,} edges {graph['vertices']:>11,} vertices: {statistics.median(seconds):8.3f} s "
        f"({min(seconds):.3f} to {max(seconds):.3f})  {row['seconds_per_edge'] * 1e9:8.2f} ns per edge, "
        f"{row['ratio']:.2f}x the smallest size  {row['peak_bytes'] / 1e9:6.2f} GB"
    )


if __name__ == "__main__":
    main()
