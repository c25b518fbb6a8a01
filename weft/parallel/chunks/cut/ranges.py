"""Ranges of a rank's targets (chunks): their bounds, the source rows that they read, and their order.

Source: HongTu, sections 4.1 and 5.3. All tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.parallel.chunks.cut.index_sets import IndexSets, join, starts_of
from weft.partition.dependencies import Hop, range_bounds
from weft.runtime import native
from weft.runtime.native import _native

VERTEX_COST = 4  # cost of a target in edges, where chunks are balanced by cost


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


def chunk_sources(block: Adjacency, bounds: Sequence[int], *, loops: bool) -> list[Tensor]:
    """Return the distinct sources of each range of targets, int64, ascending.

    Args:
        block: Adjacency with the edges into the targets.
        bounds: Boundaries of the ranges, [chunks + 1].
        loops: Each target is also a source of its own range (self-loop).
    """
    ranges = torch.tensor(bounds, dtype=torch.int64)
    starts = block.indptr[ranges]
    sets = IndexSets.of_groups(block.indices, starts, block.num_sources, ranges if loops else None)
    return list(sets.split(sets.numbers))


def chunk_vertices(part: RankHop, bounds: Sequence[int], *, loops: bool) -> list[Tensor]:
    """Return the vertices that each range of targets reads, int64, in the order of their source numbers.

    Args:
        part: Aggregate of one rank.
        bounds: Boundaries of the ranges, [chunks + 1].
        loops: Each target reads its own row too.
    """
    vertices = torch.cat([part.rows[: part.hop.num_inputs], part.hop.fetched])
    return [vertices[sources] for sources in chunk_sources(part.hop.block, bounds, loops=loops)]


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
