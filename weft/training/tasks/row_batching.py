"""Rows in blocks, so that neither they nor what is made of them need be in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from weft.storage import host_rows as stored
from weft.storage.unnamed_files import is_mapped, release

BLOCK_BYTES = 1 << 22  # of rows at a time; what a loss makes of them takes a few times as much
GPU_BLOCK_BYTES = 1 << 26  # on a GPU, where every block is a dozen launches


def row_blocks(ids: Sequence[Tensor], *tables: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Ranges of the rows of tables [n, F] and, for each of some ids, where those of the range are among them.

    ids: int64, ascending, of rows. What was touched of a mapped table is given back after each range.
    """
    num_rows, at_once = len(tables[0]), max(1, block_bytes(tables[0].device) // max(1, tables[0][:1].nbytes))
    places = [[0, len(chosen)] for chosen in ids]
    if num_rows > at_once:
        bounds = torch.arange(0, num_rows + at_once, at_once, device=tables[0].device)
        places = [torch.searchsorted(chosen, bounds).tolist() for chosen in ids]
    for block, first in enumerate(range(0, num_rows, at_once)):
        rows = slice(first, first + at_once)
        yield rows, [slice(place[block], place[block + 1]) for place in places]
        for table in tables:
            release(table[rows])


def block_bytes(device: torch.device) -> int:
    """Of a block of rows there."""
    return GPU_BLOCK_BYTES if device.type == "cuda" else BLOCK_BYTES


def parts_in_memory(table: Tensor) -> Iterator[slice]:
    """Ranges of rows of a table [n, F]: all at once where it is in memory, blocks where it is mapped."""
    if not is_mapped(table):
        yield slice(0, len(table))
        return
    for rows, _ in row_blocks([], table):
        yield rows


def fill_zeros(table: Tensor) -> Tensor:
    """The table [n, F], made zero."""
    for rows in parts_in_memory(table):
        table[rows].zero_()
    return table


def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """The rows [c, F] of a table [n, F]; ids: int64 [c], ascending."""
    if not is_mapped(table):
        return table.index_select(0, ids)
    out = table.new_empty(len(ids), table.shape[1])
    for _, (part,) in row_blocks([ids], table):
        if part.start < part.stop:
            torch.index_select(table, 0, ids[part], out=out[part])
    return out


def add_rows(table: Tensor, ids: Tensor, added: Tensor) -> None:
    """`table[ids] += added`; ids: int64 [c], ascending and distinct."""
    if not is_mapped(table):
        stored.add_rows(table, ids, added)
        return
    for _, (part,) in row_blocks([ids], table):
        if part.start < part.stop:
            stored.add_rows(table, ids[part], added[part])
