"""The remote sources of a part's in-edges, and the block that its products run on (NeutronStar, section 2.2).

Parts are contiguous ranges of vertices: part p has `bounds[p]:bounds[p + 1]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.data import Adjacency


@dataclass(frozen=True, kw_only=True)
class Halo:
    """One part's block of the graph: its n vertices as targets, and as sources these and the h remote ones.

    block: all in-edges of the part, in the whole graph's order. Its first n sources are its targets.
    remote: int64 [h], the vertices of other parts that are sources here, ascending, and so by owner.
    received: how many of them each part owns.
    rows: int64, positions among the part's own vertices of what each other part lacks, by part, ascending in each.
    sent: how many of these each part lacks.
    """

    block: Adjacency
    remote: Tensor
    received: tuple[int, ...]
    rows: Tensor
    sent: tuple[int, ...]


def range_bounds(adj: Adjacency, parts: int, vertex_weight: int = 1) -> tuple[int, ...]:
    """Bounds of contiguous parts with about the same sum of in-edges and weighted vertices; some may be empty.

    vertex_weight: in-edges that a vertex counts for, at least 1.
    """
    cost = adj.indptr + vertex_weight * torch.arange(adj.num_targets + 1)
    wanted = torch.arange(parts + 1) * int(cost[-1]) // parts
    return tuple(torch.searchsorted(cost, wanted).tolist())


def make_halo(adj: Adjacency, bounds: Sequence[int], part: int) -> Halo:
    """What `part` needs of the others, and they of it; reads every edge."""
    start, stop = bounds[part], bounds[part + 1]
    remote = remote_sources(adj, start, stop)
    lacking = [
        remote_sources(adj, *other, within=(start, stop)) - start if number != part else remote[:0]
        for number, other in enumerate(pairwise(bounds))
    ]
    return Halo(
        block=_block(adj, start, stop, remote),
        remote=remote,
        received=tuple(torch.searchsorted(remote, torch.tensor(bounds)).diff().tolist()),
        rows=torch.cat(lacking),
        sent=tuple(map(len, lacking)),
    )


def remote_sources(adj: Adjacency, start: int, stop: int, within: tuple[int, int] | None = None) -> Tensor:
    """Vertices outside `start:stop`, of `within` if given, with an edge into it: int64, ascending."""
    is_source = torch.zeros(adj.num_sources, dtype=torch.bool)
    is_source[_entries(adj, start, stop)] = True
    is_source[start:stop] = False
    first, last = within or (0, adj.num_sources)
    return is_source[first:last].nonzero().view(-1) + first


def _entries(adj: Adjacency, start: int, stop: int) -> Tensor:
    return adj.indices[int(adj.indptr[start]) : int(adj.indptr[stop])].long()


def _block(adj: Adjacency, start: int, stop: int, remote: Tensor) -> Adjacency:
    size = stop - start
    position = torch.empty(adj.num_sources, dtype=adj.indices.dtype)
    position[start:stop] = torch.arange(size, dtype=position.dtype)
    position[remote] = torch.arange(size, size + len(remote), dtype=position.dtype)
    first, last = int(adj.indptr[start]), int(adj.indptr[stop])
    return Adjacency(
        indptr=adj.indptr[start : stop + 1] - first,
        indices=position[_entries(adj, start, stop)],
        num_sources=size + len(remote),
        weight=None if adj.weight is None else adj.weight[first:last],
    )
