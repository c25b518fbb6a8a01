"""How the aggregates over a whole graph are cut into chunks, the same on every rank (NeutronTP, section 4.2.1).

A chunk is a range of targets with all edges into them. Any range does, since an aggregate's rows depend on no other row
of it; what its sources get backward is added up over the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data import Adjacency, Graph
from weft.nn import SLOT_BYTES, Aggregate, ByRelation, RelationIndex, WorkingSet
from weft.parallel.chunks.cut.ranges import RankSide, even_ranges
from weft.parallel.chunks.cut.residency import Sides
from weft.parallel.chunks.run.chunk_aggregates import layout_of
from weft.parallel.chunks.run.rounds import Schedule, in_place, pays_in_place
from weft.parallel.columns.exchange_plan import AssignedRelations, ExchangePlan
from weft.partition import Hop
from weft.runtime import native
from weft.utils.errors import InputError

AHEAD = 4  # in a limit of so many times the least, the next chunk surely fits beside the one that is worked on


class Cut(NamedTuple):
    """An aggregate's chunks: their bounds, their rounds, whether the next is loaded ahead, and what the largest takes.

    num_bytes: of the device.
    """

    bounds: tuple[int, ...]
    schedule: Schedule
    ahead: bool
    num_bytes: int


class CutSizes(NamedTuple):
    """Of an aggregate's chunks, what is left of a `Cut` without its rounds."""

    bounds: tuple[int, ...]
    num_slots: int
    in_place: bool
    ahead: bool
    num_bytes: int
    loads: tuple[int, ...]
    """By chunk, the rows that come into slots."""
    flushes: tuple[int, ...]
    """And those whose gradients leave, backward."""
    edges: list[int]
    loops: list[int]
    """Those that are stored besides, since vertices attend to themselves and lack them."""

    @classmethod
    def of(cls, cut: Cut, op: Aggregate, edges: Adjacency) -> CutSizes:
        """Those of a cut of an aggregate over edges."""
        rounds = cut.schedule.rounds
        loads, flushes = zip(*((len(one.load), len(one.flush)) for one in rounds), strict=True)
        lacking = ~edges.has_loop & holds_targets(op)
        return cls(
            bounds=tuple(cut.bounds),
            num_slots=cut.schedule.num_slots,
            in_place=rounds[0].in_place,
            ahead=cut.ahead,
            num_bytes=cut.num_bytes,
            loads=loads,
            flushes=flushes,
            edges=edges.indptr[torch.tensor(cut.bounds)].diff().tolist(),
            loops=by_chunk(lacking, cut.bounds),
        )


class Chunking:
    """How the aggregates over a graph are cut into chunks, the same on every rank.

    limit: of bytes on the device; None: none. count: of chunks at least; not more than one for each target. pipeline:
    whether the rows of neighbouring chunks cross the network while one is worked on.
    """

    def __init__(self, graph: Graph, *, limit: int | None = None, count: int = 0, pipeline: bool = True) -> None:
        self.graph, self.limit, self.pipeline = graph, limit, pipeline
        self.count = min(count, graph.num_vertices)
        edges, nothing = graph.in_edges, torch.empty(0, dtype=torch.int64)
        self.hop = Hop(
            block=edges, num_inputs=edges.num_sources, fetched=nothing, received=(0,), first_edges=edges.indptr[:-1]
        )
        self.sizes = cache(lambda op, needs: CutSizes.of(self.cut(op, needs), op, self.hop.block))
        """The chunks of an aggregate, as `cut` has them."""
        self.relations = cache(self._assign)
        """The relation rows, assigned to a rank of so many."""

    def keeps(self, op: Aggregate, steps: int) -> bool:
        """Whether what the backward pass needs of a result is kept; what is not linear is made again otherwise."""
        return self.limit is None and steps == 1 and op.can_save and not op.linear

    def cut(self, op: Aggregate, needs: WorkingSet) -> Cut:
        """The chunks of an aggregate: of even size where those fit, else as large as do. InputError where none do."""
        limit, block = self.limit, self.hop.block
        if limit is None:
            bounds = even_ranges(block, max(self.count, 1))
            if pays_in_place(self.hop, len(bounds) - 1):
                return Cut(bounds, in_place(self.hop, bounds), ahead=False, num_bytes=0)
            return self._planned(op, needs, bounds, ahead=False)
        if (least := least_bytes(block, op, needs)) > limit:
            raise too_little(limit, least)
        ahead = limit >= AHEAD * least
        cuts = (self._planned(op, needs, bounds, ahead=ahead) for bounds in self._tries(op, needs, limit))
        return next(cut for cut in cuts if cut.num_bytes <= limit)

    def _assign(self, rank: int, size: int) -> AssignedRelations:
        types, number = self.graph.edge_type, len(self.graph.relations)
        assert types is not None
        rows = RelationIndex.of(self.graph.in_edges, types, number)
        local, place = rows.local(rank, size, number)
        return AssignedRelations(rows=rows, local=local, place=place, rank=rank, size=size)

    def exchange_plan(
        self, op: Aggregate, bounds: Sequence[int], rank: int, size: int, device: torch.device | str = "cpu"
    ) -> ExchangePlan:
        """What crosses with the chunks of an aggregate; ids are on the device."""
        relations = self.relations(rank, size) if isinstance(op, ByRelation) else None
        return ExchangePlan.of(self.hop.block, bounds, rank, size, device, pipeline=self.pipeline, relations=relations)

    def _tries(self, op: Aggregate, needs: WorkingSet, limit: int) -> Iterator[tuple[int, ...]]:
        """Bounds to be tried one after the other: the last ones, of single targets, fit whatever is not refused."""
        if self.count:
            yield even_ranges(self.hop.block, self.count)
        while limit:
            yield cut_rows(self.hop.block, op, needs, limit)[0]
            limit = limit * 7 // 8
        yield tuple(range(self.hop.block.num_targets + 1))

    def _planned(self, op: Aggregate, needs: WorkingSet, bounds: tuple[int, ...], *, ahead: bool) -> Cut:
        every = torch.arange(self.hop.num_inputs)
        sides = Sides([RankSide(self.hop, every)], [bounds], loops=holds_targets(op), ahead=ahead)
        schedule = sides.schedule(0)
        return Cut(bounds, schedule, ahead, working_bytes(needs, schedule, ahead=ahead))


def by_chunk(numbers: Tensor, bounds: Sequence[int]) -> list[int]:
    """Sums of numbers [N] of the vertices, chunk by chunk."""
    return [int(part.sum()) for part in numbers.split(torch.tensor(bounds).diff().tolist())]


def too_little(limit: int, least: int) -> InputError:
    """The error for a limit in which no target fits by itself."""
    return InputError(
        f"--device-memory: {limit:,} bytes are too few, since one vertex with its in-edges takes {least:,}: "
        f"give at least {least:,}, or more ranks"
    )


def holds_targets(op: Aggregate) -> bool:
    """Whether the targets' own rows are among those that a chunk reads at sources."""
    return layout_of(op) == "looped"


def working_bytes(needs: WorkingSet, schedule: Schedule, *, ahead: bool) -> int:
    """What the largest of some rounds has on the device; ahead: with all but the rows in slots of the next one."""
    sizes = [(one.targets.stop - one.targets.start, one.edges.stop - one.edges.start) for one in schedule.rounds]
    own = [needs.bytes(targets, 0, edges) for targets, edges in sizes]
    following = [*own[1:], 0] if ahead else [0] * len(own)
    most = max(map(sum, zip(own, following, strict=True)), default=0)
    return most + needs.bytes(0, schedule.num_slots, 0) + ahead * SLOT_BYTES * schedule.num_slots


def least_bytes(block: Adjacency, op: Aggregate, needs: WorkingSet) -> int:
    """What the largest chunk takes where each has one target: no limit below that can be kept."""
    slots = cut_rows(block, op, WorkingSet(0, 1, 0), 0)[1]
    return needs.bytes(1, slots, int(block.degree.max())) if block.num_targets else 0


def cut_rows(block: Adjacency, op: Aggregate, needs: WorkingSet, limit: int) -> tuple[tuple[int, ...], int]:
    """Bounds of ranges of targets, each the longest that fits a limit by itself, and the bytes of the largest.

    A target that does not fit is a range.
    """
    bounds, most = native.cut_rows(
        block.indptr,
        block.indices,
        block.num_sources,
        per_row=needs.per_target,
        per_column=needs.per_source,
        per_entry=needs.per_edge,
        own=holds_targets(op),
        limit=limit,
    )
    return tuple(bounds.tolist()), most
