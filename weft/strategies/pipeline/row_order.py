"""Order of a rank's rows, and the rows that its chunks send and wait for (G3, sections 5.2 and 5.3)."""

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
    """Rows and edges of a rank with its rows in order, followed by those of other ranks as if they were its own."""

    needed: Dependencies
    """Rows that the rank computes or receives, and its edges."""
    halo: tuple[Tensor, ...]
    """Rows of each other rank that this rank receives, int64, ascending, by rank."""


def order_ranks(all_ranks: Sequence[Dependencies], *, priority: bool) -> list[OrderedRank]:
    """Return rows and edges of all ranks in order.

    Args:
        all_ranks: Dependencies of all ranks.
        priority: True to place rows that other ranks read first, and then the others in the order of a breadth-first
            search from them.
    """
    orders = [_order(rank, all_ranks, priority=priority) for rank in range(len(all_ranks))]
    positions = [order.argsort() for order in orders]
    return [_ordered(needed, order, positions, all_ranks) for needed, order in zip(all_ranks, orders, strict=True)]


def _order(rank: int, all_ranks: Sequence[Dependencies], *, priority: bool) -> Tensor:
    """Return the row of a rank that comes i-th, int64 [n]."""
    needed = all_ranks[rank]
    num_own = needed.num_own
    if not (priority and needed.hops):
        return torch.arange(num_own)
    source, target = (ends.long() for ends in needed.hops[0].block.edges())
    local = source < num_own
    is_shared = torch.zeros(num_own, dtype=torch.bool)
    is_shared[target[~local]] = True
    for other, other_needed in enumerate(all_ranks):
        is_shared[torch.searchsorted(needed.owned, _fetched_of(other_needed, rank))] |= other != rank
    first_rows = is_shared.nonzero().view(-1)
    # Breadth-first search over local edges from an extra vertex, which has an edge to each row that others read.
    root = torch.tensor([num_own])
    edges = Adjacency.from_edges(
        torch.cat([source[local], root.expand(len(first_rows))]),
        torch.cat([target[local], first_rows]),
        num_sources=num_own + 1,
        num_targets=num_own + 1,
    )
    transpose, starts = edges.transpose, torch.cat([root, torch.arange(num_own)])
    order = native.breadth_first(edges.indptr, edges.indices, transpose.indptr, transpose.indices, starts).long()
    return order[order < num_own]


def _fetched_of(needed: Dependencies, rank: int) -> Tensor:
    """Return the vertices of a rank that are fetched, int64, ascending."""
    first, end = torch.tensor([0, *needed.hops[0].received]).cumsum(0)[rank : rank + 2].tolist()
    return needed.hops[0].fetched[first:end]


def _ordered(
    needed: Dependencies, order: Tensor, positions: Sequence[Tensor], all_ranks: Sequence[Dependencies]
) -> OrderedRank:
    """Return rows and edges of a rank in another order; `positions` has the position of each row of every rank."""
    if not needed.hops:
        return OrderedRank(needed=replace(needed, rows=needed.owned[order]), halo=tuple(order[:0] for _ in all_ranks))
    hop, num_own = needed.hops[0], needed.num_own
    fetched = [_fetched_of(needed, rank) for rank in range(len(all_ranks))]
    fetched_rows = [
        rank_positions[torch.searchsorted(other.owned, vertices)]
        for rank_positions, other, vertices in zip(positions, all_ranks, fetched, strict=True)
    ]
    halo = [sorted_rows.sort() for sorted_rows in fetched_rows]
    num_rows, new_rows = num_own, [order.argsort()]
    for sorted_rows in halo:
        new_rows.append(num_rows + sorted_rows.indices.argsort())
        num_rows += len(sorted_rows.indices)
    block = hop.block
    degree = block.indptr.diff()[order]
    indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    edges = edge_positions(indptr, block.indptr[:-1][order])
    ordered_hop = Hop(
        block=Adjacency(
            indptr=indptr,
            indices=torch.cat(new_rows)[block.indices[edges].long()].to(block.indices.dtype),
            num_sources=num_rows,
            weight=None if block.weight is None else block.weight[edges],
        ),
        num_inputs=num_rows,
        fetched=hop.fetched[:0],
        received=(0,),
        first_edges=hop.first_edges[order],
    )
    halo_vertices = [vertices[sorted_rows.indices] for vertices, sorted_rows in zip(fetched, halo, strict=True)]
    rows = torch.cat([needed.owned[order], *halo_vertices])
    return OrderedRank(
        needed=replace(needed, rows=rows, hops=(ordered_hop,) * len(needed.hops)),
        halo=tuple(sorted_rows.values for sorted_rows in halo),
    )


def halo_plan(
    ranks: Sequence[OrderedRank], bounds: Sequence[Sequence[int]], rank: int, *, at_once: bool
) -> HaloPlan | None:
    """Return the rows that a rank's chunks send and wait for; None if there are no aggregates.

    Args:
        ranks: Rows and edges of all ranks, in order.
        bounds: Bounds of the chunks of each rank.
        rank: The rank.
        at_once: True to exchange the rows of all chunks together.
    """
    own_rank = ranks[rank]
    if not own_rank.needed.hops:
        return None
    size, num_chunks, num_own = len(ranks), len(bounds[rank]) - 1, own_rank.needed.num_own
    ends = [torch.tensor(rank_bounds) for rank_bounds in bounds]
    block = own_rank.needed.hops[0].block

    # 1. Rows that arrive from each chunk of each rank, and rows that each chunk sends to each rank.
    # 2. For each chunk, which chunks its edges read (`reads`), its own ones first and then those of all ranks.
    # 3. For each chunk, the last chunk of each rank that it must wait for (`needs`); and for each chunk that is read,
    #    the last chunk that reads it (`last`), after which its rows can be released.
    firsts = torch.tensor([0, *(len(rows) for rows in own_rank.halo)]).cumsum(0) + num_own
    receives = []
    for first, rows, rank_ends in zip(firsts.tolist(), own_rank.halo, ends, strict=False):
        starts = (first + torch.searchsorted(rows, rank_ends)).tolist()
        receives.append(tuple(slice(start, end) for start, end in pairwise(starts)))
    requested = [other.halo[rank] for other in ranks]
    cuts = [torch.searchsorted(rows, ends[rank]).tolist() for rows in requested]
    sends = tuple(
        tuple(rows[cut[chunk] : cut[chunk + 1]] for rows, cut in zip(requested, cuts, strict=True))
        for chunk in range(num_chunks)
    )
    unit_ends = torch.tensor([*bounds[rank][1:], *(span.stop for spans in receives for span in spans)])
    units = torch.searchsorted(unit_ends, block.indices.long(), right=True)  # own chunks, then those of all ranks
    chunk_of = torch.arange(num_chunks).repeat_interleave(block.indptr[ends[rank]].diff())
    reads = torch.zeros(num_chunks, num_chunks * (size + 1), dtype=torch.bool)
    reads[chunk_of, units] = True
    reads[:, :num_chunks] |= torch.eye(num_chunks, dtype=torch.bool)  # a chunk reads the rows of its targets
    number = torch.arange(num_chunks)
    needs = (reads.view(num_chunks, size + 1, num_chunks) * (number + 1)).amax(2)
    last = (reads * (number + 1)[:, None]).amax(0).view(size + 1, num_chunks)
    done_after: list[list[tuple[int, int]]] = [[] for _ in range(num_chunks)]
    for owner, chunk in (last[1:] > 0).nonzero().tolist():
        done_after[int(last[1 + owner, chunk]) - 1].append((owner, chunk))
    return HaloPlan(
        sends=sends,
        receives=tuple(receives),
        reads_own=tuple(needs[:, 0].tolist()),
        reads=tuple(tuple(chunks) for chunks in needs[:, 1:].tolist()),
        own_done=tuple(last[0].tolist()),
        done_after=tuple(tuple(chunks) for chunks in done_after),
        at_once=at_once,
    )
