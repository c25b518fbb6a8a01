"""Values of a graph on edges while it is translated: which numbers of a slot a row of a tensor has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

RowKind = Literal["edge", "target"]
"""Things for which a value has a row each."""


class Index(NamedTuple):
    """The target of each edge, or a view of it."""


class Constant(NamedTuple):
    """A tensor whose numbers are equal."""

    number: float
    """The number."""
    sizes: tuple[int, ...] = ()
    """Sizes of a row."""


@dataclass(frozen=True)
class Rows:
    """A view of a slot, which is a matrix with a row for each edge or target of a tile."""

    kind: RowKind
    """Things for which it has a row each."""
    slot: int
    """The slot."""
    sizes: tuple[int, ...]
    """Sizes of a row."""
    strides: tuple[int, ...]
    """Columns of the slot from one item of a dimension to the next; 0: all items are the same one."""
    offset: int = 0
    """Column of the first item."""

    @property
    def width(self) -> int:
        """Number of items of a row."""
        return prod(self.sizes)

    @property
    def is_contiguous(self) -> bool:
        """True if the items of a row follow each other."""
        wanted = contiguous_strides(self.sizes)
        return all(
            size == 1 or stride == step for size, stride, step in zip(self.sizes, self.strides, wanted, strict=True)
        )

    @property
    def is_broadcast(self) -> bool:
        """True if some items of a row are the same."""
        return any(size > 1 and not stride for size, stride in zip(self.sizes, self.strides, strict=True))

    @property
    def block(self) -> int:
        """Number of items that follow each other and are the same, over whole dimensions."""
        block = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size > 1 and stride:
                break
            block *= size
        return block

    def expanded(self, sizes: tuple[int, ...]) -> Rows:
        """Return the value broadcast to other sizes of a row.

        Args:
            sizes: The sizes.

        Raises:
            NotImplementedError: Rows would be broadcast along columns.
        """
        missing = len(sizes) - len(self.sizes)
        if missing < 0 or (missing and self.sizes):
            raise NotImplementedError("rows that are broadcast along columns")
        strides = (0,) * missing + tuple(
            0 if size == 1 and wanted != 1 else stride
            for size, wanted, stride in zip(self.sizes, sizes[missing:], self.strides, strict=True)
        )
        return replace(self, sizes=sizes, strides=strides)

    def without_blocks(self) -> Rows:
        """Return one item of each block, see `block`."""
        count = next(number for number in range(len(self.sizes) + 1) if prod(self.sizes[number:]) == self.block)
        return replace(self, sizes=self.sizes[:count], strides=self.strides[:count])

    def narrowed(self, axis: int, first: int, size: int | None, step: int = 1) -> Rows:
        """Return some items of a dimension.

        Args:
            axis: The dimension.
            first: Number of the first item.
            size: Number of items; None: one, without the dimension.
            step: Items from one to the next.
        """
        number = max(first + self.sizes[axis], 0) if first < 0 else min(first, self.sizes[axis])
        new_sizes, new_strides = ((), ()) if size is None else ((size,), (self.strides[axis] * step,))
        return replace(
            self,
            sizes=(*self.sizes[:axis], *new_sizes, *self.sizes[axis + 1 :]),
            strides=(*self.strides[:axis], *new_strides, *self.strides[axis + 1 :]),
            offset=self.offset + number * self.strides[axis],
        )

    def reshaped(self, sizes: tuple[int, ...]) -> Rows | None:
        """Return the items with other sizes of a row; None if the items would have to be copied.

        Args:
            sizes: The sizes.
        """
        if self.is_contiguous:
            return replace(self, sizes=sizes, strides=contiguous_strides(sizes))
        longer = [stride for size, stride in zip(self.sizes, self.strides, strict=True) if size != 1]
        if [size for size in self.sizes if size != 1] != [size for size in sizes if size != 1]:
            return None
        steps = iter(longer)
        return replace(self, sizes=sizes, strides=tuple(next(steps) if size != 1 else 0 for size in sizes))

    def three_dimensions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return sizes and strides of three dimensions with the same items: neighbours are joined if possible.

        Raises:
            NotImplementedError: There are more.
        """
        joined: list[tuple[int, int]] = []
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if joined and joined[-1][1] == size * stride:
                joined[-1] = joined[-1][0] * size, stride
            elif size != 1:
                joined.append((size, stride))
        if len(joined) > 3:
            raise NotImplementedError("a view of more than three dimensions")
        filled = [(1, 0)] * (3 - len(joined)) + joined
        return tuple(size for size, _ in filled), tuple(stride for _, stride in filled)


class Transposed(NamedTuple):
    """The transpose of a matrix with rows."""

    value: Rows
    """The matrix."""


def contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row whose items follow each other."""
    return tuple(prod(sizes[number + 1 :]) for number in range(len(sizes)))
