"""Receptive field of a step: rows that its results, and therefore its gradients, depend on, at each layer boundary.

Layer boundary h are the rows before aggregate h of the model; the last boundary are the results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.runtime import native


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceptiveField:
    """Rows that the results of some vertices depend on.

    At the last layer boundary these are the rows of the vertices; at each earlier one also those of all their sources.
    So a boundary's rows include those of the boundary after it, and one number per vertex describes all boundaries.
    """

    vertices: Tensor
    """int64, ascending: vertices whose results are used."""
    last_boundary: Tensor
    """int16 [N]: last layer boundary at which each vertex's row is read; -1: none."""
    rows: tuple[int, ...]
    """Number of rows that are read at each layer boundary."""
    edges: tuple[int, ...]
    """Number of in-edges of each aggregate."""

    @classmethod
    def of(cls, adj: Adjacency, vertices: Tensor, num_hops: int) -> ReceptiveField:
        """Return the receptive field of some vertices. Reads each in-edge that any aggregate needs once.

        Args:
            adj: In-edges of the whole graph.
            vertices: int64, ascending.
            num_hops: Number of aggregates of the model.
        """
        last_boundary = torch.full((adj.num_targets,), -1, dtype=torch.int16)
        last_boundary[vertices] = num_hops
        part = torch.zeros(adj.num_targets, dtype=torch.int32)
        # Breadth-first search against the edges, one aggregate at a time: only the rows that were new at the boundary
        # after an aggregate can add sources that are new before it. They come first in `reached`.
        reached, new = vertices, vertices
        for boundary in reversed(range(num_hops)):
            new = native.missing_sources(adj.indptr, adj.indices, part, reached, len(new))
            last_boundary[new] = boundary
            reached = torch.cat([new, reached])
        rows = tuple(int((last_boundary >= boundary).sum()) for boundary in range(num_hops + 1))
        degree = adj.indptr.diff()
        edges = tuple(int(degree[last_boundary > hop].sum()) for hop in range(num_hops))
        return cls(vertices=vertices, last_boundary=last_boundary, rows=rows, edges=edges)

    @property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """Rows at each layer boundary and edges of each aggregate, for records."""
        return {"rows": self.rows, "edges": self.edges}
