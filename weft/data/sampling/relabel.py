"""Local numbers of a batch's vertices."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.runtime.native import _native

WORD, PAGE = 64, 4096  # ids, as in csrc/relabel.h


class Relabeller:
    """Numbers the distinct vertices of a batch from 0; keeps N / 4 bytes between batches. For one caller at a time."""

    def __init__(self, num_vertices: int) -> None:
        self.num_vertices = num_vertices
        self._clear()

    def _clear(self) -> None:
        self._words = torch.zeros(-(-self.num_vertices // WORD), 2, dtype=torch.int64)
        self._pages = torch.zeros(-(-self.num_vertices // PAGE), dtype=torch.uint8)

    def relabel(self, first: Tensor, others: Tensor, num_threads: int | None = None) -> tuple[Tensor, Tensor]:
        """Where each of `others` is among cat(first, new), and new: what `first` lacks.

        Args:
            first: int64 [n], distinct. others: int32 or int64 [E]. All on the CPU, within [0, num_vertices).

        Returns:
            positions int32 [E], and new int64 [m], ascending. ValueError where an id is out of range or twice in first.
        """
        first, others = first.contiguous(), others.contiguous()
        given = self._words, self._pages, self.num_vertices, first, others
        threads = num_threads or torch.get_num_threads()
        marked = False
        try:
            num_distinct = _native.mark_ids(*given, threads)
            marked = True
            if num_distinct >= 2**31:
                raise ValueError(f"{num_distinct:,} vertices are too many for one batch: take a smaller one")
            local = torch.empty(num_distinct, dtype=torch.int32)
            positions = torch.empty(len(others), dtype=torch.int32)
            new = torch.empty(max(num_distinct - len(first), 0), dtype=torch.int64)
            _native.place_ids(*given, local, positions, new, threads)
        except BaseException:
            if marked:
                self._clear()
            raise
        return positions, new
