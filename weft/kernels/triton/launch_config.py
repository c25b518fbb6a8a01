"""Launch configuration of kernels: blocks of columns, tiles for classes of row lengths, dtypes of sums and offsets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.data.degrees import DegreeClasses, Segments

MAX_COLUMNS = 128
"""Largest number of columns of a block; a power of two."""
TILE = 2048
"""Number of elements that a program processes at a time: 16 for each thread of four warps."""
MAX_LANES = 32
"""Largest number of entries of one row that are processed side by side."""
SMALL_ROW_LANES = 4
"""Number of entries of a row that are processed side by side if a program has several rows."""
INT64_NUMBERS = 2**31
"""Number of elements of a tensor from which offsets into it are int64."""
MAX_ALIGNMENT = 16
"""Largest alignment of column bounds that is passed to kernels."""
THREAD_NUMBERS = 16
"""Number of elements for each thread."""
WARP = 32
"""Number of threads of a warp."""


class ColumnBlocks(NamedTuple):
    """Columns, cut into blocks that each lie in one head."""

    blocks: Tensor
    """Head, first column and end of each block, int32 [B, 3]."""
    size: int
    """Number of columns of a program, a power of two; no block has more."""
    heads: tuple[int, ...]
    """First block of each head, and the number of blocks, [H + 1]; a head has at least one block."""
    bounds: Tensor
    """First column of each head, and the number of columns, int32 [H + 1]."""
    align: int
    """Power of two that divides all bounds of columns, so that rows can be read in vectors of this width."""


@lru_cache(256)
def column_blocks(bounds: tuple[int, ...], device: torch.device) -> ColumnBlocks:
    """Return the blocks of columns.

    Args:
        bounds: First column of each head, and the number of columns.
        device: Device of the tensors.
    """
    widest = max(end - begin for begin, end in pairwise(bounds))
    size = min(triton.next_power_of_2(max(widest, 1)), MAX_COLUMNS)
    blocks, heads = list[tuple[int, int, int]](), [0]
    for head, (begin, end) in enumerate(pairwise(bounds)):
        blocks += [(head, first, min(first + size, end)) for first in range(begin, max(end, begin + 1), size)]
        heads.append(len(blocks))
    tables = (torch.tensor(table, dtype=torch.int32).to(device) for table in (blocks, bounds))
    return ColumnBlocks(next(tables), size, tuple(heads), next(tables), gcd(MAX_ALIGNMENT, *bounds))


def kernel_types(*tensors: Tensor | None) -> dict[str, Any]:
    """Return the arguments ACC and OFFSET of a kernel.

    ACC is the dtype of sums of the first tensor, OFFSET the integer type of offsets into any of the tensors.
    """
    assert tensors[0] is not None
    needs_int64 = any(tensor is not None and tensor.numel() >= INT64_NUMBERS for tensor in tensors)
    double = tensors[0].dtype == torch.float64
    return {"ACC": tl.float64 if double else tl.float32, "OFFSET": tl.int64 if needs_int64 else tl.int32}


def launch_segments(kernel: Any, segments: Segments, columns: ColumnBlocks, *, lanes: int, **arguments: Any) -> None:
    """Launch a kernel with a program for each group of segments and block of columns.

    Args:
        kernel: The kernel.
        segments: Ranges of entries.
        columns: Blocks of columns.
        lanes: Number of entries of a segment that a program processes side by side.
        **arguments: Further arguments of the kernel.
    """
    if not len(segments):
        return
    max_entries = max(TILE // columns.size, 1)
    lanes = min(lanes, max_entries)
    rows = min(max_entries // lanes, WARP) if lanes <= SMALL_ROW_LANES else 1
    num_blocks = len(columns.blocks)
    kernel[(triton.cdiv(len(segments), rows) * num_blocks,)](
        segments.first,
        segments.count,
        segments.row,
        len(segments),
        num_blocks,
        columns.blocks,
        **arguments,
        R=rows,
        K=lanes,
        C=columns.size,
        ALIGN=columns.align,
        **launch_options(rows * lanes * columns.size),
    )


def whole_rows(classes: DegreeClasses) -> Iterator[tuple[Segments, int]]:
    """Yield the rows that are not hubs, as segments, with their number of lanes."""
    yield classes.small, SMALL_ROW_LANES
    yield classes.middle, MAX_LANES


def launch_items(kernel: Any, count: int, size: int, *arguments: Any, programs: int = 1, **constants: Any) -> None:
    """Launch a kernel that processes items in groups, without segments.

    Args:
        kernel: The kernel.
        count: Number of items.
        size: Number of items of a group.
        *arguments: Arguments of the kernel.
        programs: Number of programs for each group, such as one for each head.
        **constants: Compile-time arguments of the kernel.
    """
    if count:
        kernel[(triton.cdiv(count, size) * programs,)](*arguments, **constants, B=size, **launch_options(TILE))


def launch_options(numbers: int) -> dict[str, Any]:
    """Return the launch options of a program that processes this many elements at a time.

    Fusing of products and sums is set explicitly, since its default differs between releases of Triton.
    """
    warps = max(1, min(4, numbers // (THREAD_NUMBERS * WARP)))
    return {"num_warps": triton.next_power_of_2(warps), "enable_fp_fusion": True}
