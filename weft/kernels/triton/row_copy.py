"""Copies of rows between GPU memory and pinned host memory, which the GPU accesses directly."""

from __future__ import annotations

import triton
from torch import Tensor

from weft.kernels.triton.device.row_copy import move_rows
from weft.kernels.triton.launch_config import MAX_COLUMNS, TILE, kernel_types, launch_items


def gather_rows(table: Tensor, rows: Tensor, out: Tensor, out_rows: Tensor | None = None) -> None:
    """Copy rows: `out[out_rows[i]] = table[rows[i]]`.

    Args:
        table: Rows to read, [n, F], contiguous, on the GPU or in pinned host memory.
        rows: Row ids in the table, integers [c] on the GPU.
        out: Rows to write, [K, F], with the dtype of the table.
        out_rows: Distinct row ids in `out`, integers [c] on the GPU; None: `out[i]`.
    """
    _move(table, rows, out, out_rows, len(rows), add=False)


def add_rows(table: Tensor, rows: Tensor, values: Tensor, value_rows: Tensor | None = None) -> None:
    """Add rows in place: `table[rows[i]] += values[value_rows[i]]`.

    Args:
        table: Rows to change, [n, F], contiguous, on the GPU or in pinned host memory.
        rows: Distinct row ids in the table, integers [c] on the GPU.
        values: Rows to add, [K, F], with the dtype of the table.
        value_rows: Row ids in `values`, integers [c] on the GPU; None: `values[i]`.
    """
    _move(values, value_rows, table, rows, len(rows), add=True)


def _move(
    table: Tensor, sources: Tensor | None, out: Tensor, out_rows: Tensor | None, num_rows: int, *, add: bool
) -> None:
    width = table.shape[1]
    size = min(triton.next_power_of_2(max(width, 1)), MAX_COLUMNS)
    num_blocks, offset = triton.cdiv(width, size), {"OFFSET": kernel_types(table, out)["OFFSET"]}
    arguments = table, sources, out, out_rows, num_rows, width, num_blocks
    launch_items(move_rows, num_rows, TILE // size, *arguments, programs=num_blocks, ADD=add, C=size, **offset)
