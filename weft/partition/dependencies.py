"""Dependencies of a part on the others: the vertices that it recomputes, and the block of each aggregate.

Source: NeutronStar, sections 2.2 and 3. Layer boundary h are the rows before aggregate h of the model (here called hop
h); the last boundary are the results. A remote source of an aggregate is either fetched, or cached: the part recomputes
the source's row, for which it needs the rows of all its sources at the boundary before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.partition.vertex_cover import Cover
from weft.runtime import native


@dataclass(frozen=True, kw_only=True)
class Caching:
    """Costs and limits by which a part decides which remote sources to cache and which to fetch."""

    costs: Tensor
    """float64 [hops, 5]: costs at the boundary before each aggregate.

    Columns: seconds to compute a row; seconds per in-edge of the aggregate before it; seconds to fetch a row; bytes of
    a cached row; bytes of each of its in-edges.
    """
    first: int = 0
    """First layer boundary at which rows cost anything."""
    ratio: float | None = None
    """Fraction of the remote sources to cache at each boundary, cheapest first; None: wherever caching costs less."""
    max_bytes: int | None = None
    """Limit of all cached rows and in-edges in bytes; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class Hop:
    """Block of one aggregate on one part: the first input rows are targets; inputs and fetched rows are sources."""

    block: Adjacency
    """All in-edges of the targets, in the order of the whole graph. Its first `num_inputs` sources are the inputs."""
    num_inputs: int
    """Number of input rows of this part."""
    fetched: Tensor
    """int64 [h]: vertices of the fetched rows, by owner, ascending for each owner."""
    received: tuple[int, ...]
    """Number of fetched rows from each part."""
    first_edges: Tensor
    """int64 [targets]: position of each target's first in-edge in the whole graph."""

    @classmethod
    def of_graph(cls, adj: Adjacency) -> Hop:
        """Return the block of all edges of a graph, on a single part.

        Args:
            adj: In-edges of the graph.
        """
        nothing = torch.empty(0, dtype=torch.int64)
        num_sources = adj.num_sources
        return cls(block=adj, num_inputs=num_sources, fetched=nothing, received=(0,), first_edges=adj.indptr[:-1])

    def beginning(self, num_inputs: int, num_targets: int) -> Hop:
        """Return the block of the first targets, whose sources are among the first inputs; without fetched rows.

        Args:
            num_inputs: Number of inputs.
            num_targets: Number of targets.
        """
        block, indptr = self.block, self.block.indptr[: num_targets + 1]
        weight = None if block.weight is None else block.weight[: indptr[-1]]
        indices = block.indices[: indptr[-1]]
        return replace(
            self,
            block=Adjacency(indptr=indptr, indices=indices, num_sources=num_inputs, weight=weight),
            num_inputs=num_inputs,
            first_edges=self.first_edges[:num_targets],
        )

    def sources(self, rows: Tensor) -> Tensor:
        """Return the vertex of each source of the block, int64 [s]: the inputs, then the fetched rows.

        Args:
            rows: Vertices of the part's rows, int64; the first ones are the inputs.
        """
        inputs = rows[: self.num_inputs]
        return torch.cat([inputs, self.fetched]) if len(self.fetched) else inputs

    @cached_property
    def edge_ids(self) -> Tensor:
        """Position of each edge of the block in the whole graph, int64 [E]."""
        return edge_positions(self.block.indptr, self.first_edges)

    def edge_ids_of(self, targets: slice) -> Tensor:
        """Return the position in the whole graph of each edge into a range of targets, int64."""
        indptr = self.block.indptr[targets.start : targets.stop + 1]
        return edge_positions(indptr - indptr[0], self.first_edges[targets])

    @cached_property
    def cover(self) -> Cover:
        """Minimum cover of the block, for sums: the fewest rows from other parts, some of which are partial results."""
        return Cover.of(self.block, self.received)


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Rows that one part computes, and the block of each aggregate."""

    rows: Tensor
    """int64: vertices of the part's input rows, sorted by the last boundary at which their rows are needed.

    The latest boundary comes first, so the rows at each boundary are the first rows of those at the boundary before.
    The first `num_own` vertices are those whose results the part computes, ascending; other owned vertices and cached
    ones follow.
    """
    num_own: int
    """Number of vertices whose results the part computes."""
    hops: tuple[Hop, ...]
    """Block of each aggregate."""
    cached_bytes: int = 0
    """Bytes of the cached vertices' rows and in-edges."""
    limited: bool = False
    """True if a limit of bytes reduced the number of cached vertices."""
    choice_seconds: float = 0.0
    """Seconds spent on choosing the cached vertices."""

    @property
    def owned(self) -> Tensor:
        """Vertices whose results the part computes, int64 [n], ascending."""
        return self.rows[: self.num_own]


def range_bounds(adj: Adjacency, parts: int, vertex_weight: int = 1) -> tuple[int, ...]:
    """Return bounds of contiguous parts with similar sums of in-edges and weighted vertices; parts can be empty.

    Args:
        adj: In-edges of the whole graph.
        parts: Number of parts.
        vertex_weight: Number of in-edges that a vertex counts as, at least 1.
    """
    cost = adj.indptr + vertex_weight * torch.arange(adj.num_targets + 1)
    quantiles = torch.arange(parts + 1) * int(cost[-1]) // parts
    return tuple(torch.searchsorted(cost, quantiles).tolist())


def range_parts(adj: Adjacency, parts: int, vertex_weight: int = 1) -> Tensor:
    """Return the part of every vertex, int32 [N], by `range_bounds`.

    Args:
        adj: In-edges of the whole graph.
        parts: Number of parts.
        vertex_weight: Number of in-edges that a vertex counts as, at least 1.
    """
    bounds = torch.tensor(range_bounds(adj, parts, vertex_weight))
    return torch.arange(parts, dtype=torch.int32).repeat_interleave(bounds.diff())


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Remote vertices that a part caches."""

    last_boundary: Tensor
    """int8 [N]: last layer boundary up to which the part recomputes each vertex; -1: none."""
    num_bytes: float
    """Bytes of the cached vertices' rows and in-edges."""
    limited: bool
    """True if a limit of bytes reduced the number of cached vertices."""
    seconds: float
    """Seconds spent on choosing the cached vertices."""

    @classmethod
    def of(cls, adj: Adjacency, part: Tensor, own_part: int, caching: Caching) -> Choice:
        """Choose the remote vertices that a part caches.

        Args:
            adj: In-edges of the whole graph.
            part: Part of each vertex, int32 [N].
            own_part: Number of the part.
            caching: Costs and limits.
        """
        start = time.perf_counter()
        result = torch.full((len(part),), -1, dtype=torch.int8), 0.0, False
        if caching.ratio != 0:
            result = choose_cached(adj, part, own_part, caching)
        last_boundary, num_bytes, limited = result
        return cls(
            last_boundary=last_boundary, num_bytes=num_bytes, limited=limited, seconds=time.perf_counter() - start
        )


def make_dependencies(
    adj: Adjacency,
    part: Tensor,
    own_part: int,
    num_parts: int,
    caching: Caching,
    *,
    choice: Choice | None = None,
    last_read: Tensor | None = None,
    allocate: native.Allocate | None = None,
) -> Dependencies:
    """Return the rows that a part computes, and the block of each aggregate.

    Reads the in-edges of the part's vertices and of the vertices that it caches.

    Args:
        adj: In-edges of the whole graph.
        part: Part of each vertex, int32 [N].
        own_part: Number of the part.
        num_parts: Number of parts.
        caching: Costs and limits, with one row of costs per aggregate.
        choice: The vertices to cache, if they have been chosen already.
        last_read: int16 [N], last layer boundary at which any part reads each vertex (ReceptiveField.last_boundary);
            None: all results are read.
        allocate: Allocates the sources of edges. A single part then stores them once, since all blocks are beginnings
            of the first one, or does not, since that is the graph. Default: in memory, for each block.
    """
    # 1. Find the last boundary at which each row is computed; sort rows by it, latest first.
    # 2. The first rows up to one count are then the inputs of an aggregate, and those up to the next its targets.
    #    Aggregates with the same counts share a block.
    num_hops = len(caching.costs)
    choice = choice or Choice.of(adj, part, own_part, caching)
    last_boundary = _last_boundaries(adj, part == own_part, choice, num_hops, last_read)
    rows = (last_boundary >= 0).nonzero().view(-1)
    rows = rows[last_boundary[rows].argsort(descending=True, stable=True)]
    counts = [int((last_boundary >= boundary).sum()) for boundary in range(num_hops + 1)]
    blocks: dict[tuple[int, int], Hop] = {}
    hops: list[Hop] = []
    for sizes in pairwise(counts):
        if sizes not in blocks:
            if allocate and num_parts == 1 and hops:
                blocks[sizes] = hops[0].beginning(*sizes)
            elif allocate and num_parts == 1 and sizes[1] == adj.num_targets:
                blocks[sizes] = Hop.of_graph(adj)
            else:
                blocks[sizes] = _make_hop(adj, part, num_parts, rows[: sizes[0]], sizes[1], allocate)
        hops.append(blocks[sizes])
    return Dependencies(
        rows=rows,
        num_own=counts[-1],
        hops=tuple(hops),
        cached_bytes=int(choice.num_bytes),
        limited=choice.limited,
        choice_seconds=choice.seconds,
    )


def _last_boundaries(
    adj: Adjacency, is_owned: Tensor, choice: Choice, num_hops: int, last_read: Tensor | None
) -> Tensor:
    """Return the last layer boundary at which a part computes each vertex's row, int16 [N]; -1: none.

    If only some results are read, a cached vertex is computed only as far as rows that the part computes depend on it.

    Args:
        adj: In-edges of the whole graph.
        is_owned: Vertices of the part, bool [N].
        choice: Vertices to cache.
        num_hops: Number of aggregates.
        last_read: See `make_dependencies`.
    """
    chosen = choice.last_boundary.to(torch.int16)
    if last_read is None:
        return torch.where(is_owned, num_hops, chosen)
    last_boundary = torch.where(is_owned, last_read, -1)
    part = torch.zeros(len(is_owned), dtype=torch.int32)
    # From the last aggregate to the first: cached sources of its targets are computed up to the boundary before it.
    for boundary in reversed(range(num_hops if (chosen >= 0).any() else 0)):
        targets = (last_boundary > boundary).nonzero().view(-1)
        sources = native.missing_sources(adj.indptr, adj.indices, part, targets, len(targets))
        last_boundary[sources[~is_owned[sources] & (chosen[sources] >= boundary)]] = boundary
    return last_boundary


def choose_cached(
    adj: Adjacency, part: Tensor, own_part: int, caching: Caching, num_threads: int | None = None
) -> tuple[Tensor, float, bool]:
    """Choose the vertices that a part caches.

    Args:
        adj: In-edges of the whole graph.
        part: Part of each vertex, int32 [N].
        own_part: Number of the part.
        caching: Costs and limits.
        num_threads: Number of threads. Default: PyTorch's.

    Returns:
        Last layer boundary up to which the part recomputes each vertex, int8 [N], or -1; bytes of the cached rows and
        edges; whether a limit reduced their number.
    """
    owned = (part == own_part).nonzero().view(-1)
    remote_sources = native.missing_sources(adj.indptr, adj.indices, part, owned, len(owned))
    return native.cache_levels(
        adj.indptr,
        adj.indices,
        part,
        own_part,
        remote_sources,
        caching.costs,
        first=caching.first,
        ratio=-1.0 if caching.ratio is None else caching.ratio,
        max_bytes=-1.0 if caching.max_bytes is None else caching.max_bytes,
        num_threads=num_threads,
    )


def _make_hop(
    adj: Adjacency,
    part: Tensor,
    num_parts: int,
    inputs: Tensor,
    num_targets: int,
    allocate: native.Allocate | None,
) -> Hop:
    """Return the block of an aggregate whose targets are the first `num_targets` of `inputs`."""
    indptr, indices, fetched = native.gather_block(adj.indptr, adj.indices, part, inputs, num_targets, allocate)
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
    """Return the positions in the whole graph of the edges of some rows, int64 [E].

    Args:
        indptr: Row pointers of these rows, int64 [n + 1].
        first_edges: Position of each row's first edge in the whole graph, int64 [n].
    """
    shift = (first_edges - indptr[:-1]).repeat_interleave(indptr.diff(), output_size=int(indptr[-1]))
    return shift + torch.arange(len(shift))
