"""Statistics of a graph that the estimates of time and memory need, from a graph or from numbers typed by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.data.graph import Graph
from weft.data.vertex_types import UNTYPED, TypedShape

VERTEX_BYTES = 27
"""Bytes per vertex without features: row pointers in both directions, label, and membership in each split."""


@dataclass(frozen=True, kw_only=True)
class GraphStats:
    """Sizes and statistics of a graph."""

    num_vertices: int
    """Number of vertices, N."""
    num_edges: int
    """Number of stored edges, E."""
    num_features: int
    """F, the number of columns of x."""
    feature_dtype: torch.dtype = torch.float32
    """Type in which features are stored."""
    stores_edge_ids: bool = True
    """True if the transpose has the position of each edge; see `Adjacency.transposed_edge_ids`."""
    density: float = 1.0
    """Fraction of the features that are not zero."""
    typed_densities: tuple[float, ...] = ()
    """Fraction of nonzero features of each vertex type with features; (): linear transforms read all entries."""
    num_edge_features: int = 0
    """K, the number of columns of edge_features."""
    weighted: bool = False
    """True if edges have weights."""
    typed: TypedShape = UNTYPED
    """Types of vertices and edges; see `Graph.typed`."""
    relation_rows: tuple[int, ...] = ()
    """Number of vertices that have an in-edge by each relation."""
    fresh_share: float = 1.0
    """See `Adjacency.fresh_share`."""

    @classmethod
    def of(cls, graph: Graph) -> GraphStats:
        """Return the statistics of a graph."""
        stored = next((x for x in (graph.x, *graph.features.values()) if x is not None), None)
        transpose = graph.in_edges.known_transpose
        return cls(
            num_vertices=graph.num_vertices,
            num_edges=graph.num_edges,
            num_features=graph.num_features,
            feature_dtype=torch.float32 if stored is None else stored.dtype,
            stores_edge_ids=transpose is None or transpose.edge_ids is not None,
            density=graph.density,
            typed_densities=graph.typed_densities,
            num_edge_features=graph.num_edge_features,
            weighted=graph.in_edges.weight is not None,
            typed=graph.typed,
            relation_rows=graph.count_relation_rows(),
            fresh_share=graph.in_edges.fresh_share,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the graph's arrays in memory or in a graph folder: features, edges both ways, labels and splits."""
        typed = sum(count * width for count, width in self.typed.featured)
        features = self.feature_dtype.itemsize * (self.num_vertices * self.num_features + typed)
        by_edge = (
            8
            + 4 * self.stores_edge_ids
            + 4 * self.num_edge_features
            + 8 * self.weighted
            + 2 * bool(self.typed.num_relations)
        )
        return features + self.num_edges * by_edge + self.num_vertices * VERTEX_BYTES


def degree_counts(graph: Graph) -> list[int]:
    """Return the number of vertices with 0, 1, 2 to 3, 4 to 7, ... in-edges, up to the largest degree."""
    lower_bounds = 2 ** torch.arange(63)
    return torch.bucketize(graph.in_edges.degree, lower_bounds, right=True).bincount().tolist()
