"""Ranges of a rank's targets that are worked on one after the other, what they read, and their order.

(HongTu, sections 4.1 and 5.3.) Tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.parallel.chunks.cut.index_sets import Sets, join, starts_of
from weft.partition.dependencies import Hop, range_bounds
from weft.runtime import native
from weft.runtime.native import _native

VERTEX_COST = 4  # a target costs as much as so many edges, where chunks are to cost the same


class RankSide(NamedTuple):
    """A rank's side of an aggregate."""

    hop: Hop
    rows: Tensor
    """int64: the vertex of each local row, of which the first hop.num_inputs are the aggregate's."""

    def places(self, vertices: Tensor) -> Tensor:
        """int64 [k]: which of its rows some vertices are, all of which it has."""
        known, order = self.rows[: self.hop.num_inputs].sort()
        return order[torch.searchsorted(known, vertices)]


def even_ranges(block: Adjacency, count: int) -> tuple[int, ...]:
    """Bounds of so many ranges of a block's targets that cost about the same; some may be empty."""
    return range_bounds(block, count, VERTEX_COST)


def chunk_sources(block: Adjacency, bounds: Sequence[int], *, loops: bool) -> list[Tensor]:
    """The distinct sources of each range of targets, int64, ascending. loops: a target is a source of its own."""
    ranges = torch.tensor(bounds, dtype=torch.int64)
    starts = block.indptr[ranges]
    sets = Sets.of_groups(block.indices, starts, block.num_sources, ranges if loops else None)
    return list(sets.split(sets.numbers))


def chunk_vertices(part: RankSide, bounds: Sequence[int], *, loops: bool) -> list[Tensor]:
    """The vertices that each range of targets reads, int64, by source number: what `reorder` compares."""
    vertices = torch.cat([part.rows[: part.hop.num_inputs], part.hop.fetched])
    return [vertices[sources] for sources in chunk_sources(part.hop.block, bounds, loops=loops)]


def reorder(sets: Sequence[Sequence[Tensor]], num_vertices: int) -> list[list[int]]:
    """For each rank which of its chunks runs j-th, so that rounds have much in common (algorithm 4).

    sets: of each rank and chunk the distinct vertices, int64; as many chunks of each rank. First every round, which
    has a chunk of rank 0, gets that chunk of each further rank that shares most with it; then each round is followed by
    that one of the others that shares most with it. Of equals, the first.
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
    """The number of chunks that all ranks have."""
    if len(set(counts)) != 1:
        raise ValueError(f"ranks must have as many chunks each, not {list(counts)}")
    return counts[0]
