"""Relation rows, of a vertex and a relation each: what typed edges are aggregated to, and the way to the vertices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.kernels import spmm
from weft.nn.layers.linear_transform import linear


@dataclass(frozen=True, kw_only=True)
class OwnRelationRows:
    """The m relation rows of the n local vertices, by relation and then vertex, and their way to the vertices.

    counts: how many there are of each relation. sums: the edges from them, m sources, to the n targets.
    """

    counts: tuple[int, ...]
    sums: Adjacency

    @cached_property
    def targets(self) -> Tensor:
        """The vertex of each local row: int64 [m]."""
        source, target = self.sums.edges()
        return target[source.argsort()]

    def map(self, z: Tensor, weight: Tensor) -> Tensor:
        """The sum over a vertex's relation rows of `z_(v,r) W_r`: z [m, B i], weight [R, B, i, o] -> [n, B o].

        W_r is block-diagonal, with B blocks of i x o.
        """
        parts = zip(z.split(self.counts), weight.unbind(0), strict=True)
        return spmm(self.sums, torch.cat([multiply_block_diagonal(rows, blocks) for rows, blocks in parts]))


@dataclass(frozen=True, kw_only=True)
class RelationRows(OwnRelationRows):
    """The M rows of a vertex and a relation by which it has an in-edge: by part of the vertices, relation, vertex.

    Each part is a range of the targets; one of them is local, with m rows. So there are never more rows than
    edges, those of a relation lie side by side, and those of a part do.

    in_edges: of all rows, from s sources to M targets. bounds: where the rows of each part begin.
    """

    in_edges: Adjacency
    bounds: tuple[int, ...]

    @classmethod
    def of(
        cls, adjacency: Adjacency, edge_type: Tensor, num_relations: int, bounds: Sequence[int] = (), local: int = 0
    ) -> RelationRows:
        """The rows of edges [E] with these types [E]; bounds: of the parts of the targets; none: all are one part."""
        device, num_targets = adjacency.device, adjacency.num_targets
        ends = torch.tensor(bounds[1:] or [num_targets])
        target = torch.arange(num_targets).repeat_interleave(adjacency.degree.cpu(), output_size=adjacency.num_edges)
        group = torch.searchsorted(ends, target, right=True) * num_relations + edge_type.cpu()
        key, order = (group * num_targets + target).sort(stable=True)
        key, num_edges = key.unique_consecutive(return_counts=True)
        in_edges = Adjacency(
            indptr=torch.cat([num_edges.new_zeros(1), num_edges.cumsum(0)]),
            indices=adjacency.indices.cpu()[order],
            num_sources=adjacency.num_sources,
        )
        counts = torch.bincount(key // max(num_targets, 1), minlength=len(ends) * num_relations)
        counts = counts.view(len(ends), num_relations)
        starts = (0, *counts.sum(1).cumsum(0).tolist())
        first, last = starts[local : local + 2]
        begin = bounds[local] if bounds else 0
        sums = Adjacency.from_edges(
            torch.arange(last - first),
            key[first:last] % max(num_targets, 1) - begin,
            num_sources=last - first,
            num_targets=int(ends[local]) - begin,
        )
        return cls(
            in_edges=in_edges.to(device),
            bounds=starts,
            counts=tuple(counts[local].tolist()),
            sums=sums.to(device),
        )


@dataclass(frozen=True, kw_only=True)
class RelationIndex:
    """The M relation rows of all vertices by vertex and then relation: those of a range of vertices are a range.

    starts: int64 [N + 1], where those of each vertex begin. vertex, relation: int64 [M].
    """

    starts: Tensor
    vertex: Tensor
    relation: Tensor

    @classmethod
    def of(cls, adjacency: Adjacency, edge_type: Tensor, num_relations: int) -> RelationIndex:
        """The rows of a graph's edges [E] with these types [E]."""
        target = torch.arange(adjacency.num_targets).repeat_interleave(adjacency.degree.cpu())
        key = (target * num_relations + edge_type.cpu()).unique()
        vertex = key // num_relations
        starts = torch.searchsorted(vertex, torch.arange(adjacency.num_targets + 1))
        return cls(starts=starts, vertex=vertex, relation=key % num_relations)

    def span(self, vertices: slice) -> slice:
        """The rows of a range of vertices."""
        return slice(int(self.starts[vertices.start]), int(self.starts[vertices.stop]))

    def in_edges(self, block: Adjacency, vertices: slice, edge_type: Tensor, num_relations: int) -> Adjacency:
        """A block's edges [e] of these types [e], into the rows of its targets, which are a range of vertices."""
        span = self.span(vertices)
        known = (self.vertex[span] - vertices.start) * num_relations + self.relation[span]
        source, target = block.edges()
        row = torch.searchsorted(known, target * num_relations + edge_type.cpu())
        return Adjacency.from_edges(source, row, num_sources=block.num_sources, num_targets=len(known))

    def local(self, rank: int, size: int, num_relations: int) -> tuple[OwnRelationRows, Tensor]:
        """Those of the vertices rank, rank + size, ..., and where each stands among them: int64 [M], -1 elsewhere."""
        own = (self.vertex % size == rank).nonzero().view(-1)
        own = own[self.relation[own].argsort(stable=True)]
        place = torch.full_like(self.vertex, -1)
        place[own] = torch.arange(len(own))
        sums = Adjacency.from_edges(
            torch.arange(len(own)),
            self.vertex[own] // size,
            num_sources=len(own),
            num_targets=len(range(rank, len(self.starts) - 1, size)),
        )
        counts = tuple(torch.bincount(self.relation[own], minlength=num_relations).tolist())
        return OwnRelationRows(counts=counts, sums=sums), place


def multiply_block_diagonal(rows: Tensor, blocks: Tensor) -> Tensor:
    """Rows [m, B i] times the block-diagonal matrix of blocks [B, i, o]: [m, B o]."""
    num_blocks, height, width = blocks.shape
    if num_blocks == 1:
        return linear(rows, blocks[0])
    parts = rows.view(len(rows), num_blocks, height).transpose(0, 1)
    return torch.bmm(parts, blocks).transpose(0, 1).reshape(len(rows), num_blocks * width)
