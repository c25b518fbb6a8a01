"""Division of an aggregate over the whole graph into chunks, the same on every rank.

Source: NeutronTP, section 4.2.1. A chunk is a range of targets with all edges into them. Any range is valid, because
the rows of an aggregate's result do not depend on each other. Gradients of sources are summed over the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data import Adjacency, Graph
from weft.nn import SLOT_BYTES, Aggregate, ByRelation, RelationIndex, WorkingSet
from weft.parallel.chunks.cut.ranges import RankHop, even_ranges
from weft.parallel.chunks.cut.residency import ChunkSources
from weft.parallel.chunks.run.chunk_aggregates import layout_of
from weft.parallel.chunks.run.rounds import Schedule, in_place, pays_in_place
from weft.parallel.columns.exchange_plan import AssignedRelations, ExchangePlan
from weft.partition import Hop
from weft.runtime import native
from weft.storage.unnamed_files import ArrayFile
from weft.utils.errors import InputError

PREFETCH_FACTOR = 4
"""The next chunk is loaded ahead if the limit is this many times the minimum; both chunks then fit."""


class Cut(NamedTuple):
    """An aggregate's chunks, with their rounds and their peak memory."""

    bounds: tuple[int, ...]
    """Boundaries of the ranges of targets, [chunks + 1]."""
    schedule: Schedule
    """Rounds, one for each chunk."""
    ahead: bool
    """True if the next chunk is loaded while one is computed."""
    num_bytes: int
    """Device bytes of the largest chunk."""


class CutSizes(NamedTuple):
    """Sizes of the chunks of a `Cut`, without the index tensors of its rounds."""

    bounds: tuple[int, ...]
    """Boundaries of the ranges of targets, [chunks + 1]."""
    num_slots: int
    """Number of slots of the buffer."""
    in_place: bool
    """True if rows are read where they are stored."""
    ahead: bool
    """True if the next chunk is loaded while one is computed."""
    num_bytes: int
    """Device bytes of the largest chunk."""
    loads: tuple[int, ...]
    """Number of rows loaded into slots before each chunk."""
    write_backs: tuple[int, ...]
    """Number of rows whose gradients are written back after each chunk (backward)."""
    edges: list[int]
    """Number of edges of each chunk."""
    loops: list[int]
    """Number of self-loops added to each chunk, because its aggregate needs them and the graph lacks them."""

    @classmethod
    def of(cls, cut: Cut, op: Aggregate, edges: Adjacency) -> CutSizes:
        """Return the sizes of a cut.

        Args:
            cut: The chunks.
            op: The aggregate.
            edges: Adjacency of the whole graph.
        """
        rounds = cut.schedule.sizes
        loads, write_backs = zip(*((each.num_loads, each.num_write_backs) for each in rounds), strict=True)
        lacking = ~edges.has_loop & holds_targets(op)
        return cls(
            bounds=tuple(cut.bounds),
            num_slots=cut.schedule.num_slots,
            in_place=cut.schedule.in_place,
            ahead=cut.ahead,
            num_bytes=cut.num_bytes,
            loads=loads,
            write_backs=write_backs,
            edges=edges.indptr[torch.tensor(cut.bounds)].diff().tolist(),
            loops=by_chunk(lacking, cut.bounds),
        )


class Chunking:
    """Divides the aggregates over a graph into chunks, the same on every rank.

    Args:
        graph: The whole graph.
        limit: Device bytes that an aggregate may use; None: no limit.
        count: Minimum number of chunks, at most one for each target.
        pipeline: Rows of neighbouring chunks cross the network while a chunk is computed.
    """

    def __init__(self, graph: Graph, *, limit: int | None = None, count: int = 0, pipeline: bool = True) -> None:
        self.graph, self.limit, self.pipeline = graph, limit, pipeline
        self.count = min(count, graph.num_vertices)
        self.hop = Hop.of_graph(graph.in_edges)
        self.sizes = cache(lambda op, needs: CutSizes.of(self.cut(op, needs), op, self.hop.block))
        """Returns the sizes of the chunks that `cut` returns; cached."""
        self.relations = cache(self._assign)
        """Returns the relation rows assigned to ranks, given this rank and the number of ranks; cached."""

    def saves_results(self, op: Aggregate, steps: int) -> bool:
        """Return True if an aggregate's result is saved for the backward pass.

        If not, a nonlinear aggregate is computed again.

        Args:
            op: The aggregate.
            steps: Number of steps.
        """
        return self.limit is None and steps == 1 and op.can_save and not op.linear

    def cut(self, op: Aggregate, needs: WorkingSet) -> Cut:
        """Return the chunks of an aggregate: of even cost if these fit the limit, else each as large as fits.

        Args:
            op: The aggregate.
            needs: Bytes per target, source and edge of a chunk.

        Raises:
            InputError: If a single target does not fit.
        """
        limit, block = self.limit, self.hop.block
        if limit is None:
            bounds = even_ranges(block, max(self.count, 1))
            if pays_in_place(self.hop, len(bounds) - 1):
                return Cut(bounds, in_place(self.hop, bounds), ahead=False, num_bytes=0)
            return self._planned(op, needs, bounds, ahead=False)
        if (least := least_bytes(block, op, needs)) > limit:
            raise limit_error(limit, least)
        ahead = limit >= PREFETCH_FACTOR * least
        cuts = (self._planned(op, needs, bounds, ahead=ahead) for bounds in self._tries(op, needs, limit))
        return next(cut for cut in cuts if cut.num_bytes <= limit)

    def _assign(self, rank: int, size: int) -> AssignedRelations:
        types, number = self.graph.edge_type, len(self.graph.relations)
        assert types is not None
        rows = RelationIndex.of(self.graph.in_edges, types, number)
        local, position = rows.local(rank, size, number)
        return AssignedRelations(rows=rows, local=local, position=position, rank=rank, size=size)

    def exchange_plan(
        self, op: Aggregate, bounds: Sequence[int], rank: int, size: int, device: torch.device | str = "cpu"
    ) -> ExchangePlan:
        """Return the rows that ranks exchange before and after each chunk.

        Args:
            op: The aggregate.
            bounds: Boundaries of its chunks.
            rank: The rank.
            size: Number of ranks.
            device: Device of the index tensors.
        """
        relations = self.relations(rank, size) if isinstance(op, ByRelation) else None
        return ExchangePlan.of(self.hop.block, bounds, rank, size, device, pipeline=self.pipeline, relations=relations)

    def _tries(self, op: Aggregate, needs: WorkingSet, limit: int) -> Iterator[tuple[int, ...]]:
        """Yield bounds to try in turn. The last ones have single targets, which fit if `cut` does not raise."""
        if self.count:
            yield even_ranges(self.hop.block, self.count)
        while limit:
            yield cut_rows(self.hop.block, op, needs, limit)[0]
            limit = limit * 7 // 8
        yield tuple(range(self.hop.block.num_targets + 1))

    def _planned(self, op: Aggregate, needs: WorkingSet, bounds: tuple[int, ...], *, ahead: bool) -> Cut:
        """Return the chunks between given bounds, with their rounds."""
        parts, arrays = [RankHop(self.hop, torch.arange(self.hop.num_inputs))], ArrayFile() if self.limit else None
        schedule = ChunkSources(parts, [bounds], loops=holds_targets(op), ahead=ahead, arrays=arrays).schedule(0)
        return Cut(bounds, schedule, ahead, working_bytes(needs, schedule, ahead=ahead))


def by_chunk(numbers: Tensor, bounds: Sequence[int]) -> list[int]:
    """Return the sum of numbers [N] of the vertices for each chunk.

    Args:
        numbers: One number for each vertex.
        bounds: Boundaries of the chunks.
    """
    return [int(part.sum()) for part in numbers.split(torch.tensor(bounds).diff().tolist())]


def limit_error(limit: int, least: int) -> InputError:
    """Return the error for a limit in which a single target does not fit.

    Args:
        limit: Limit in bytes.
        least: Smallest limit that works, in bytes.
    """
    return InputError(
        f"--device-memory: {limit:,} bytes are too few, because one vertex with its in-edges needs {least:,}: "
        f"give at least {least:,}, or use more ranks"
    )


def holds_targets(op: Aggregate) -> bool:
    """Return True if a chunk reads the targets' own rows among its source rows."""
    return layout_of(op) == "looped"


def working_bytes(needs: WorkingSet, schedule: Schedule, *, ahead: bool) -> int:
    """Return the device bytes of the largest round.

    Args:
        needs: Bytes per target, source and edge of a chunk.
        schedule: Rounds and number of slots.
        ahead: The next round is loaded at the same time; its rows in slots are counted already.
    """
    round_bytes = [needs.bytes(each.num_targets, 0, each.num_edges) for each in schedule.sizes]
    following = [*round_bytes[1:], 0] if ahead else [0] * len(round_bytes)
    # largest: targets and edges of a round and the next one. Then the slots' rows, and their index if loaded ahead.
    largest = max(map(sum, zip(round_bytes, following, strict=True)), default=0)
    return largest + needs.bytes(0, schedule.num_slots, 0) + ahead * SLOT_BYTES * schedule.num_slots


def least_bytes(block: Adjacency, op: Aggregate, needs: WorkingSet) -> int:
    """Return the smallest limit that works: device bytes of the largest chunk if each has one target.

    Args:
        block: Adjacency of the whole graph.
        op: The aggregate.
        needs: Bytes per target, source and edge of a chunk.
    """
    slots = cut_rows(block, op, WorkingSet(0, 1, 0), 0)[1]
    return needs.bytes(1, slots, int(block.degree.max())) if block.num_targets else 0


def cut_rows(block: Adjacency, op: Aggregate, needs: WorkingSet, limit: int) -> tuple[tuple[int, ...], int]:
    """Return bounds of ranges of targets, each the longest that fits a limit, and the bytes of the largest.

    A target that does not fit is a range of its own.

    Args:
        block: Adjacency of the whole graph.
        op: The aggregate.
        needs: Bytes per target, source and edge of a chunk.
        limit: Limit in bytes.
    """
    bounds, largest = native.cut_rows(
        block.indptr,
        block.indices,
        block.num_sources,
        per_row=needs.per_target,
        per_column=needs.per_source,
        per_entry=needs.per_edge,
        rows_are_columns=holds_targets(op),
        limit=limit,
    )
    return tuple(bounds.tolist()), largest
