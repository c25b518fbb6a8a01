"""What of a graph a step reads: the rows that its results, and so its gradients, depend on, level by level.

A model's aggregates are its hops; level h are the rows before hop h, and the last level the results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.runtime import native


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceptiveField:
    """The rows that some vertices' results are made of: of the last level theirs, before that also all their sources'.

    So each level has the rows of the level behind it, and a vertex's highest level tells all.
    """

    vertices: Tensor
    """int64, ascending: whose results are read."""
    levels: Tensor
    """int16 [N]: the highest level of each vertex that is read, -1: none."""
    rows: tuple[int, ...]
    """How many there are of each level."""
    edges: tuple[int, ...]
    """How many in-edges each hop goes over."""

    @classmethod
    def of(cls, adj: Adjacency, vertices: Tensor, num_hops: int) -> ReceptiveField:
        """That of some vertices by so many hops; reads each in-edge that any hop goes over once."""
        levels = torch.full((adj.num_targets,), -1, dtype=torch.int16)
        levels[vertices] = num_hops
        part = torch.zeros(adj.num_targets, dtype=torch.int32)
        found, new = vertices, vertices
        for level in reversed(range(num_hops)):
            new = native.gather_block(adj.indptr, adj.indices, part, found, len(new))[2]
            levels[new] = level
            found = torch.cat([new, found])
        rows = tuple(int((levels >= level).sum()) for level in range(num_hops + 1))
        edges = tuple(int(adj.degree[levels > hop].sum()) for hop in range(num_hops))
        return cls(vertices=vertices, levels=levels, rows=rows, edges=edges)

    @property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """The rows of each level and the edges of each hop, as a record has them."""
        return {"rows": self.rows, "edges": self.edges}
