"""Row blocks: a table is processed block by block, so that neither it nor intermediate results must fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from weft.storage import host_rows as stored
from weft.storage.unnamed_files import is_mapped, release

BLOCK_BYTES = 1 << 22
"""Bytes of rows in a block. Intermediate results of a loss need a few times as much."""
GPU_BLOCK_BYTES = 1 << 26
"""Bytes of rows in a block on a GPU, where each block costs a dozen kernel launches."""


def row_blocks(ids: Sequence[Tensor], *tables: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Yield ranges of the rows of tables, and the corresponding ranges of lists of row ids.

    After each range, memory of mapped tables is released.

    Args:
        ids: Lists of row ids, each int64 and ascending.
        *tables: Tables [n, F] of the same rows.

    Yields:
        A range of rows, and for each list the range of its ids that are in this range.
    """
    num_rows, block_size = len(tables[0]), max(1, block_bytes(tables[0].device) // max(1, tables[0][:1].nbytes))
    bounds_of_ids = [[0, len(row_ids)] for row_ids in ids]
    if num_rows > block_size:
        bounds = torch.arange(0, num_rows + block_size, block_size, device=tables[0].device)
        bounds_of_ids = [torch.searchsorted(row_ids, bounds).tolist() for row_ids in ids]
    for block, first in enumerate(range(0, num_rows, block_size)):
        rows = slice(first, first + block_size)
        yield rows, [slice(positions[block], positions[block + 1]) for positions in bounds_of_ids]
        for table in tables:
            release(table[rows])


def block_bytes(device: torch.device) -> int:
    """Return the number of bytes of rows in a block on a device."""
    return GPU_BLOCK_BYTES if device.type == "cuda" else BLOCK_BYTES


def parts_in_memory(table: Tensor) -> Iterator[slice]:
    """Yield ranges of the rows of a table [n, F]: one range if it is in memory, blocks if it is mapped from a file."""
    if not is_mapped(table):
        yield slice(0, len(table))
        return
    for rows, _ in row_blocks([], table):
        yield rows


def fill_zeros(table: Tensor) -> Tensor:
    """Set a table [n, F] to zero and return it."""
    for rows in parts_in_memory(table):
        table[rows].zero_()
    return table


def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Return selected rows [c, F] of a table.

    Args:
        table: The table, [n, F].
        ids: Row ids, int64 [c], ascending.
    """
    if not is_mapped(table):
        return table.index_select(0, ids)
    out = table.new_empty(len(ids), table.shape[1])
    for _, (part,) in row_blocks([ids], table):
        if part.start < part.stop:
            torch.index_select(table, 0, ids[part], out=out[part])
    return out


def add_rows(table: Tensor, ids: Tensor, added: Tensor) -> None:
    """Add rows to a table: `table[ids] += added`.

    Args:
        table: The table, [n, F], updated in place.
        ids: Row ids, int64 [c], ascending and distinct.
        added: The rows to add, [c, F].
    """
    if not is_mapped(table):
        stored.add_rows(table, ids, added)
        return
    for _, (part,) in row_blocks([ids], table):
        if part.start < part.stop:
            stored.add_rows(table, ids[part], added[part])
