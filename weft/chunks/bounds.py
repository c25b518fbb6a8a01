"""Chunks of a graph that are worked on one after the other (NeutronTP, section 4.2.1).

A chunk is a range of destinations with all edges into them. Any range does, since an aggregate's rows depend on no
other row of it; what its sources get backward is added up over the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.core import native
from weft.data import Adjacency
from weft.nn import WorkingSet


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """A range of destinations from `first` on.

    block: the edges into them, sources by position. sources: int64 [s], the vertices, the destinations first. fresh:
    int64, ascending, those that no earlier chunk has.
    """

    first: int
    block: Adjacency
    sources: Tensor
    fresh: Tensor
    edges: slice

    @property
    def targets(self) -> slice:
        """The destinations."""
        return slice(self.first, self.first + self.block.num_targets)


def cut_to_fit(adj: Adjacency, working_set: WorkingSet, limit: int) -> tuple[tuple[int, ...], int]:
    """Bounds of ranges of destinations, each the longest that fits `limit` bytes, and the bytes of the largest.

    That exceeds the limit where one destination with its sources does.
    """
    bounds, most = native.cut_rows(
        adj.indptr,
        adj.indices,
        adj.num_sources,
        per_row=working_set.per_target,
        per_column=working_set.per_source,
        per_entry=working_set.per_edge,
        own=True,
        limit=limit,
    )
    return tuple(bounds.tolist()), most


def cut_evenly(adj: Adjacency, count: int) -> tuple[int, ...]:
    """Bounds of at most `count` ranges of destinations of about as many edges and destinations each, none empty."""
    done = adj.indptr + torch.arange(len(adj.indptr))
    shares = int(done[-1]) * torch.arange(1, count, dtype=torch.int64) // count
    bounds = torch.searchsorted(done, shares, right=True) - 1
    ends = bounds.new_tensor([0, adj.num_targets])
    return tuple(torch.cat([ends, bounds]).unique().tolist())


def make_chunks(adj: Adjacency, bounds: Sequence[int]) -> tuple[Chunk, ...]:
    """The chunks between these bounds, in order. Tensors on the CPU."""
    anyone = torch.zeros(adj.num_targets, dtype=torch.int32)
    seen = torch.zeros(adj.num_sources, dtype=torch.bool)
    chunks = []
    for first, end in pairwise(bounds):
        own = torch.arange(first, end)
        indptr, indices, others = native.gather_block(adj.indptr, adj.indices, anyone, own, len(own))
        sources = torch.cat([own, others])
        fresh = sources[~seen[sources]].sort().values
        seen[fresh] = True
        edges = slice(int(adj.indptr[first]), int(adj.indptr[end]))
        block = Adjacency(
            indptr=indptr,
            indices=indices,
            num_sources=len(sources),
            weight=None if adj.weight is None else adj.weight[edges],
        )
        chunks.append(Chunk(first=first, block=block, sources=sources, fresh=fresh, edges=edges))
    return tuple(chunks)
