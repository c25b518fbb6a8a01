"""What a part needs of the others: the vertices that it computes again, and the block that each aggregate runs on.

(NeutronStar, sections 2.2 and 3.) A model's aggregates are its hops; the inputs of hop h are the rows of level h.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.partition.vertex_cover import Cover
from weft.runtime import native


@dataclass(frozen=True, kw_only=True)
class Caching:
    """How the remote sources of a part are to be had: computed again (cached) or fetched, level by level.

    costs: float64 [levels, 5], one level for every hop: seconds of a row, of an in-edge in the aggregate before it, of
    fetching a row; bytes of a cached row, of its in-edge. first: the lowest level that costs anything.
    ratio: the share of the remote sources to cache at each level, those that cost least; None: where it costs less.
    max_bytes: of all that is cached; None: no limit.
    """

    costs: Tensor
    first: int = 0
    ratio: float | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One aggregate's block on one part: the first rows of its inputs as targets, inputs and fetched rows as sources.

    block: in-edges of the targets, here all, in the whole graph's order. Its first `num_inputs` sources are the inputs.
    fetched: int64 [h], the vertices of the other sources, by owner, ascending in each. received: how many of each part.
    first_edges: int64 [targets], where each target's in-edges begin in the whole graph.
    """

    block: Adjacency
    num_inputs: int
    fetched: Tensor
    received: tuple[int, ...]
    first_edges: Tensor

    @cached_property
    def edge_ids(self) -> Tensor:
        """Where each edge of the block stands in the whole graph: int64 [E]."""
        return edge_positions(self.block.indptr, self.first_edges)

    @cached_property
    def cover(self) -> Cover:
        """The same edges over the fewest rows of others, where partial results add."""
        return Cover.of(self.block, self.received)


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """One part's share of the work.

    rows: int64, the inputs of the model, the longest needed first: the `num_own` vertices that the part answers for,
    ascending, then the others of its own and those that it computes again. So the rows of every level are the first of
    those of the level below.
    cached_bytes: what the vertices that are computed again take. limited: whether a limit kept their number down.
    choice_seconds: what choosing them took.
    """

    rows: Tensor
    num_own: int
    hops: tuple[Hop, ...]
    cached_bytes: int = 0
    limited: bool = False
    choice_seconds: float = 0.0

    @property
    def own(self) -> Tensor:
        """The vertices that the part answers for: int64 [n]."""
        return self.rows[: self.num_own]


def range_bounds(adj: Adjacency, parts: int, vertex_weight: int = 1) -> tuple[int, ...]:
    """Bounds of contiguous parts with about the same sum of in-edges and weighted vertices; some may be empty.

    vertex_weight: in-edges that a vertex counts for, at least 1.
    """
    cost = adj.indptr + vertex_weight * torch.arange(adj.num_targets + 1)
    wanted = torch.arange(parts + 1) * int(cost[-1]) // parts
    return tuple(torch.searchsorted(cost, wanted).tolist())


def range_parts(adj: Adjacency, parts: int, vertex_weight: int = 1) -> Tensor:
    """The part of every vertex, int32 [N], by `range_bounds`."""
    bounds = torch.tensor(range_bounds(adj, parts, vertex_weight))
    return torch.arange(parts, dtype=torch.int32).repeat_interleave(bounds.diff())


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which remote vertices a part computes again."""

    levels: Tensor
    """int8 [N]: the highest level up to which it computes a vertex again, -1: none."""
    num_bytes: float
    """What they take."""
    limited: bool
    """Whether a limit kept their number down."""
    seconds: float
    """What choosing them took."""

    @classmethod
    def of(cls, adj: Adjacency, part: Tensor, own: int, caching: Caching) -> Choice:
        """That of part `own`. part: int32 [N], the part of every vertex."""
        start = time.perf_counter()
        chosen = torch.full((len(part),), -1, dtype=torch.int8), 0.0, False
        if caching.ratio != 0:
            chosen = choose_cached(adj, part, own, caching)
        levels, num_bytes, limited = chosen
        return cls(levels=levels, num_bytes=num_bytes, limited=limited, seconds=time.perf_counter() - start)


def make_dependencies(
    adj: Adjacency,
    part: Tensor,
    own: int,
    num_parts: int,
    caching: Caching,
    *,
    choice: Choice | None = None,
    reach: Tensor | None = None,
) -> Dependencies:
    """What part `own` computes and what it fetches. part: int32 [N], the part of every vertex.

    choice: of what it computes again, where that is made already. reach: int16 [N], up to which level each vertex is
    read by anyone (Reach.levels); None: all of them in the end.
    Reads the in-edges of the part's vertices and of those that it computes again.
    """
    num_hops = len(caching.costs)
    choice = choice or Choice.of(adj, part, own, caching)
    levels = _levels(adj, part == own, choice, num_hops, reach)
    rows = (levels >= 0).nonzero().view(-1)
    rows = rows[levels[rows].argsort(descending=True, stable=True)]
    counts = [int((levels >= level).sum()) for level in range(num_hops + 1)]
    blocks: dict[tuple[int, int], Hop] = {}
    hops = []
    for sizes in pairwise(counts):
        if sizes not in blocks:
            blocks[sizes] = _hop(adj, part, num_parts, rows[: sizes[0]], sizes[1])
        hops.append(blocks[sizes])
    return Dependencies(
        rows=rows,
        num_own=counts[-1],
        hops=tuple(hops),
        cached_bytes=int(choice.num_bytes),
        limited=choice.limited,
        choice_seconds=choice.seconds,
    )


def _levels(adj: Adjacency, mine: Tensor, choice: Choice, num_hops: int, reach: Tensor | None) -> Tensor:
    """The highest level of each vertex that a part computes, int16 [N], -1: none. mine: bool [N], its own vertices.

    Of the vertices that were chosen to be computed again, those that its rows are made of.
    """
    chosen = choice.levels.to(torch.int16)
    if reach is None:
        return torch.where(mine, num_hops, chosen)
    levels = torch.where(mine, reach, -1)
    part = torch.zeros(len(mine), dtype=torch.int32)
    for level in reversed(range(num_hops if (chosen >= 0).any() else 0)):
        targets = (levels > level).nonzero().view(-1)
        sources = native.gather_block(adj.indptr, adj.indices, part, targets, len(targets))[2]
        levels[sources[~mine[sources] & (chosen[sources] >= level)]] = level
    return levels


def choose_cached(
    adj: Adjacency, part: Tensor, own: int, caching: Caching, num_threads: int | None = None
) -> tuple[Tensor, float, bool]:
    """The level that a part computes each vertex again up to, int8 [N], or -1; their bytes; whether a limit was met."""
    mine = (part == own).nonzero().view(-1)
    wanted = native.gather_block(adj.indptr, adj.indices, part, mine, len(mine))[2]
    return native.cache_levels(
        adj.indptr,
        adj.indices,
        part,
        own,
        wanted,
        caching.costs,
        first=caching.first,
        ratio=-1.0 if caching.ratio is None else caching.ratio,
        max_bytes=-1.0 if caching.max_bytes is None else caching.max_bytes,
        num_threads=num_threads,
    )


def _hop(adj: Adjacency, part: Tensor, num_parts: int, inputs: Tensor, num_targets: int) -> Hop:
    indptr, indices, fetched = native.gather_block(adj.indptr, adj.indices, part, inputs, num_targets)
    first_edges = adj.indptr[inputs[:num_targets]]
    weight = None if adj.weight is None else adj.weight[edge_positions(indptr, first_edges)]
    return Hop(
        block=Adjacency(indptr=indptr, indices=indices, num_sources=len(inputs) + len(fetched), weight=weight),
        num_inputs=len(inputs),
        fetched=fetched,
        received=tuple(torch.bincount(part[fetched], minlength=num_parts).tolist()),
        first_edges=first_edges,
    )


def edge_positions(indptr: Tensor, first_edges: Tensor) -> Tensor:
    """The positions of rows' edges elsewhere, where each row's begin at `first_edges` and stand side by side."""
    shift = (first_edges - indptr[:-1]).repeat_interleave(indptr.diff(), output_size=int(indptr[-1]))
    return shift + torch.arange(len(shift))
