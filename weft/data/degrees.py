"""Rows of a compressed matrix classified by their number of entries, so that GPU programs get equal work."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SMALL = 32
"""Largest number of entries of a small row; a GPU program processes several small rows."""
PIECE = 1024
"""Largest number of entries that one GPU program processes. A longer row, a hub, is cut into pieces of this size."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Ranges of entries of a compressed matrix, each with its row."""

    first: Tensor
    """int32 or int64 [S]: position of each range's first entry."""
    count: Tensor
    """int32 [S]: number of entries in each range."""
    row: Tensor
    """int32 or int64 [S]: row that each range belongs to."""

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, kw_only=True, eq=False)
class DegreeClasses:
    """All rows of a compressed matrix, each in one class by its number of entries; on the device of the matrix."""

    small: Segments
    """Rows with at most `SMALL` entries, ascending by that number, so that adjacent rows need similar time."""
    middle: Segments
    """Rows with more than `SMALL` and at most `PIECE` entries, longest first."""
    pieces: Segments
    """Pieces of the hubs, in the order of `hubs`: `PIECE` entries each, fewer in the last piece of a hub."""
    hubs: Segments
    """Rows with more than `PIECE` entries; `first` and `count` are ranges of `pieces`, not of entries."""

    @classmethod
    def of(cls, indptr: Tensor, num_entries: int, *, small: int = SMALL, piece: int = PIECE) -> DegreeClasses:
        """Classify the rows of a matrix. Synchronizes with the device once.

        Args:
            indptr: Row pointers, int64 [n + 1].
            num_entries: Number of entries of the matrix.
            small: Largest number of entries of a small row.
            piece: Largest number of entries of a piece.
        """
        degree = indptr.diff()
        order = degree.argsort(stable=True)
        middle, hubs, pieces = torch.stack(
            [
                (degree <= small).sum(),
                (degree <= piece).sum(),
                (-(-degree // piece)).masked_fill(degree <= piece, 0).sum(),
            ]
        ).tolist()
        index_dtype = torch.int32 if max(num_entries, len(indptr)) < 2**31 else torch.int64

        def segments(first: Tensor, count: Tensor, row: Tensor) -> Segments:
            return Segments(first=first.to(index_dtype), count=count.int(), row=row.to(index_dtype))

        def whole(rows: Tensor) -> Segments:
            return segments(indptr[rows], degree[rows], rows)

        hub_rows = order[hubs:]
        num_pieces = -(-degree[hub_rows] // piece)
        first_piece = num_pieces.cumsum(0) - num_pieces
        row = hub_rows.repeat_interleave(num_pieces, output_size=pieces)
        piece_offset = (
            torch.arange(pieces, device=indptr.device) - first_piece.repeat_interleave(num_pieces, output_size=pieces)
        ) * piece
        return cls(
            small=whole(order[:middle]),
            middle=whole(order[middle:hubs].flip(0)),
            pieces=segments(indptr[row] + piece_offset, (degree[row] - piece_offset).clamp(max=piece), row),
            hubs=segments(first_piece, num_pieces, hub_rows),
        )


class CompressedRows:
    """Base of compressed matrices: quantities that kernels need, computed once on the matrix's device and cached."""

    indptr: Tensor
    """int64 [n + 1]: position of each row's first entry."""
    indices: Tensor
    """int32 or int64 [E]: column of each entry."""

    @cached_property
    def degree_classes(self) -> DegreeClasses:
        """Classes of rows with similar numbers of entries."""
        return DegreeClasses.of(self.indptr, len(self.indices))

    @cached_property
    def matrices(self) -> dict[Hashable, Tensor]:
        """Cache of `torch.sparse` matrices with these rows; each kernel chooses its own keys."""
        return {}

    @cached_property
    def entry_rows(self) -> Tensor:
        """Row of every entry, [E], of the dtype of `indices`."""
        rows = torch.arange(len(self.indptr) - 1, dtype=self.indices.dtype, device=self.indptr.device)
        return rows.repeat_interleave(self.indptr.diff(), output_size=len(self.indices))

    @cached_property
    def copies(self) -> Tensor | None:
        """Number of equal entries before each entry in its row, int32 [E]; None if no row contains an entry twice."""
        repeated = torch.zeros(len(self.indices), dtype=torch.bool, device=self.indices.device)
        repeated[1:] = (self.indices[1:] == self.indices[:-1]) & (self.entry_rows[1:] == self.entry_rows[:-1])
        if not repeated.any():
            return None
        positions = torch.arange(len(repeated), device=repeated.device)
        # Equal entries are adjacent. Subtract the position of the first of each group of equal entries.
        return (positions - torch.where(repeated, 0, positions).cummax(0).values).int()
