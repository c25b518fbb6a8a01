"""The order of a rank's rows, and what its chunks send and wait for (G3, sections 5.2 and 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.parallel.chunks.run.chunk_halos import HaloPlan
from weft.partition import Dependencies, Hop
from weft.partition.dependencies import edge_positions
from weft.runtime import native


@dataclass(frozen=True, kw_only=True, eq=False)
class OrderedRank:
    """A rank's share of the work with its rows in order, those of other ranks behind them as rows of its own."""

    needed: Dependencies
    halo: tuple[Tensor, ...]
    """By rank: which of that rank's rows are here, int64, ascending."""


def order_ranks(everyone: Sequence[Dependencies], *, priority: bool) -> list[OrderedRank]:
    """All ranks' shares; priority: rows that cross come first, then others as a breadth-first search meets them."""
    orders = [_order(rank, everyone, priority=priority) for rank in range(len(everyone))]
    places = [order.argsort() for order in orders]
    return [_ordered(needed, order, places, everyone) for needed, order in zip(everyone, orders, strict=True)]


def _order(rank: int, everyone: Sequence[Dependencies], *, priority: bool) -> Tensor:
    """Which of a rank's rows comes i-th: int64 [n]."""
    needed = everyone[rank]
    num_own = needed.num_own
    if not (priority and needed.hops):
        return torch.arange(num_own)
    source, target = (ends.long() for ends in needed.hops[0].block.edges())
    local = source < num_own
    crosses = torch.zeros(num_own, dtype=torch.bool)
    crosses[target[~local]] = True
    for other, each in enumerate(everyone):
        crosses[torch.searchsorted(needed.owned, _fetched_of(each, rank))] |= other != rank
    first = crosses.nonzero().view(-1)
    root = torch.tensor([num_own])  # an edge from here to each of them, so that one search begins at all
    linked = Adjacency.from_edges(
        torch.cat([source[local], root.expand(len(first))]),
        torch.cat([target[local], first]),
        num_sources=num_own + 1,
        num_targets=num_own + 1,
    )
    out, starts = linked.transpose, torch.cat([root, torch.arange(num_own)])
    found = native.breadth_first(linked.indptr, linked.indices, out.indptr, out.indices, starts).long()
    return found[found < num_own]


def _fetched_of(needed: Dependencies, rank: int) -> Tensor:
    """The vertices of a rank that are fetched, ascending: int64."""
    first, end = torch.tensor([0, *needed.hops[0].received]).cumsum(0)[rank : rank + 2].tolist()
    return needed.hops[0].fetched[first:end]


def _ordered(
    needed: Dependencies, order: Tensor, places: Sequence[Tensor], everyone: Sequence[Dependencies]
) -> OrderedRank:
    """A share of the work in another order; places: by rank, where each of its rows stands."""
    if not needed.hops:
        return OrderedRank(needed=replace(needed, rows=needed.owned[order]), halo=tuple(order[:0] for _ in everyone))
    hop, num_own = needed.hops[0], needed.num_own
    fetched = [_fetched_of(needed, rank) for rank in range(len(everyone))]
    found = [
        place[torch.searchsorted(each.owned, vertices)]
        for place, each, vertices in zip(places, everyone, fetched, strict=True)
    ]
    halo = [one.sort() for one in found]
    first, moved = num_own, [order.argsort()]
    for one in halo:
        moved.append(first + one.indices.argsort())
        first += len(one.indices)
    block = hop.block
    degree = block.indptr.diff()[order]
    indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    edges = edge_positions(indptr, block.indptr[:-1][order])
    made = Hop(
        block=Adjacency(
            indptr=indptr,
            indices=torch.cat(moved)[block.indices[edges].long()].to(block.indices.dtype),
            num_sources=first,
            weight=None if block.weight is None else block.weight[edges],
        ),
        num_inputs=first,
        fetched=hop.fetched[:0],
        received=(0,),
        first_edges=hop.first_edges[order],
    )
    behind = [vertices[one.indices] for vertices, one in zip(fetched, halo, strict=True)]
    rows = torch.cat([needed.owned[order], *behind])
    return OrderedRank(
        needed=replace(needed, rows=rows, hops=(made,) * len(needed.hops)), halo=tuple(one.values for one in halo)
    )


def halo_plan(
    ranks: Sequence[OrderedRank], bounds: Sequence[Sequence[int]], rank: int, *, at_once: bool
) -> HaloPlan | None:
    """What a rank's chunks send and wait for; bounds: by rank, where its chunks begin and end. None: no aggregates."""
    here = ranks[rank]
    if not here.needed.hops:
        return None
    size, num_chunks, num_own = len(ranks), len(bounds[rank]) - 1, here.needed.num_own
    ends = [torch.tensor(each) for each in bounds]
    block = here.needed.hops[0].block

    firsts = torch.tensor([0, *(len(rows) for rows in here.halo)]).cumsum(0) + num_own
    receives = []
    for first, rows, each in zip(firsts.tolist(), here.halo, ends, strict=False):
        starts = (first + torch.searchsorted(rows, each)).tolist()
        receives.append(tuple(slice(start, end) for start, end in pairwise(starts)))
    asked = [other.halo[rank] for other in ranks]
    cuts = [torch.searchsorted(rows, ends[rank]).tolist() for rows in asked]
    sends = tuple(
        tuple(rows[cut[chunk] : cut[chunk + 1]] for rows, cut in zip(asked, cuts, strict=True))
        for chunk in range(num_chunks)
    )
    unit_ends = torch.tensor([*bounds[rank][1:], *(span.stop for each in receives for span in each)])
    units = torch.searchsorted(unit_ends, block.indices.long(), right=True)  # own chunks, then those of all ranks
    chunk_of = torch.arange(num_chunks).repeat_interleave(block.indptr[ends[rank]].diff())
    read = torch.zeros(num_chunks, num_chunks * (size + 1), dtype=torch.bool)
    read[chunk_of, units] = True
    read[:, :num_chunks] |= torch.eye(num_chunks, dtype=torch.bool)  # a chunk's targets have rows of their own
    number = torch.arange(num_chunks)
    needs = (read.view(num_chunks, size + 1, num_chunks) * (number + 1)).amax(2)
    last = (read * (number + 1)[:, None]).amax(0).view(size + 1, num_chunks)
    done: list[list[tuple[int, int]]] = [[] for _ in range(num_chunks)]
    for owner, chunk in (last[1:] > 0).nonzero().tolist():
        done[int(last[1 + owner, chunk]) - 1].append((owner, chunk))
    return HaloPlan(
        sends=sends,
        receives=tuple(receives),
        reads_own=tuple(needs[:, 0].tolist()),
        reads=tuple(tuple(each) for each in needs[:, 1:].tolist()),
        own_done=tuple(last[0].tolist()),
        done_after=tuple(tuple(each) for each in done),
        at_once=at_once,
    )
