"""Ranges of a rank's targets (chunks): their bounds, the source rows that they read, and their order.

Source: HongTu, sections 4.1 and 5.3. All tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.partition.dependencies import Hop, range_bounds
from weft.runtime import native
from weft.runtime.native import _native

VERTEX_COST = 4  # cost of a target in edges, where chunks are balanced by cost
GROUPED_VALUES = 1 << 22
"""Number of values of which `distinct_groups` finds the distinct ones at once, if no group has more."""


class RankHop(NamedTuple):
    """One aggregate on one rank, with the vertices of its input rows."""

    hop: Hop
    """Block of the aggregate, with its local and its fetched sources."""
    rows: Tensor
    """Vertex of each local row, int64; the first `hop.num_inputs` rows are inputs of the aggregate."""

    def rows_of(self, vertices: Tensor) -> Tensor:
        """Return the local row of each given vertex, int64 [k]. All vertices must be on this rank."""
        if not len(vertices):  # as on a single rank: no need to sort all rows
            return vertices
        sorted_vertices, order = self.rows[: self.hop.num_inputs].sort()
        return order[torch.searchsorted(sorted_vertices, vertices)]


def even_ranges(block: Adjacency, count: int) -> tuple[int, ...]:
    """Return the bounds of ranges of targets with about the same cost; some ranges may be empty.

    Args:
        block: Adjacency whose targets are split. A target costs as much as `VERTEX_COST` edges.
        count: Number of ranges.
    """
    return range_bounds(block, count, VERTEX_COST)


def distinct_groups(values: Tensor, starts: Tensor, num_numbers: int, ranges: Tensor | None = None) -> Iterator[Tensor]:
    """Yield the distinct numbers of each group of values, ascending, in the dtype of `values`.

    Args:
        values: Numbers below `num_numbers` in any order and with duplicates, int32 or int64.
        starts: Position in `values` of each group's first number, and the end of the last group, int64 [groups + 1].
        num_numbers: Upper bound (exclusive) of the numbers.
        ranges: If given, the numbers from `ranges[i]` to `ranges[i + 1]` also belong to group i, int64 [groups + 1].
    """
    values, room = values.contiguous(), starts.diff() if ranges is None else starts.diff() + ranges.diff()
    ends, last = room.cumsum(0), 0
    while last < len(room):  # a few groups at a time, because most numbers occur several times
        first, done = last, int(ends[last - 1]) if last else 0
        last = max(first + 1, int(torch.searchsorted(ends, done + GROUPED_VALUES, right=True)))
        part, counts = slice(first, last + 1), torch.empty(last - first, dtype=torch.int64)
        distinct = torch.empty(int(room[first:last].sum()), dtype=values.dtype)
        of_ranges = None if ranges is None else ranges[part]
        _native.distinct(values, starts[part], of_ranges, num_numbers, distinct, counts, torch.get_num_threads())
        for group, count in zip(distinct.split(room[first:last].tolist()), counts.tolist(), strict=True):
            yield group[:count]


def chunk_sources(block: Adjacency, bounds: Sequence[int], *, loops: bool) -> Iterator[Tensor]:
    """Yield the distinct sources of each range of targets, ascending, in the dtype of the block's `indices`.

    Args:
        block: Adjacency with the edges into the targets.
        bounds: Boundaries of the ranges, [chunks + 1].
        loops: Each target is also a source of its own range (self-loop).
    """
    ranges = torch.tensor(bounds, dtype=torch.int64)
    return distinct_groups(block.indices, block.indptr[ranges], block.num_sources, ranges if loops else None)


def reorder(sets: Sequence[Sequence[Tensor]], num_vertices: int) -> list[list[int]]:
    """Return, for each rank, an order of its chunks in which neighbouring rounds read many common vertices.

    Source: HongTu, algorithm 4. Ties go to the lowest number. The algorithm is greedy:

    1. Each chunk of rank 0 starts a round. Every further rank in turn gives each round the chunk that shares most
       vertices with it.
    2. The first round stays first. The round that shares most vertices with the last chosen one comes next.

    Args:
        sets: For each rank and chunk, the distinct vertices that it reads, int64. All ranks must have the same number
            of chunks.
        num_vertices: Number of vertices of the graph.

    Returns:
        For each rank, the number of the chunk that runs j-th.
    """
    num_chunks = same_count([len(chunks) for chunks in sets])
    flat = [chunk for chunks in sets for chunk in chunks]
    vertices, starts = join(flat).to(native.id_dtype(num_vertices)), starts_of([len(chunk) for chunk in flat])
    starts_t, members, _ = native.transpose(starts, vertices, num_vertices)
    orders = torch.empty(len(sets), num_chunks, dtype=torch.int64)
    _native.reorder_chunks(starts_t, members, orders, torch.get_num_threads())
    result: list[list[int]] = orders.tolist()
    return result


def same_count(counts: Sequence[int]) -> int:
    """Return the number of chunks per rank.

    Raises:
        ValueError: If ranks differ in their number of chunks.
    """
    if len(set(counts)) != 1:
        raise ValueError(f"all ranks must have the same number of chunks, not {list(counts)}")
    return counts[0]


def join(tensors: Sequence[Tensor], dtype: torch.dtype = torch.int64) -> Tensor:
    """Return tensors concatenated; an empty tensor if there are none.

    Args:
        tensors: The tensors, all of one type.
        dtype: Their type.
    """
    return torch.cat([torch.empty(0, dtype=dtype), *tensors])


def starts_of(counts: Sequence[int]) -> Tensor:
    """Return the start of each of several consecutive parts, and the total, int64 [counts + 1]."""
    return torch.tensor([0, *counts]).cumsum(0)
