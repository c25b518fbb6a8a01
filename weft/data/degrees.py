"""Rows of a compressed matrix by how many entries they have: what a GPU's programs share out among themselves."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SMALL = 32
"""Entries up to which several rows go to one program."""
PIECE = 1024
"""Entries up to which a row is one program's; one with more is a hub, cut into pieces of so many."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Ranges of entries, each with the row that it belongs to."""

    first: Tensor
    """int32 or int64 [S]: where each begins."""
    count: Tensor
    """int32 [S]: how many entries it has."""
    row: Tensor
    """int32 or int64 [S]."""

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, kw_only=True, eq=False)
class DegreeClasses:
    """All rows of a matrix, each in one class; made on the device of the matrix."""

    small: Segments
    """Rows with up to `SMALL` entries, or none, by their number, so that neighbours have about as many."""
    middle: Segments
    """Rows with up to `PIECE` entries, the largest first."""
    pieces: Segments
    """Of the hubs, in their order, `PIECE` entries each but the last of a hub."""
    hubs: Segments
    """The other rows; `first` and `count` are of their pieces."""

    @classmethod
    def of(cls, indptr: Tensor, num_entries: int, *, small: int = SMALL, piece: int = PIECE) -> DegreeClasses:
        """The classes of rows with these pointers, int64 [n + 1]. Waits for the device once."""
        degree = indptr.diff()
        order = degree.argsort(stable=True)
        middle, hubs, pieces = torch.stack(
            [
                (degree <= small).sum(),
                (degree <= piece).sum(),
                (-(-degree // piece)).masked_fill(degree <= piece, 0).sum(),
            ]
        ).tolist()
        narrow = torch.int32 if max(num_entries, len(indptr)) < 2**31 else torch.int64

        def segments(first: Tensor, count: Tensor, row: Tensor) -> Segments:
            return Segments(first=first.to(narrow), count=count.int(), row=row.to(narrow))

        def whole(rows: Tensor) -> Segments:
            return segments(indptr[rows], degree[rows], rows)

        cut = order[hubs:]
        each = -(-degree[cut] // piece)
        begin = each.cumsum(0) - each
        row = cut.repeat_interleave(each, output_size=pieces)
        skipped = (
            torch.arange(pieces, device=indptr.device) - begin.repeat_interleave(each, output_size=pieces)
        ) * piece
        return cls(
            small=whole(order[:middle]),
            middle=whole(order[middle:hubs].flip(0)),
            pieces=segments(indptr[row] + skipped, (degree[row] - skipped).clamp(max=piece), row),
            hubs=segments(begin, each, cut),
        )


class CompressedRows:
    """What is made once of compressed rows, on their device, where a kernel wants it."""

    indptr: Tensor
    indices: Tensor

    @cached_property
    def degree_classes(self) -> DegreeClasses:
        return DegreeClasses.of(self.indptr, len(self.indices))

    @cached_property
    def matrices(self) -> dict[Hashable, Tensor]:
        """PyTorch's sparse matrices of the rows, by what a kernel tells them apart."""
        return {}

    @cached_property
    def entry_rows(self) -> Tensor:
        """The row of every entry, as `indices` [E]."""
        rows = torch.arange(len(self.indptr) - 1, dtype=self.indices.dtype, device=self.indptr.device)
        return rows.repeat_interleave(self.indptr.diff(), output_size=len(self.indices))

    @cached_property
    def copies(self) -> Tensor | None:
        """How many of the entries before it in its row each one equals, int32 [E]; None: all entries differ."""
        again = torch.zeros(len(self.indices), dtype=torch.bool, device=self.indices.device)
        again[1:] = (self.indices[1:] == self.indices[:-1]) & (self.entry_rows[1:] == self.entry_rows[:-1])
        if not again.any():
            return None
        place = torch.arange(len(again), device=again.device)
        return (place - torch.where(again, 0, place).cummax(0).values).int()
