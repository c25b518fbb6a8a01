"""Relation rows: results of aggregation by relation, one for each pair of a vertex and a relation of its in-edges.

A relational layer aggregates typed edges to relation rows, transforms these by relation, and sums them by vertex.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.kernels import spmm
from weft.nn.aggregate.typed_block import Columns, Place, TypeOrder
from weft.nn.layers.linear_transform import linear


class ColumnTransform(NamedTuple):
    """Linear transform of some columns of the relation rows of one relation."""

    relation: int
    """Number of the relation."""
    inputs: Columns
    """Columns that the matrix multiplies, i; those of two transforms of a relation are equal or disjoint."""
    outputs: Columns
    """Columns of the result, o, disjoint from those of other transforms of the relation."""
    weight: Tensor
    """Matrix [i, o]."""


@dataclass(frozen=True, kw_only=True)
class OwnRelationRows:
    """The m relation rows of the n local vertices, sorted by relation and then vertex."""

    counts: tuple[int, ...]
    """Number of relation rows of each relation."""
    sums: Adjacency
    """Edges from the m relation rows, as sources, to the n vertices, as targets, over which they are summed."""

    @cached_property
    def targets(self) -> Tensor:
        """Vertex of each relation row: int64 [m], from 0 to n - 1."""
        source, target = self.sums.edges()
        return target[source.argsort()]

    def transform(self, z: Tensor, weight: Tensor | Sequence[ColumnTransform]) -> Tensor:
        """Return `y_v`, the sum of `z_(v,r) W_r` over the relation rows (v, r) of each vertex v: [n, .].

        Args:
            z: Relation rows [m, .].
            weight: Either [R, B, i, o]: for each relation r, a block-diagonal matrix W_r with B blocks of i x o. Or
                blocks of the W_r by their columns; outside of these, W_r is zero, which is skipped.
        """
        if isinstance(weight, Tensor):
            parts = zip(z.split(self.counts), weight.unbind(0), strict=True)
            return spmm(self.sums, torch.cat([multiply_block_diagonal(rows, blocks) for rows, blocks in parts]))
        order = TypeOrder(self.counts)  # it needs groups of consecutive rows; here a group is a relation
        inputs = [Place(each.relation, each.inputs) for each in weight]
        distinct = [*dict.fromkeys(inputs)]
        rows = dict(zip(distinct, order.split(z, distinct), strict=True))
        results = [linear(rows[place], each.weight) for place, each in zip(inputs, weight, strict=True)]
        return spmm(self.sums, order.join(results, [Place(each.relation, each.outputs) for each in weight]))


@dataclass(frozen=True, kw_only=True)
class RelationRows(OwnRelationRows):
    """The M relation rows of all targets, sorted by part of the targets, then relation, then vertex.

    Each part is a range of targets. The inherited fields describe the m rows of one part, the local one. There are
    never more relation rows than edges. The rows of a part are contiguous, and within it those of a relation.
    """

    in_edges: Adjacency
    """Edges from the s sources to the M relation rows, as targets."""
    bounds: tuple[int, ...]
    """Position of the first relation row of each part, and M."""

    @classmethod
    def of(
        cls, adjacency: Adjacency, edge_type: Tensor, num_relations: int, bounds: Sequence[int] = (), local: int = 0
    ) -> RelationRows:
        """Return the relation rows of an adjacency.

        Args:
            adjacency: The E edges.
            edge_type: Relation of each edge: integer [E].
            num_relations: Number of relations.
            bounds: Part i consists of the targets bounds[i]:bounds[i + 1]; empty: all targets are one part.
            local: Number of the local part.
        """
        # 1. Key each edge by (part, relation, target), and sort. 2. Equal keys are the in-edges of a relation row.
        # 3. Count the relation rows of each part and relation. 4. Join those of the local part to their targets.
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
    """The M relation rows of all vertices, sorted by vertex and then relation.

    The relation rows of a range of vertices are a range.
    """

    starts: Tensor
    """Position of the first relation row of each vertex, and M: int64 [N + 1]."""
    vertex: Tensor
    """Vertex of each relation row: int64 [M]."""
    relation: Tensor
    """Relation of each relation row: int64 [M]."""

    @classmethod
    def of(cls, adjacency: Adjacency, edge_type: Tensor, num_relations: int) -> RelationIndex:
        """Return the relation rows of a graph.

        Args:
            adjacency: The E in-edges of the graph.
            edge_type: Relation of each edge: integer [E].
            num_relations: Number of relations.
        """
        target = torch.arange(adjacency.num_targets).repeat_interleave(adjacency.degree.cpu())
        key = (target * num_relations + edge_type.cpu()).unique()
        vertex = key // num_relations
        starts = torch.searchsorted(vertex, torch.arange(adjacency.num_targets + 1))
        return cls(starts=starts, vertex=vertex, relation=key % num_relations)

    def span(self, vertices: slice) -> slice:
        """Return the range of the relation rows of a range of vertices."""
        return slice(int(self.starts[vertices.start]), int(self.starts[vertices.stop]))

    def in_edges(self, block: Adjacency, vertices: slice, edge_type: Tensor, num_relations: int) -> Adjacency:
        """Return the edges of a block with the relation rows of its targets as targets.

        Args:
            block: The e in-edges of a range of vertices.
            vertices: The range.
            edge_type: Relation of each of these edges: integer [e].
            num_relations: Number of relations.
        """
        span = self.span(vertices)
        pair_ids = (self.vertex[span] - vertices.start) * num_relations + self.relation[span]
        source, target = block.edges()
        row = torch.searchsorted(pair_ids, target * num_relations + edge_type.cpu())
        return Adjacency.from_edges(source, row, num_sources=block.num_sources, num_targets=len(pair_ids))

    def local(self, rank: int, size: int, num_relations: int) -> tuple[OwnRelationRows, Tensor]:
        """Return the relation rows of the vertices rank, rank + size, rank + 2 size, ...

        Args:
            rank: The first of these vertices.
            size: Distance between them.
            num_relations: Number of relations.

        Returns:
            The relation rows, and the position of each of all M relation rows among them: int64 [M], -1 for others.
        """
        local = (self.vertex % size == rank).nonzero().view(-1)
        local = local[self.relation[local].argsort(stable=True)]
        position = torch.full_like(self.vertex, -1)
        position[local] = torch.arange(len(local))
        sums = Adjacency.from_edges(
            torch.arange(len(local)),
            self.vertex[local] // size,
            num_sources=len(local),
            num_targets=len(range(rank, len(self.starts) - 1, size)),
        )
        counts = tuple(torch.bincount(self.relation[local], minlength=num_relations).tolist())
        return OwnRelationRows(counts=counts, sums=sums), position


def multiply_block_diagonal(rows: Tensor, blocks: Tensor) -> Tensor:
    """Return the product [m, B o] of rows and a block-diagonal matrix.

    Args:
        rows: [m, B i].
        blocks: [B, i, o], the blocks on the diagonal.
    """
    num_blocks, height, width = blocks.shape
    if num_blocks == 1:
        return linear(rows, blocks[0])
    parts = rows.view(len(rows), num_blocks, height).transpose(0, 1)
    return torch.bmm(parts, blocks).transpose(0, 1).reshape(len(rows), num_blocks * width)
