"""How kernels are launched: blocks of columns, tiles by degree class, types of sums and of offsets."""

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
"""Of a block; a power of two."""
TILE = 2048
"""Numbers of rows that a program holds at a time: 16 for each thread of four warps."""
MAX_LANES = 32
"""Entries of one row that are added up side by side."""
FEW_LANES = 4
"""The same where a program has several rows."""
WIDE = 2**31
"""Numbers of a tensor from which offsets into it are int64."""
MOST_ALIGNED = 16
THREAD_NUMBERS = 16
WARP = 32


class ColumnBlocks(NamedTuple):
    """Columns cut into blocks that each lie in one head."""

    blocks: Tensor
    """int32 [B, 3]: head, first column and end of each."""
    size: int
    """Columns that a program has, a power of two; a block has up to so many."""
    heads: tuple[int, ...]
    """Where the blocks of each head begin, [H + 1]; each has at least one."""
    bounds: Tensor
    """int32 [H + 1]: where the columns of each head begin."""
    align: int
    """A power of two that divides all of these, so that rows are read by vectors of so many."""


@lru_cache(256)
def columns_of(bounds: tuple[int, ...], device: torch.device) -> ColumnBlocks:
    """The blocks of heads with these bounds."""
    widest = max(end - begin for begin, end in pairwise(bounds))
    size = min(triton.next_power_of_2(max(widest, 1)), MAX_COLUMNS)
    blocks, heads = list[tuple[int, int, int]](), [0]
    for head, (begin, end) in enumerate(pairwise(bounds)):
        blocks += [(head, first, min(first + size, end)) for first in range(begin, max(end, begin + 1), size)]
        heads.append(len(blocks))
    tables = (torch.tensor(table, dtype=torch.int32).to(device) for table in (blocks, bounds))
    return ColumnBlocks(next(tables), size, tuple(heads), next(tables), gcd(MOST_ALIGNED, *bounds))


def types(*tensors: Tensor | None) -> dict[str, Any]:
    """The type of sums of the first tensor's numbers, and that of offsets into any of them."""
    assert tensors[0] is not None
    wide = any(tensor is not None and tensor.numel() >= WIDE for tensor in tensors)
    double = tensors[0].dtype == torch.float64
    return {"ACC": tl.float64 if double else tl.float32, "OFFSET": tl.int64 if wide else tl.int32}


def over_segments(kernel: Any, segments: Segments, columns: ColumnBlocks, *, lanes: int, **arguments: Any) -> None:
    """A program for some segments and each block of columns; lanes: entries of a segment that it has at a time."""
    if not len(segments):
        return
    most = max(TILE // columns.size, 1)
    lanes = min(lanes, most)
    rows = min(most // lanes, WARP) if lanes <= FEW_LANES else 1
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
        **options(rows * lanes * columns.size),
    )


def whole_rows(classes: DegreeClasses) -> Iterator[tuple[Segments, int]]:
    """The rows that are no hubs, with how many lanes they get."""
    yield classes.small, FEW_LANES
    yield classes.middle, MAX_LANES


def flat(kernel: Any, count: int, size: int, *arguments: Any, programs: int = 1, **constants: Any) -> None:
    """A program for `size` of so many things at a time, `programs` times."""
    if count:
        kernel[(triton.cdiv(count, size) * programs,)](*arguments, **constants, B=size, **options(TILE))


def options(numbers: int) -> dict[str, Any]:
    """Of a launch that holds so many numbers; that products and sums may fuse is said, since releases differ in it."""
    warps = max(1, min(4, numbers // (THREAD_NUMBERS * WARP)))
    return {"num_warps": triton.next_power_of_2(warps), "enable_fp_fusion": True}
