"""Rows between a GPU's slots and tables of the host, which are pinned: the GPU reads and writes them where they are."""

from __future__ import annotations

import triton
from torch import Tensor

from weft.kernels.triton.device.row_copy import move_rows
from weft.kernels.triton.launch_config import MAX_COLUMNS, TILE, flat, types


def gather_rows(table: Tensor, rows: Tensor, out: Tensor, places: Tensor | None = None) -> None:
    """`out[places[i]] = table[rows[i]]`; places None: out[i]. rows and places int [c] on the GPU, places distinct.

    table [n, F] and out [K, F] of one type, contiguous, on the GPU or pinned.
    """
    _move(table, rows, out, places, len(rows), add=False)


def add_rows(table: Tensor, rows: Tensor, values: Tensor, places: Tensor | None = None) -> None:
    """`table[rows[i]] += values[places[i]]`; places None: values[i]. As `gather_rows`, rows distinct."""
    _move(values, places, table, rows, len(rows), add=True)


def _move(
    table: Tensor, sources: Tensor | None, out: Tensor, places: Tensor | None, num_rows: int, *, add: bool
) -> None:
    width = table.shape[1]
    size = min(triton.next_power_of_2(max(width, 1)), MAX_COLUMNS)
    num_blocks, offset = triton.cdiv(width, size), {"OFFSET": types(table, out)["OFFSET"]}
    arguments = table, sources, out, places, num_rows, width, num_blocks
    flat(move_rows, num_rows, TILE // size, *arguments, programs=num_blocks, ADD=add, C=size, **offset)
