"""A graph's statistics: as much of it as a forecast needs, of a graph that is there or typed in by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.data.graph import Graph
from weft.data.vertex_types import UNTYPED, TypedShape

VERTEX_BYTES = 27
"""Of a vertex: where its edges begin, both ways, its label, and whether it is in each split."""


@dataclass(frozen=True, kw_only=True)
class GraphStats:
    """The numbers of a graph."""

    num_vertices: int
    num_edges: int
    num_features: int
    density: float = 1.0
    """The share of the features that are not zero."""
    num_edge_features: int = 0
    weighted: bool = False
    """Whether the edges have weights."""
    typed: TypedShape = UNTYPED
    """The types of vertices and edges."""
    num_relation_rows: int = 0
    """Pairs of a vertex and a relation by which it has an in-edge."""
    fresh_share: float = 1.0
    """See `Adjacency.fresh_share`."""

    @classmethod
    def of(cls, graph: Graph) -> GraphStats:
        """Those of a graph that is there."""
        return cls(
            num_vertices=graph.num_vertices,
            num_edges=graph.num_edges,
            num_features=graph.num_features,
            density=graph.density,
            num_edge_features=graph.num_edge_features,
            weighted=graph.in_edges.weight is not None,
            typed=graph.typed,
            num_relation_rows=int(graph.num_relations_in.sum()) if graph.relations else 0,
            fresh_share=graph.in_edges.fresh_share,
        )

    @property
    def num_bytes(self) -> int:
        """Of the arrays of such a graph in memory or in a store: features, edges both ways, labels and splits."""
        typed = sum(count * width for count, width in self.typed.featured)
        features = 4 * (self.num_vertices * self.num_features + typed + self.num_edges * self.num_edge_features)
        by_edge = 12 + 8 * self.weighted + 2 * bool(self.typed.num_relations)
        return features + self.num_edges * by_edge + self.num_vertices * VERTEX_BYTES


def degree_counts(graph: Graph) -> list[int]:
    """How many vertices have no in-edge, 1, 2 to 3, 4 to 7, ...: a number for each power of two, up to the most."""
    least = 2 ** torch.arange(63)
    return torch.bucketize(graph.in_edges.degree, least, right=True).bincount().tolist()
