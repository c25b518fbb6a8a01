"""Relabelling of a batch's vertices with consecutive local numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.runtime.native import _native

WORD, PAGE = 64, 4096
"""Ids per word and per page of the bitmap, as in csrc/relabel.h."""


class Relabeller:
    """Numbers the distinct vertices of a batch from 0. Keeps N / 4 bytes between batches; not thread-safe.

    Args:
        num_vertices: Number of vertices of the graph, N.
    """

    def __init__(self, num_vertices: int) -> None:
        self.num_vertices = num_vertices
        self._clear()

    def _clear(self) -> None:
        """Reset the bitmap."""
        self._words = torch.zeros(-(-self.num_vertices // WORD), 2, dtype=torch.int64)
        self._pages = torch.zeros(-(-self.num_vertices // PAGE), dtype=torch.uint8)

    def relabel(self, first: Tensor, others: Tensor, num_threads: int | None = None) -> tuple[Tensor, Tensor]:
        """Assign local numbers to the vertices of a batch: first those in `first`, then the other ones, ascending.

        Args:
            first: Distinct vertices, int64 [n], on the CPU.
            others: Vertices, int32 or int64 [E], on the CPU.
            num_threads: Number of threads. Default: PyTorch's.

        Returns:
            Position of each of `others` in cat(first, new), int32 [E], and new: the vertices that `first` lacks, int64
            [m], ascending.

        Raises:
            ValueError: If an id is out of range, or twice in `first`.
        """
        first, others = first.contiguous(), others.contiguous()
        arguments = self._words, self._pages, self.num_vertices, first, others
        threads = num_threads or torch.get_num_threads()
        marked = False
        try:
            num_distinct = _native.mark_ids(*arguments, threads)
            marked = True
            if num_distinct >= 2**31:
                raise ValueError(f"{num_distinct:,} vertices are too many for one batch: take a smaller one")
            local = torch.empty(num_distinct, dtype=torch.int32)
            positions = torch.empty(len(others), dtype=torch.int32)
            new = torch.empty(max(num_distinct - len(first), 0), dtype=torch.int64)
            _native.place_ids(*arguments, local, positions, new, threads)
        except BaseException:
            if marked:
                self._clear()
            raise
        return positions, new
