"""Sizes of each layer on a rank, on which the costs of a model's dense layers depend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data import Adjacency, Graph

TARGETS_AT_ONCE = 1 << 17
"""Number of vertices whose self-loops are counted at once."""


class BlockSize(NamedTuple):
    """Size of the block of one aggregate, for a layer that reads the edges itself."""

    sources: int
    """Number of source vertices."""
    targets: int
    """Number of target vertices."""
    edges: int
    """Number of edges."""
    loops: int
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


class TypedBlockSize(NamedTuple):
    """Size of the block of one aggregate by vertex type and relation. All vertices without features are one type."""

    sources: tuple[int, ...]
    """Number of sources of each type."""
    targets: tuple[int, ...]
    """Number of targets of each type."""
    edges: tuple[int, ...]
    """Number of edges of each relation."""
    loops: tuple[int, ...]
    """Number of self-loops among the edges of each relation."""
    in_order: bool = False
    """True if all sources are targets, and are sorted by type."""

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

        def count(numbers: Tensor, most: int) -> tuple[int, ...]:
            return tuple(torch.bincount(numbers, minlength=most).tolist())

        of_sources = types[sources]
        return cls(
            sources=count(of_sources, num_types),
            targets=count(types[targets], num_types),
            edges=count(relation, num_relations),
            loops=count(relation[edges[0] == edges[1]], num_relations),
            in_order=len(sources) == len(targets) and bool((of_sources[1:] >= of_sources[:-1]).all()),
        )

    def of_relation(self, relation: int, source: int, target: int) -> BlockSize:
        """Return the size of the edges of a relation, with the sources and targets of its types.

        Args:
            relation: Number of the relation.
            source: Number of the vertex type of its sources.
            target: Number of the vertex type of its targets.
        """
        return BlockSize(self.sources[source], self.targets[target], self.edges[relation], self.loops[relation])

    def with_all_rows(self, sources: int, targets: int) -> TypedBlockSize:
        """Return the size if rows of all types are computed for each type.

        Args:
            sources: Number of sources.
            targets: Number of targets.
        """
        count = len(self.sources)
        return self._replace(sources=(sources,) * count, targets=(targets,) * count, in_order=False)

    def without_rows(self) -> TypedBlockSize:
        """Return the size of a block of the same types and relations without vertices and edges."""
        by_type, by_relation = (0,) * len(self.sources), (0,) * len(self.edges)
        return TypedBlockSize(by_type, by_type, by_relation, by_relation)


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
    featured: tuple[int, ...] = ()
    """Number of first rows of each vertex type with features, in a graph without x."""
    num_embedded: int = 0
    """Number of first rows of the vertex types without features, in a graph without x."""
    num_stored: int = 0
    """Number of embedding rows that the rank stores."""
    relation_rows: tuple[int, ...] = ()
    """Number of relation rows of each aggregate (pairs of a target and a relation of its in-edges), in a graph with
    relations."""
    blocks: tuple[BlockSize, ...] = ()
    """Size of the block of each aggregate; empty if no layer reads the edges itself."""
    typed_blocks: tuple[TypedBlockSize, ...] = ()
    """Size of these blocks by vertex type and relation; empty if no layer calls convolutions by relation."""
