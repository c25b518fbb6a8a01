"""What splitting a mini-batch saves (GSplit, tables 1, 2, 4 and 5): rows loaded, edges computed, balance, seconds.

    python benchmarks/minibatches.py --graphs "topo_dblp-2010;tolokers" --batch-sizes 1024,4096 --out NAME

Batches are drawn for all ranks in one process, without a network. `sampled`: a micro-batch of each rank; `split`: one
mini-batch by the owners of METIS. Caches hold the rows that were read most in an epoch before: of all vertices on each
rank (sampled), or of its own (split). Seconds are of one thread, of all ranks together; split's also of one rank alone.
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
from torch import Tensor

import weft
from weft.data import Graph
from weft.data.sampling import parse_fanouts
from weft.partition import Dependencies, make_book
from weft.strategies.split.sampler import BatchSampler, Drawn, ask_each_other

SHARES = (0.0, 0.1, 0.25)
BEFORE, NOW = 0, 1  # epochs: what is cached is chosen by the one, and counted in the other


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    rows = []
    for name in options.graphs.split(";"):
        bare = name.startswith(("topo_", "rmat"))
        graph = weft.load(name, random_features=1 if bare else 0, random_classes=16 if bare else 0)
        part = make_book(graph, options.ranks, method=options.partition).part
        print(f"{name}: {graph.num_vertices:,} vertices, {graph.num_edges:,} edges", flush=True)
        for batch_size in map(int, options.batch_sizes.split(",")):
            row = {"graph": name, **measure(graph, part, batch_size, options)}
            rows.append(row)
            report(row)
    if options.out:
        save(options.out, {"options": vars(options), "rows": rows})
    return 0


def measure(graph: Graph, part: Tensor, batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """One line of each table."""
    split = BatchSampler(
        graph=graph,
        size=options.ranks,
        part=part,
        fanouts=parse_fanouts(options.fanout),
        batch_size=batch_size,
        method=options.sampling,
        seed=0,
    )
    samplers = {"split": split, "sampled": replace(split, part=None), "one rank": replace(split, part=None, size=1)}
    found: dict[str, Any] = {"batch_size": batch_size, "training": len(split.training_vertices)}
    for name, sampler in samplers.items():
        read = sum((rows_read(batch, graph) for batch in epoch(sampler, BEFORE, options.batches)), torch.tensor(0))
        start = time.perf_counter()
        batches = list(epoch(sampler, NOW, options.batches))
        found[f"{name}: seconds"] = time.perf_counter() - start
        found[f"{name}: edges"] = sum(edges(one) for batch in batches for one in batch)
        for share in SHARES:
            cached = [most_read(read, sampler, rank, share) for rank in range(sampler.size)]
            missed = (
                int((~kept[one.rows]).sum()) for batch in batches for kept, one in zip(cached, batch, strict=True)
            )
            found[f"{name}: rows at {share:.0%}"] = sum(missed)
        if name == "split":
            found |= balance(batches)
    return found


def epoch(sampler: BatchSampler, number: int, most: int) -> Any:
    """An epoch's first batches on all ranks, one by one."""
    for step, vertices in enumerate(sampler.batches(number)[:most]):
        yield ask_each_other([sampler.draw(vertices, rank, number, step) for rank in range(sampler.size)])


def rows_read(batch: Sequence[Dependencies], graph: Graph) -> Tensor:
    """How many ranks read each vertex's features: int64 [N]."""
    return torch.bincount(torch.cat([one.rows for one in batch]), minlength=graph.num_vertices)


def most_read(read: Tensor, sampler: BatchSampler, rank: int, share: float) -> Tensor:
    """The vertices whose features a rank has in its cache, a share of all vertices at most: bool [N]."""
    known = read if sampler.part is None else read.masked_fill(sampler.part != rank, -1)
    chosen = known.argsort(descending=True)[: round(share * len(read))]
    cached = torch.zeros(len(read), dtype=torch.bool)
    cached[chosen[known[chosen] >= 0]] = True
    return cached


def edges(drawn: Dependencies) -> int:
    return sum(hop.block.num_edges for hop in drawn.hops)


def balance(batches: Sequence[Sequence[Drawn]]) -> dict[str, float]:
    """Edge skew, the mean over batches of (most - least) / mean of the ranks' edges; and the share of local edges."""
    loads = torch.tensor([[edges(one) for one in batch] for batch in batches], dtype=torch.float64)
    skew = ((loads.amax(1) - loads.amin(1)) / loads.mean(1)).mean().item()
    hops = [hop for batch in batches for one in batch for hop in one.hops]
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
        f"  drawing {row['sampled: seconds']:.2f} s sampled, {row['split: seconds']:.2f} s split, "
        f"{row['one rank: seconds']:.2f} s one rank",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="topo_dblp-2010", help="separated by semicolons")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--partition", default="metis")
    parser.add_argument("--fanout", default="15,10,5", help="from the batch outward")
    parser.add_argument("--sampling", default="uniform")
    parser.add_argument("--batch-sizes", default="1024,4096")
    parser.add_argument("--batches", type=int, default=40, help="of an epoch, at most")
    parser.add_argument("--out", help="a name: writes benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
