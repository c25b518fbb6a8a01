"""Edges in the order of their targets, as message functions read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weft.data import version_of


@dataclass(frozen=True, kw_only=True, eq=False)
class SortedEdges:
    """Edges in the order of their targets."""

    edge_index: Tensor
    """Source and target of each edge in its original order, int64 [2, E]."""
    version: int
    """Version of `edge_index`, which grows when it is changed in place."""
    order: Tensor | None
    """Original position of each edge, int64 [E]; None: the original order."""
    sources: Tensor
    """Source of each edge, int64 [E]."""
    indptr: Tensor
    """First edge of each target, int64 [n + 1]."""

    @classmethod
    def of(cls, edge_index: Tensor, num_targets: int) -> SortedEdges:
        """Sort edges by their targets; edges of the same target stay in their order.

        Args:
            edge_index: Source and target of each edge, int64 [2, E].
            num_targets: Number of targets.
        """
        sources, targets = edge_index
        order = None
        if not bool((targets[1:] >= targets[:-1]).all()):
            targets, order = targets.sort(stable=True)
            sources = sources[order]
        indptr = torch.searchsorted(targets, torch.arange(num_targets + 1))
        version = version_of(edge_index)
        return cls(edge_index=edge_index, version=version, order=order, sources=sources.contiguous(), indptr=indptr)

    def check(self, num_sources: int) -> None:
        """Check that the edges join rows that exist.

        Args:
            num_sources: Number of sources.

        Raises:
            IndexError: They do not.
        """
        smallest, largest = self.range_of_sources
        if smallest < 0 or largest >= num_sources or self.indptr[[0, -1]].tolist() != [0, self.num_edges]:
            raise IndexError(f"an edge with a source beyond {num_sources} or a target beyond {self.num_targets} rows")

    @cached_property
    def range_of_sources(self) -> tuple[int, int]:
        """Smallest and largest number of a source; (0, -1) without edges."""
        return (int(self.sources.min()), int(self.sources.max())) if self.num_edges else (0, -1)

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.edge_index.shape[1]

    @property
    def num_targets(self) -> int:
        """Number of targets."""
        return len(self.indptr) - 1
