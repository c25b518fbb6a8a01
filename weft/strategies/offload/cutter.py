"""Cuts the aggregates of all ranks into chunks, and orders these (HongTu, sections 4.1 and 5.3).

What it holds grows with the graph: it is made for planning, and let go before the first pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from weft.cost import Rates
from weft.nn import Workload
from weft.parallel.chunks.cut.ranges import RankHop, chunk_vertices, even_ranges, reorder
from weft.parallel.chunks.cut.rank_chunks import ChunkShape, HopSchedule, RankChunks
from weft.parallel.chunks.cut.residency import ChunkSources, Volumes
from weft.parallel.chunks.program.chunk_program import ChunkProgram, Segment, needs_backward
from weft.parallel.chunks.program.stages import AggregateStep
from weft.parallel.chunks.run.chunk_aggregates import layout_of
from weft.parallel.chunks.run.chunk_runtime import as_slice
from weft.parallel.chunks.run.rounds import Round, in_place, pays_in_place
from weft.parallel.chunks.run.slots import BACKWARD_FIELDS, FORWARD_FIELDS, SlotLayout, edge_bytes
from weft.partition import Dependencies, Hop

MAX_CHUNKS = 1 << 14
MAX_REORDERED = 1 << 11  # chunks: what they have in common is counted for every two of them
NOTHING_MOVES = Volumes(neighbours=0, shared=0, loaded=0, fetched=0)

Bounds = Sequence[Sequence[Sequence[int]]]
"""Of each rank and hop, where its chunks begin and end."""
Orders = Sequence[Sequence[Sequence[int]] | None]
"""Of each schedule, which of each rank's chunks runs j-th; None: as they are."""


class Cutter:
    """Cuts a workload's aggregates.

    needed: what each rank computes and fetches. saved_hops: the first hops of the results that are kept. prefetch: whether a
    chunk is loaded while the one before is worked on. in_memory: the device is the memory that rows are in. in_files:
    rows are in files, since what is resident is to be what the device may have. in_place: whether a rank alone reads
    rows where they are, if it may; None: where that pays.
    """

    def __init__(
        self,
        work: Workload,
        programs: dict[bool, ChunkProgram],
        needed: Sequence[Dependencies],
        saved_hops: frozenset[int],
        *,
        on_cpu: bool,
        prefetch: bool,
        in_memory: bool = False,
        in_files: bool = True,
        in_place: bool | None = None,
    ) -> None:
        self.work, self.programs, self.needed, self.saved_hops = work, programs, needed, saved_hops
        self.on_cpu, self.prefetch, self.in_memory = on_cpu, prefetch and not in_memory, in_memory
        self.in_files, self.in_place = in_files, in_place
        self._bounds: dict[int, Bounds] = {}
        self._known: dict[range, tuple[Any, ChunkSources]] = {}
        self._volumes: dict[range, tuple[Any, Volumes]] = {}

    @property
    def max_chunks(self) -> int:
        """More than this many chunks are not tried: one for each row of the rank that has most."""
        return min(max(each.rows.numel() for each in self.needed), MAX_CHUNKS)

    def bounds(self, count: int) -> Bounds:
        """Where so many chunks of each rank and hop begin and end."""
        if count not in self._bounds:
            self._bounds[count] = [[even_ranges(hop.block, count) for hop in each.hops] for each in self.needed]
        return self._bounds[count]

    def spans(self) -> list[range]:
        """The hops that share a schedule, since every rank has the same block for them."""
        num_hops = self.programs[True].num_hops
        same = [
            hop > 0 and all(each.hops[hop] is each.hops[hop - 1] for each in self.needed) for hop in range(num_hops)
        ]
        firsts = [hop for hop in range(num_hops) if not same[hop]]
        return [range(first, last) for first, last in zip(firsts, [*firsts[1:], num_hops], strict=False)]

    def choose_orders(self, bounds: Bounds, rates: Rates) -> Orders:
        """For every schedule the order of chunks that takes less time: the given one, or one by what they share."""
        return [self._choose_order(hops, [each[hops[0]] for each in bounds], rates) for hops in self.spans()]

    def _choose_order(self, hops: range, cuts: Sequence[Sequence[int]], rates: Rates) -> Sequence[Sequence[int]] | None:
        if not 2 < len(cuts[0]) <= MAX_REORDERED + 1:
            return None
        loops = "looped" in layouts_of(self.programs.values(), hops)
        sets = [chunk_vertices(segment, cut, loops=loops) for segment, cut in zip(self._parts(hops), cuts, strict=True)]
        orders = reorder(sets, self.work.stats.num_vertices)
        given, other = self._given(hops, cuts), self._sides(hops, cuts, orders).volumes
        return orders if other.seconds(rates) < given.seconds(rates) else None

    def cut(self, rank: int, bounds: Bounds, orders: Orders | None = None) -> RankChunks:
        """A rank's chunks between these bounds."""
        needed, spans = self.needed[rank], self.spans()
        cuts = [[each[hops[0]] for each in bounds] for hops in spans]
        wanted = orders or [None] * len(spans)
        planned = [self._planned(rank, *one) for one in zip(spans, cuts, wanted, strict=True)]
        chunks = tuple(self._chunks(one) for one in planned)
        widest = max((shape.targets for each in chunks for shape, _ in each), default=len(needed.rows))
        if not chunks:
            chunks = (((ChunkShape(widest, 1, 0), 0),),)
        elif self.prefetch and len(chunks[0]) > 1:
            chunks = (*chunks, self._ranges(widest, chunks[0]))
        return RankChunks(
            programs=self.programs,
            dependencies=needed,
            schedules=tuple(planned),
            schedule_of=tuple(number for number, hops in enumerate(spans) for _ in hops),
            range_size=max(widest, 1),
            saved_hops=self.saved_hops,
            prefetch=self.prefetch,
            on_cpu=self.on_cpu,
            in_memory=self.in_memory,
            features_stay=self._features_stay(needed),
            chunks=chunks,
        )

    def _features_stay(self, needed: Dependencies) -> bool:
        """Whether a rank reads features where the graph has them: in memory only those that stand there as rows do."""
        if self.work.graph.x is None or self.in_files:
            return False
        return not self.in_memory or isinstance(as_slice(needed.rows), slice)

    def _planned(
        self, rank: int, hops: range, cuts: Sequence[Sequence[int]], orders: Sequence[Sequence[int]] | None
    ) -> HopSchedule:
        needed, asked = self.needed[rank], self.work.optimisations
        hop = needed.hops[hops[0]]
        if self._works_in_place(hops, hop, len(cuts[rank]) - 1):
            schedule, given, volumes = in_place(hop, cuts[rank]), NOTHING_MOVES, NOTHING_MOVES
        else:
            given, sides = self._given(hops, cuts), self._sides(hops, cuts, orders)
            schedule = sides.schedule(rank, share=asked.share, keep=asked.keep)
            volumes = sides.volumes
        lacks = ~self.work.graph.in_edges.has_loop[needed.rows]
        return HopSchedule(
            hop=hop,
            schedule=schedule,
            layouts=layouts_of(self.programs.values(), hops),
            volumes=volumes,
            unordered_volumes=given,
            missing_loops=tuple(int(lacks[round_.targets].sum()) for round_ in schedule.rounds),
        )

    def _works_in_place(self, hops: range, hop: Hop, count: int) -> bool:
        """Whether a rank reads rows where they are: not where gradients are made for all rows and added then."""
        asked = (segment for program in self.programs.values() for segment in program.segments if segment.aggregates)
        over = (one for one in asked if set(hops) & set(range(one.hop, one.hop + one.steps)))
        pays = pays_in_place(hop, count) if self.in_place is None else self.in_place
        alone = self.in_memory and len(self.needed) == 1
        return alone and pays and all(one.op.linear or one.hop in self.saved_hops for one in over)

    def _parts(self, hops: range) -> list[RankHop]:
        return [RankHop(each.hops[hops[0]], each.rows) for each in self.needed]

    def _sides(self, hops: range, cuts: Sequence[Sequence[int]], orders: Sequence[Sequence[int]] | None) -> ChunkSources:
        """What the chunks of all ranks read, kept until others are asked for."""
        key = cuts, orders
        if hops not in self._known or self._known[hops][0] != key:
            self._known.pop(hops, None)  # before others are made
            loops = "looped" in layouts_of(self.programs.values(), hops)
            self._known[hops] = key, ChunkSources(self._parts(hops), cuts, loops=loops, orders=orders, ahead=self.prefetch)
        return self._known[hops][1]

    def _given(self, hops: range, cuts: Sequence[Sequence[int]]) -> Volumes:
        """What would move if the chunks were not reordered."""
        if hops not in self._volumes or self._volumes[hops][0] != cuts:
            self._volumes[hops] = cuts, self._sides(hops, cuts, None).volumes
        return self._volumes[hops][1]

    def _chunks(self, planned: HopSchedule) -> tuple[tuple[ChunkShape, int], ...]:
        """Each chunk, and what is there beside it: what crosses for it, and is brought for the next one meanwhile."""
        shapes, rounds = planned.shapes(), planned.schedule.rounds
        loads = [0] * len(shapes)
        if self.prefetch:
            loads = [*map(self._load_bytes, [planned] * len(shapes), shapes, rounds), 0][1:]
        return tuple(
            (shape, load + self._exchange_bytes(round_))
            for shape, load, round_ in zip(shapes, loads, rounds, strict=True)
        )

    def _exchange_bytes(self, round_: Round) -> int:
        """What is held while rows cross before a round, or gradients behind it: those that leave, and those that come.

        Those of several tensors twice, since they leave side by side.
        """
        most = 0
        for program in self.programs.values():
            for segment in program.segments:
                copies = 2 if len(segment.source_ports) > 1 else 1
                rows = max(
                    copies * sum(round_.send_row_counts) + sum(round_.recv_row_counts),
                    copies * sum(round_.send_grad_counts) + sum(round_.recv_grad_counts),
                )
                most = max(most, rows * segment.source_width)
        return most * self.work.itemsize

    def _ranges(self, widest: int, chunks: Sequence[tuple[ChunkShape, int]]) -> tuple[tuple[ChunkShape, int], ...]:
        """A range that is worked on without an aggregate, all of which have as many rows as the widest chunk."""
        segments = [segment for program in self.programs.values() for segment in program.segments]
        beside = widest * max(own_width(one) + one.width * one.constant for one in segments) * self.work.itemsize
        least = min((shape for shape, _ in chunks), key=lambda shape: shape.edges)
        return ((least._replace(targets=widest), beside),)

    def _load_bytes(self, planned: HopSchedule, shape: ChunkShape, round_: Round) -> int:
        """What is brought to the device at most for a round, beside rows in slots."""
        item = self.work.itemsize
        known = planned.hop.block.indices.itemsize, 0 if planned.hop.block.weight is None else item
        forward, leaving = (8 * sum(len(getattr(round_, name)) for name in names) for names in (FORWARD_FIELDS, BACKWARD_FIELDS))
        most = 0
        aggregating = [
            (training, segment)
            for training, program in self.programs.items()
            for segment in program.segments
            if segment.aggregates
        ]
        for training, segment in aggregating:
            own = own_width(segment)
            most = max(most, forward + edge_bytes("forward", *shape, *known) + shape.targets * own * item)
            if not (training and needs_backward(segment)):
                continue
            saved = segment.hop in self.saved_hops
            back = AggregateStep.backward(segment, segment.steps - 1, saved=saved, retained=False, on_cpu=self.on_cpu)
            then = forward * back.values + leaving + edge_bytes(back.edges, *shape, *known)
            most = max(most, then + shape.targets * (own + segment.total_saved_width * saved) * item)
        return most + (8 + known[0]) * (shape.targets + shape.slots)  # ids, read and as int64


def own_width(segment: Segment) -> int:
    """Columns of the rows of its targets that a segment reads."""
    return sum(segment.live[port].width for port in {*segment.targets.values(), *segment.rows.values()})


def layouts_of(programs: Iterable[ChunkProgram], hops: range) -> tuple[SlotLayout, ...]:
    """How the edges of these hops are stored for the aggregates over them."""
    asked = (segment for program in programs for segment in program.segments if segment.aggregates)
    found = {layout_of(one.op) for one in asked if set(hops) & set(range(one.hop, one.hop + one.steps))}
    return tuple(sorted(found))
