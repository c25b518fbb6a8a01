"""Partition graphs by every method, and compare `balanced` with METIS.

    python benchmarks/partition.py --graphs rmat:vertices=60k,edges=1m --parts 4,8 --out NAME

Each line has the vertices, in-edges and remote vertices as least/most over the parts, and their largest deviation from
the mean. The cut and the number of remote vertices are also given as multiples of those of METIS. Seconds are those of
the method.
"""

from __future__ import annotations

import argparse
from typing import Any

from kernels import save

import weft
from weft.partition import METHODS, PartitionOptions, Quality, make_book

REMOTE_TARGET, LOAD_TARGET, CUT_TARGET = 0.95, 0.05, 1.3  # least/most; deviation from the mean; multiple of METIS


def main() -> None:
    options = parse()
    rows: list[dict[str, Any]] = []
    for name in options.graphs.split(";"):
        graph = weft.load(name)
        for num_parts in map(int, options.parts.split(",")):
            print(f"{name}: {graph.num_vertices:,} vertices, {graph.num_edges:,} edges, {num_parts} parts", flush=True)
            qualities = {
                method: make_book(graph, num_parts, method=method, options=PartitionOptions(seed=options.seed)).quality
                for method in options.methods.split(",")
            }
            for method, quality in qualities.items():
                print(line(method, quality, qualities.get("metis", quality)), flush=True)
                rows.append({"graph": name, "parts": num_parts, "method": method, "quality": quality.record()})
    print(
        f"targets of balanced: remote least/most above {REMOTE_TARGET}, vertices and in-edges within "
        f"{LOAD_TARGET:.0%}, at most {CUT_TARGET} times the cut of metis"
    )
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--graphs", default="rmat:vertices=60k,edges=1m", help="graphs to partition, separated by semicolons"
    )
    parser.add_argument("--parts", default="4,8", help="numbers of parts, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


def line(method: str, quality: Quality, metis: Quality) -> str:
    loads = (quality.vertices, quality.in_edges, quality.remote)
    vertices, in_edges, remote = (f"{least_to_most(load):.3f} ({distance(load):5.1%})" for load in loads)
    return (
        f"{method:>9}: vertices {vertices}  in-edges {in_edges}  remote {remote}  cut {quality.cut:>11,} "
        f"({quality.cut / max(metis.cut, 1):.2f}x)  replication {quality.replication:.3f} "
        f"({sum(quality.remote) / max(sum(metis.remote), 1):.2f}x remote)  {quality.seconds:7.2f} s"
    )


def least_to_most(load: tuple[int, ...]) -> float:
    return min(load) / max(load) if max(load) else 1.0


def distance(load: tuple[int, ...]) -> float:
    """Return the largest deviation from the mean, relative to the mean."""
    mean = sum(load) / len(load)
    return max(abs(value - mean) for value in load) / mean if mean else 0.0


if __name__ == "__main__":
    main()
