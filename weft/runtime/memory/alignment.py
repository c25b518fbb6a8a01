"""Alignment of rows to cache lines, so that a sum over edges reads fewer lines."""

from __future__ import annotations

from functools import cache
from math import gcd
from statistics import fmean

from torch import Tensor

LINE_BYTES = 64
"""Bytes of a cache line."""
MIN_LINES_SAVED = 0.5
"""Mean number of cache lines saved for each row from which padding pays off. Measured with 5 to 172 columns
(`benchmarks/kernels.py`).
"""


@cache
def row_stride(width: int, itemsize: int) -> int:
    """Return the number of elements from one row to the next: the width, or the width padded to whole cache lines.

    Contiguous rows begin at different offsets in their cache lines, so on average they touch more lines than they fill.
    Padding pays off if it saves `MIN_LINES_SAVED` of these, unless a row fills only one line.

    Args:
        width: Number of columns.
        itemsize: Bytes of an element.
    """
    line = LINE_BYTES // itemsize
    num_lines = -(-width // line)  # lines of an aligned row
    begins = range(0, line, gcd(width, line))  # offsets in a line at which contiguous rows begin
    saved = fmean(-(-(begin + width) // line) for begin in begins) - num_lines
    return num_lines * line if num_lines > 1 and saved >= MIN_LINES_SAVED else width


def needs_padding(like: Tensor, width: int) -> bool:
    """Return True if rows should be padded to whole cache lines. This is so on the CPU only.

    Args:
        like: Tensor with the dtype and device of the rows.
        width: Number of columns.
    """
    return like.device.type == "cpu" and row_stride(width, like.itemsize) > width


def empty_aligned(like: Tensor, num_rows: int, width: int) -> Tensor:
    """Return uninitialized rows, [num_rows, width], padded with zeros if this pays off.

    Args:
        like: Tensor with the dtype and device of the rows.
        num_rows: Number of rows.
        width: Number of columns.
    """
    if not needs_padding(like, width):
        return like.new_empty(num_rows, width)
    rows = like.new_empty(num_rows, row_stride(width, like.itemsize))
    rows[:, width:] = 0  # sums read the padding, and arithmetic on denormal numbers would be slow
    return rows[:, :width]


def is_aligned(x: Tensor) -> bool:
    """Return True if each row of x [n, F] begins at a cache line, right after the lines of the previous row.

    Rows that are farther apart do not count: with many edges, copying them takes less time than summing them in place.
    """
    return x.stride() == (padded_width(x), 1) and x.data_ptr() % LINE_BYTES == 0


def readable_width(x: Tensor) -> int:
    """Return the number of columns of x that a kernel may read: if rows are aligned, with the padding."""
    num_stored = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    return padded_width(x) if is_aligned(x) and len(x) * padded_width(x) <= num_stored else x.shape[1]


def padded_width(x: Tensor) -> int:
    """Return the width of x, rounded up to whole cache lines."""
    line = LINE_BYTES // x.itemsize
    return -(-x.shape[1] // line) * line
