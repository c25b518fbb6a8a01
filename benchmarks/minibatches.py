"""Measure what split mini-batches save: rows loaded, edges computed, balance, seconds (GSplit, tables 1, 2, 4 and 5).

    python benchmarks/minibatches.py --graphs "topo_dblp-2010;tolokers" --batch-sizes 1024,4096 --out NAME

One process samples the batches for all ranks, without a network. `sampled` has a micro-batch for each rank; `split` has
one mini-batch, divided by the owners of the vertices, which `split` chooses itself or --partition gives. Rows loaded
are counted for caches of several sizes, as --cache-memory would allow them. Seconds are those of one thread for all
ranks together, and for `split` also for one rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from kernels import save

import weft
from weft.comm import Group
from weft.data import Graph
from weft.nn import Workload, make_model
from weft.partition import make_book
from weft.strategies.split.feature_cache import FeatureCache
from weft.strategies.split.plan import BatchOptions, MiniBatchPlan, SampledPlan, SplitPlan
from weft.strategies.split.sampler import SampledBatch, exchange_requests_locally

SHARES = (0.0, 0.1, 0.25)
"""Cache sizes, as fractions of all rows."""


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    rows = []
    for name in options.graphs.split(";"):
        bare = name.startswith(("topo_", "rmat"))
        graph = weft.load(name, random_features=1 if bare else 0, random_classes=16 if bare else 0)
        print(f"{name}: {graph.num_vertices:,} vertices, {graph.num_edges:,} edges", flush=True)
        assert graph.train_mask is not None
        for batch_size in map(int, options.batch_sizes.split(",")):
            if batch_size > int(graph.train_mask.sum()):
                continue
            row = {"graph": name, **measure(graph, batch_size, options)}
            rows.append(row)
            report(row)
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def measure(graph: Graph, batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of a graph and a batch size."""
    model = make_model("sage", graph.num_features, graph.num_classes, layers=options.fanout.count(",") + 1)
    work, ranks = Workload(model, graph), options.ranks
    part = make_book(graph, ranks, method=options.partition).part if options.partition else None
    batch_options = BatchOptions(batch_size=str(batch_size), fanout=options.fanout, sampling=options.sampling)
    split = SplitPlan(work, ranks, replace(batch_options, partition=part))
    plans = {
        "split": split,
        "sampled": SampledPlan(work, ranks, batch_options),
        "one rank": SplitPlan(work, 1, batch_options),
    }
    counts: dict[str, Any] = {"batch_size": batch_size, "training": len(split.sampler.training_vertices)}
    for name, plan in plans.items():
        start = time.perf_counter()
        batches = sample(plan, options.batches)
        counts[f"{name}: seconds"] = time.perf_counter() - start
        counts[f"{name}: edges"] = sum(edges(rank_batch) for batch in batches for rank_batch in batch)
        for share in SHARES:
            counts[f"{name}: rows at {share:.0%}"] = rows_missed(plan, batches, share)
        if name == "split":
            counts |= balance(batches)
    return counts


def sample(plan: MiniBatchPlan, most: int) -> list[list[SampledBatch]]:
    """Return the first `most` batches of an epoch, by batch and rank."""
    sampler = plan.sampler
    return [
        exchange_requests_locally([sampler.sample(vertices, rank, 0, number) for rank in range(plan.size)])
        for number, vertices in enumerate(sampler.batches(0)[:most])
    ]


def rows_missed(plan: MiniBatchPlan, batches: Sequence[Sequence[SampledBatch]], share: float) -> int:
    """Return the number of rows that the batches load from the graph because the caches lack them.

    Args:
        plan: The strategy's plan.
        batches: Batches of all ranks.
        share: Size of each rank's cache, as a fraction of all rows.
    """
    graph, group = plan.work.graph, Group()
    assert graph.x is not None
    memory = round(share * graph.num_vertices) * graph.num_features * plan.work.itemsize
    caching = type(plan)(plan.work, plan.size, replace(plan.options, cache_memory=memory))
    for rank in range(plan.size):
        cached = caching.cached_vertices(rank)
        cache = FeatureCache(graph.x, cached, group.device, plan.work.dtype, group)
        for batch in batches:
            cache[batch[rank].rows]
    return group.meter.counts.sampled["cache_misses"]


def edges(batch: SampledBatch) -> int:
    """Return the number of edges of a batch, over all hops."""
    return sum(hop.block.num_edges for hop in batch.hops)


def balance(batches: Sequence[Sequence[SampledBatch]]) -> dict[str, float]:
    """Return the edge skew and the fraction of local edges.

    The skew is the mean over batches of (most - least) / mean of the ranks' edges.
    """
    loads = torch.tensor([[edges(rank_batch) for rank_batch in batch] for batch in batches], dtype=torch.float64)
    skew = ((loads.amax(1) - loads.amin(1)) / loads.mean(1)).mean().item()
    hops = [hop for batch in batches for rank_batch in batch for hop in rank_batch.hops]
    local = sum(int((hop.block.indices < hop.num_inputs).sum()) for hop in hops)
    return {"edge skew": skew, "local edges": local / loads.sum().item()}


def report(row: dict[str, Any]) -> None:
    loaded = ", ".join(
        f"{share:.0%} {row[f'sampled: rows at {share:.0%}'] / max(row[f'split: rows at {share:.0%}'], 1):.2f}x"
        for share in SHARES
    )
    print(
        f"  batch {row['batch_size']:>6}  edges of micro-batches {row['sampled: edges'] / row['split: edges']:.2f}x"
        f"  rows loaded by cache {loaded}  skew {row['edge skew']:.3f}  local {row['local edges']:.2f}"
        f"  sampling {row['sampled: seconds']:.2f} s sampled, {row['split: seconds']:.2f} s split, "
        f"{row['one rank: seconds']:.2f} s one rank",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="topo_dblp-2010", help="graphs to sample from, separated by semicolons")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--partition", default="", help="method of weft partition; empty: the partition that split chooses"
    )
    parser.add_argument("--fanout", default="15,10,5", help="in-edges to sample per vertex, from the batch outward")
    parser.add_argument("--sampling", default="uniform")
    parser.add_argument("--batch-sizes", default="1024,4096")
    parser.add_argument("--batches", type=int, default=40, help="largest number of batches per epoch")
    parser.add_argument("--out", help="write the results to benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
