"""Compare the sampled edges per second of weft and DGL on one thread, for all hops of a batch with relabelling.

    python benchmarks/sampling.py --out NAME
    PYTHONPATH=folder-with-dgl-1.1.3 python benchmarks/sampling.py --contenders weft,dgl,weft-labor,dgl-labor

Contenders take turns batch by batch, on the same training vertices, in one process; a contender whose library is not
installed is skipped. DGL uses NeighborSampler (LaborSampler with -labor) on a graph in CSC format. Fanouts go from the
batch outward. The first rounds do not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported

import torch
from kernels import save
from torch import Tensor

import weft
from weft.data import Graph
from weft.data.sampling import Fanout, Relabeller, epoch_batches, layer_key, parse_fanouts, sample_layer

PRODUCTS = "rmat:vertices=2400k,edges=62m,features=0,classes=0"
CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}
Sampler = Callable[[Tensor, int], tuple[int, int]]  # a batch and its number -> edges and vertices


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in options.graphs.split(";"):
        graph = weft.load(name)
        graph.in_edges.indices.sum()  # reads a memory-mapped graph before the first batch
        print(f"{name}: {graph.num_vertices:,} vertices, {graph.num_edges:,} edges", flush=True)
        for fanouts in options.fanouts.split(";"):
            samplers = {
                contender: sampler
                for contender in options.contenders.split(",")
                if (sampler := make(contender, graph, parse_fanouts(fanouts))) is not None
            }
            for batch_size in map(int, options.batch_sizes.split(",")):
                measured = race(samplers, graph, batch_size, options.rounds, options.warmups, CLOCKS[options.clock])
                rows += [{"graph": name, "fanouts": fanouts, "batch_size": batch_size, **row} for row in measured]
                report(fanouts, batch_size, measured)
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def make(contender: str, graph: Graph, fanouts: tuple[Fanout, ...]) -> Sampler | None:
    """Return the sampler of a contender, or None if its library is not installed."""
    library, _, method = contender.partition("-")
    if library == "weft":
        return weft_sampler(graph, fanouts, method or "uniform")
    try:
        return dgl_sampler(graph, fanouts, method)
    except ImportError as error:
        print(f"{contender} skipped: {error}")
        return None


def weft_sampler(graph: Graph, fanouts: tuple[Fanout, ...], method: str) -> Sampler:
    relabeller = Relabeller(graph.num_vertices)

    def sample(batch: Tensor, number: int) -> tuple[int, int]:
        num_edges, targets = 0, batch
        for hop, fanout in enumerate(fanouts):
            key = layer_key(0, 0, number, hop)
            sample_edges = sample_layer(graph.in_edges, targets, fanout, key=key, method=method, ids=graph.ids)
            _, new = relabeller.relabel(targets, sample_edges.sources)
            num_edges += sample_edges.num_edges
            targets = torch.cat([targets, new])
        return num_edges, len(targets)

    return sample


def dgl_sampler(graph: Graph, fanouts: tuple[Fanout, ...], method: str) -> Sampler:
    import dgl

    dgl_graph = dgl.graph(graph.in_edges.edges(), num_nodes=graph.num_vertices).formats("csc")
    kind = dgl.dataloading.LaborSampler if method == "labor" else dgl.dataloading.NeighborSampler
    sampler = kind(list(fanouts)[::-1])

    def sample(batch: Tensor, number: int) -> tuple[int, int]:  # noqa: ARG001
        vertices, _, blocks = sampler.sample_blocks(dgl_graph, batch)
        return sum(block.num_edges() for block in blocks), len(vertices)

    return sample


def race(
    samplers: dict[str, Sampler], graph: Graph, batch_size: int, rounds: int, warmups: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Time the contenders in turns on the first batches of an epoch over all vertices.

    Args:
        samplers: A sampler for each contender.
        graph: The graph.
        batch_size: Vertices per batch.
        rounds: Number of batches to time.
        warmups: Number of batches before these.
        clock: Returns the time in seconds.

    Returns:
        A row for each contender: edges per second of each batch, and mean numbers of edges and vertices.
    """
    batches = epoch_batches(torch.arange(graph.num_vertices), batch_size, seed=0, epoch=0)
    rates: dict[str, list[float]] = {name: [] for name in samplers}
    counts: dict[str, list[tuple[int, int]]] = {name: [] for name in samplers}
    for number in range(rounds + warmups):
        for name, sampler in samplers.items():
            start = clock()
            edges, vertices = sampler(batches[number % len(batches)], number)
            seconds = clock() - start
            if number >= warmups:
                rates[name].append(edges / seconds)
                counts[name].append((edges, vertices))
    return [
        {
            "contender": name,
            "edges_per_second": rates[name],
            "edges": statistics.fmean(edges for edges, _ in counts[name]),
            "vertices": statistics.fmean(vertices for _, vertices in counts[name]),
        }
        for name in samplers
    ]


def report(fanouts: str, batch_size: int, rows: list[dict[str, Any]]) -> None:
    """Print a line for each contender: median, least and most edges per second, and its time relative to the first."""
    first = statistics.median(rows[0]["edges_per_second"]) if rows else 0.0
    for row in rows:
        rates = row["edges_per_second"]
        median = statistics.median(rates)
        print(
            f"{fanouts:>9} batch {batch_size:>5,} {row['contender']:>14}: {median / 1e6:6.1f} M edges/s "
            f"({min(rates) / 1e6:.1f} to {max(rates) / 1e6:.1f})  {first / median:5.2f}x the time of the first  "
            f"{row['edges']:>12,.0f} edges {row['vertices']:>10,.0f} vertices",
            flush=True,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--graphs", default=f"{PRODUCTS};topo_dblp-2010", help="graphs to sample from, separated by semicolons"
    )
    parser.add_argument(
        "--fanouts", default="20,20,20;15,10,5", help="fanouts from the batch outward, separated by semicolons"
    )
    parser.add_argument("--batch-sizes", default="1024,4096")
    parser.add_argument("--contenders", default="weft,dgl", help="weft or dgl, also with -labor; weft-weighted")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="wall: elapsed time; thread: CPU time of the thread, for a busy machine",
    )
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
