"""Count the rows that cross between parts: source rows, partial sums, or the minimum vertex cover of both.

    WEFT_DATA=shared/data python benchmarks/halo.py --graphs "tolokers;topo_dblp-2010" --parts 4,8 --out NAME
    WEFT_DATA=shared/data python benchmarks/halo.py --fanout 15,10,5 --methods metis --parts 4

Counts are the rows of one aggregate, summed over all pairs of parts, in the forward pass; as many gradients go back.
With --fanout they are summed over all hops of some mini-batches (weft.strategies.split). The columns:

    sources    the rows of remote sources
    partials   a partial sum for each target and remote part
    by pair    for each pair of parts, the smaller of both numbers
    least      the minimum vertex cover (weft.partition.Cover), checked against SciPy's maximum matching

Seconds are the planning time of the slowest part and of all parts, on one thread. To time epochs, use
`benchmarks/dependencies.py --contenders communicated-cover,communicated`.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from kernels import save
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor

import weft
from weft.data import Graph
from weft.data.sampling import parse_fanouts
from weft.partition import Caching, Cover, Hop, make_book, make_dependencies
from weft.strategies.split.sampler import BatchSampler, exchange_requests_locally

GRAPHS = "tolokers;topo_dblp-2010;topo_cnr-2000;topo_soc-Slashdot0902;coauthor_physics;amazon_photo"
NO_CACHING = Caching(costs=torch.zeros(1, 5, dtype=torch.float64), ratio=0.0)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in options.graphs.split(";"):
        bare = name.startswith(("topo_", "rmat"))
        graph = weft.load(name, random_classes=16 if bare else 0, random_features=1 if bare else 0)
        for method in options.methods.split(","):
            for num_parts in map(int, options.parts.split(",")):
                part = make_book(graph, num_parts, method=method).part
                if options.fanout:
                    hops, sampling_seconds = sampled(graph, part, num_parts, options)
                else:
                    sampling_seconds = 0.0
                    hops = [
                        make_dependencies(graph.in_edges, part, rank, num_parts, NO_CACHING).hops[0]
                        for rank in range(num_parts)
                    ]
                counts = counted(hops, check=not options.no_check) | {"drawing_seconds": sampling_seconds}
                rows.append({"graph": name, "method": method, "parts": num_parts, **counts})
                print(line(rows[-1], options.width), flush=True)
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})


def sampled(graph: Graph, part: Tensor, num_parts: int, options: argparse.Namespace) -> tuple[list[Hop], float]:
    """Sample some mini-batches on all parts, and return their hops and the seconds that sampling takes."""
    assert graph.train_mask is not None
    sampler = BatchSampler(
        graph=graph,
        size=num_parts,
        part=part,
        fanouts=parse_fanouts(options.fanout),
        batch_size=min(options.batch_size, int(graph.train_mask.sum())),
        method="uniform",
        seed=0,
    )
    start, hops = time.perf_counter(), list[Hop]()
    for number, vertices in enumerate(sampler.batches(0)[: options.batches]):
        batch = exchange_requests_locally([sampler.sample(vertices, rank, 0, number) for rank in range(num_parts)])
        hops += [hop for rank_batch in batch for hop in rank_batch.hops]
    return hops, time.perf_counter() - start


def counted(hops: list[Hop], *, check: bool) -> dict[str, Any]:
    """Count the rows for each way to exchange them, and time the planning of the minimum vertex cover.

    Args:
        hops: The hops of all parts.
        check: Whether to compare each cover with a maximum matching from SciPy.

    Raises:
        SystemExit: A cover is not of the size of a maximum matching.
    """
    seconds, least, summed, by_pair = [], 0, 0, 0
    for hop in hops:
        start = time.perf_counter()
        cover = Cover.of(hop.block, hop.received)
        seconds.append(time.perf_counter() - start)
        least, summed = least + sum(cover.received), summed + sum(cover.summed)
        by_pair += sum(map(min, hop.received, num_partials(hop)))
        if check and matched(hop) != cover.received:
            raise SystemExit(
                f"the vertex cover has {cover.received} rows, but SciPy's maximum matching has {matched(hop)} edges"
            )
    return {
        "edges": sum(hop.block.num_edges for hop in hops),
        "sources": sum(sum(hop.received) for hop in hops),
        "partials": sum(sum(num_partials(hop)) for hop in hops),
        "by pair": by_pair,
        "least": least,
        "summed_edges": summed,
        "seconds": max(seconds),
        "all_seconds": sum(seconds),
    }


def owner_of(hop: Hop) -> torch.Tensor:
    """Return the part of each remote source, [h] int64."""
    return torch.arange(len(hop.received)).repeat_interleave(torch.tensor(hop.received))


def num_partials(hop: Hop) -> list[int]:
    """Return the number of targets with a source in each remote part."""
    source, target = hop.block.edges()
    remote = source >= hop.num_inputs
    pairs = (owner_of(hop)[source[remote] - hop.num_inputs] * hop.block.num_targets + target[remote]).unique()
    parts: list[int] = torch.bincount(pairs // max(hop.block.num_targets, 1), minlength=len(hop.received)).tolist()
    return parts


def matched(hop: Hop) -> tuple[int, ...]:
    """Return the size of a maximum matching of the edges from each remote part, computed by SciPy."""
    source, target = hop.block.edges()
    sizes = []
    for first, end in pairwise([0, *torch.tensor(hop.received).cumsum(0).tolist()]):
        from_part = (source >= hop.num_inputs + first) & (source < hop.num_inputs + end)
        rows, columns = (source[from_part] - hop.num_inputs - first).numpy(), target[from_part].numpy()
        shape = end - first, hop.block.num_targets
        edges = csr_matrix((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=shape)
        sizes.append(int((maximum_bipartite_matching(edges, perm_type="column") >= 0).sum()))
    return tuple(sizes)


def line(row: dict[str, Any], width: int) -> str:
    ways = "  ".join(
        f"{way} {row[way]:>9,} ({row[way] * width * 4 / 1e6:7.1f} MB)"
        for way in ("sources", "partials", "by pair", "least")
    )
    of_sources, of_partials = (row[way] / max(row["least"], 1) for way in ("sources", "partials"))
    return (
        f"{row['graph']:>22} {row['method']:>8} {row['parts']:2}: {ways}  sources {of_sources:5.2f}x, partials "
        f"{of_partials:5.2f}x of the least  summed for other parts "
        f"{row['summed_edges'] / max(row['edges'], 1):6.1%} of the edges  {row['seconds']:6.2f} s, "
        f"{row['all_seconds']:.2f} s of all parts, sampling {row['drawing_seconds']:.2f} s"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default=GRAPHS, help="graphs to partition, separated by semicolons")
    parser.add_argument("--methods", default="metis,balanced,range")
    parser.add_argument("--parts", default="4,8")
    parser.add_argument(
        "--fanout", help="in-edges to sample per vertex, from the batch outward; default: the full graph"
    )
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=8, help="number of mini-batches to sample")
    parser.add_argument("--width", type=int, default=64, help="columns of a float32 row, to convert rows to MB")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with SciPy's maximum matching")
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
