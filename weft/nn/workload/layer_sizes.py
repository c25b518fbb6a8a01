"""Sizes of each layer on a rank, on which the costs of a model's dense layers depend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data import Adjacency, Graph
from weft.nn.aggregate.typed_block import TypeOrder

TARGETS_AT_ONCE = 1 << 17
"""Number of vertices whose self-loops are counted at once."""


class BlockSize(NamedTuple):
    """Size of the block of one aggregate, for a layer that reads the edges itself."""

    sources: int
    """Number of source vertices."""
    targets: int
    """Number of target vertices."""
    edges: int = 0
    """Number of edges."""
    loops: int = 0
    """Number of self-loops among the edges."""

    @classmethod
    def of(cls, block: Adjacency) -> BlockSize:
        """Return the size of a block whose targets are its first sources."""
        source, target = block.edges()
        return cls(block.num_sources, block.num_targets, block.num_edges, int((source == target).sum()))

    @classmethod
    def of_targets(cls, in_edges: Adjacency, targets: slice | Tensor) -> BlockSize:
        """Return the size of the block of all in-edges of some vertices, with all vertices as sources.

        Args:
            in_edges: In-edges of the graph.
            targets: The vertices, a range or int64.
        """
        is_target = torch.zeros(in_edges.num_targets, dtype=torch.bool)
        is_target[targets] = True
        num_loops = 0
        for vertices in torch.arange(in_edges.num_targets).split(TARGETS_AT_ONCE):  # 16 bytes for each of their edges
            target = vertices.repeat_interleave(in_edges.degree[vertices])
            first = int(in_edges.indptr[vertices[0]])
            num_loops += int((is_target[target] & (in_edges.indices[first : first + len(target)] == target)).sum())
        num_edges = int(in_edges.degree[is_target].sum())
        return cls(in_edges.num_sources, int(is_target.sum()), num_edges, num_loops)


class TypeCounts(NamedTuple):
    """Number of rows of each vertex type. All vertices without features are one type, the last one."""

    counts: tuple[int, ...]
    """Number of rows of each type."""
    is_sorted: bool = False
    """True if the rows are sorted by type."""

    @classmethod
    def of(cls, types: Tensor, num_types: int) -> TypeCounts:
        """Count rows.

        Args:
            types: Number of each row's vertex type, int64 [n].
            num_types: Number of vertex types.
        """
        counts = torch.bincount(types, minlength=num_types).tolist()
        return cls(tuple(counts), bool((types[1:] >= types[:-1]).all()))

    @classmethod
    def spread(cls, num_rows: int, of_types: Sequence[int]) -> TypeCounts:
        """Return the numbers if vertices of all types are spread evenly.

        Args:
            num_rows: Number of rows.
            of_types: Number of vertices of each type.
        """
        ends = (0, *accumulate(of_types))
        bounds = [round(end * num_rows / max(ends[-1], 1)) for end in ends]
        return cls(tuple(end - begin for begin, end in pairwise(bounds)), is_sorted=True)

    def none(self) -> TypeCounts:
        """Return the numbers for no rows."""
        return TypeCounts((0,) * len(self.counts), is_sorted=True)

    def order(self, like: Tensor) -> TypeOrder:
        """Return the order of the rows, without data.

        Args:
            like: Tensor on the meta device.
        """
        by_type = None if self.is_sorted else like.new_empty(1, dtype=torch.int64).expand(sum(self.counts))
        return TypeOrder(self.counts, by_type)


class TypedBlockSize(NamedTuple):
    """Size of the block of one aggregate by vertex type and relation."""

    sources: TypeCounts
    """Number of sources of each type."""
    targets: TypeCounts
    """Number of targets of each type."""
    edges: tuple[int, ...]
    """Number of edges of each relation."""
    loops: tuple[int, ...]
    """Number of self-loops among the edges of each relation."""
    is_divided: bool = True
    """False if the rows are not divided by type: then those of all types count for each type."""

    @classmethod
    def of(cls, graph: Graph, sources: Tensor, targets: Tensor, edges: Tensor, relation: Tensor) -> TypedBlockSize:
        """Return the size of a block.

        Args:
            graph: The graph.
            sources: Vertices of the sources, int64 [s].
            targets: Vertices of the targets, int64 [n].
            edges: Source and target of the edges, as vertices or as positions among the sources, int64 [2, E].
            relation: Relation of each edge, integer [E].
        """
        types, num_types, num_relations = type_numbers(graph), len(graph.features) + 1, len(graph.relations)
        return cls(
            sources=TypeCounts.of(types[sources], num_types),
            targets=TypeCounts.of(types[targets], num_types),
            edges=tuple(torch.bincount(relation, minlength=num_relations).tolist()),
            loops=tuple(torch.bincount(relation[edges[0] == edges[1]], minlength=num_relations).tolist()),
        )

    def of_relation(self, relation: int, source: int, target: int) -> BlockSize:
        """Return the size of the edges of a relation, with the sources and targets of its types.

        Args:
            relation: Number of the relation.
            source: Number of the vertex type of its sources.
            target: Number of the vertex type of its targets.
        """
        num_sources, num_targets = self.sources.counts[source], self.targets.counts[target]
        return BlockSize(num_sources, num_targets, self.edges[relation], self.loops[relation])

    def with_all_rows(self, sources: int, targets: int) -> TypedBlockSize:
        """Return the size if rows of all types are computed for each type.

        Args:
            sources: Number of sources.
            targets: Number of targets.
        """
        count = len(self.sources.counts)
        return self._replace(
            sources=TypeCounts((sources,) * count), targets=TypeCounts((targets,) * count), is_divided=False
        )

    def without_rows(self) -> TypedBlockSize:
        """Return the size of a block of the same types and relations without vertices and edges."""
        by_relation = (0,) * len(self.edges)
        return TypedBlockSize(self.sources.none(), self.targets.none(), by_relation, by_relation, self.is_divided)


def type_numbers(graph: Graph) -> Tensor:
    """Return the number of each vertex's type among those with features: int64 [N]; without features, their number."""
    numbers = torch.full((graph.num_vertices,), len(graph.features))
    for number, name in enumerate(name for name in graph.vertex_types if name in graph.features):
        span = graph.type_range(name)
        numbers[span.start : span.stop] = number
    return numbers


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Number of rows of a rank before and after each aggregate."""

    rows: tuple[int, ...]
    """Number of rows before each aggregate, and number of rows of the result."""
    num_stored: int = 0
    """Number of embedding rows that the rank stores."""
    relation_rows: tuple[tuple[int, ...], ...] = ()
    """Number of relation rows of each aggregate (pairs of a target and a relation of its in-edges), by relation, in a
    graph with relations."""
    blocks: tuple[BlockSize, ...] = ()
    """Size of the block of each aggregate; empty if no layer reads the edges itself."""
    types: tuple[TypeCounts, ...] = ()
    """Number of rows of each vertex type, for each entry of `rows`, in a graph without x."""
    typed_blocks: tuple[TypedBlockSize, ...] = ()
    """Size of these blocks by vertex type and relation; empty if no layer calls convolutions by relation."""
    has_all_sources: bool = False
    """True if the rank has the rows of all sources: `View.block` returns the rows that it gets."""

    @property
    def num_embedded(self) -> int:
        """Number of first rows of the vertex types without features, in a graph without x."""
        return self.types[0].counts[-1] if self.types else 0
