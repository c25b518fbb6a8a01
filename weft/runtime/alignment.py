"""Rows that begin at cache lines, where a sum over edges then reads fewer lines."""

from __future__ import annotations

from functools import cache
from math import gcd
from statistics import fmean

from torch import Tensor

LINE_BYTES = 64
MIN_LINES_SAVED = 0.5
"""Lines of a row, on the mean, for which its gaps pay: measured at 5 to 172 columns (`benchmarks/kernels.py`)."""


@cache
def row_stride(width: int, itemsize: int) -> int:
    """How many numbers from the beginning of a row of `width` to the next one's: `width`, or up to a cache line."""
    line = LINE_BYTES // itemsize
    least = -(-width // line)
    begins = range(0, line, gcd(width, line))  # of rows side by side, in their lines
    saved = fmean(-(-(begin + width) // line) for begin in begins) - least
    return least * line if least > 1 and saved >= MIN_LINES_SAVED else width


def needs_padding(like: Tensor, width: int) -> bool:
    """Whether rows of a width, of a tensor's type and beside it, are to have gaps: on the CPU alone."""
    return like.device.type == "cpu" and row_stride(width, like.itemsize) > width


def empty_aligned(like: Tensor, num_rows: int, width: int) -> Tensor:
    """Rows [num_rows, width] without values, and with gaps of zeros where they are to have some."""
    if not needs_padding(like, width):
        return like.new_empty(num_rows, width)
    rows = like.new_empty(num_rows, row_stride(width, like.itemsize))
    rows[:, width:] = 0  # they are read, and some numbers take long
    return rows[:, :width]


def is_aligned(x: Tensor) -> bool:
    """Whether the rows of x [n, F] begin at one cache line after the other. Rows that are farther apart are not meant.

    Copies of those take less time than sums of them, where edges are many, and about as much else.
    """
    return x.stride() == (padded_width(x), 1) and x.data_ptr() % LINE_BYTES == 0


def readable_width(x: Tensor) -> int:
    """How many columns of each row of x, from its first on, there are to be read: whole lines, or x's own."""
    behind = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    return padded_width(x) if is_aligned(x) and len(x) * padded_width(x) <= behind else x.shape[1]


def padded_width(x: Tensor) -> int:
    """How many numbers the cache lines have that a row of x takes at least."""
    line = LINE_BYTES // x.itemsize
    return -(-x.shape[1] // line) * line
