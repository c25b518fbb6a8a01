"""Division of the aggregates of all ranks into chunks, and their order (HongTu, sections 4.1 and 5.3).

A `Cutter` grows with the graph: it is created for planning, and released before the first pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from weft.cost import Rates
from weft.nn import Workload
from weft.parallel.chunks.cut.ranges import RankHop, even_ranges, reorder
from weft.parallel.chunks.cut.rank_chunks import ChunkShape, HopSchedule, RankChunks
from weft.parallel.chunks.cut.residency import ChunkSources, Volumes
from weft.parallel.chunks.program.chunk_program import ChunkProgram, Segment, needs_backward
from weft.parallel.chunks.program.stages import AggregateStep
from weft.parallel.chunks.run.chunk_aggregates import layout_of
from weft.parallel.chunks.run.chunk_runtime import as_slice
from weft.parallel.chunks.run.rounds import RoundSizes, in_place, pays_in_place
from weft.parallel.chunks.run.slots import SlotLayout, edge_bytes
from weft.partition import Dependencies, Hop
from weft.storage.unnamed_files import ArrayFile, ArrayMemory

MAX_CHUNKS = 1 << 14
"""Largest number of chunks that is tried."""
MAX_REORDERED = 1 << 11
"""Largest number of chunks that are reordered; reordering counts the rows that each pair of chunks shares."""
MAX_COMPARED = 1 << 24
"""Number of rows of all chunks up to which all are compared to order the chunks; of more, a sample."""
NOTHING_MOVES = Volumes(neighbours=0, shared=0, loaded=0, fetched=0)
"""Volumes of chunks that read rows in place."""

Bounds = Sequence[Sequence[Sequence[int]]]
"""Bounds of the chunks of each rank and aggregate."""
Orders = Sequence[Sequence[Sequence[int]] | None]
"""Order of each rank's chunks in each schedule: the chunk that runs j-th; None: the original order."""


class Cutter:
    """Divides a workload's aggregates into chunks.

    Args:
        work: The workload.
        programs: The model cut into segments, for training (True) and for evaluation (False).
        needed: What each rank computes and fetches.
        saved_hops: Numbers of the aggregates whose results are saved for backward (the first of several steps).
        on_cpu: True if the device is the CPU.
        prefetch: True if the next chunk is loaded while one is computed.
        in_memory: True if the device's memory is also that of the rows.
        in_files: True if rows are in files, because the memory has a limit.
        in_place: True if a single rank reads rows in place where possible; None: only if that is faster.
        folder: Folder of these files; None: the folder for temporary files.
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
        folder: Path | None = None,
    ) -> None:
        self.work, self.programs, self.needed, self.saved_hops = work, programs, needed, saved_hops
        self.on_cpu, self.prefetch, self.in_memory = on_cpu, prefetch and not in_memory, in_memory
        self.in_files, self.in_place, self.folder = in_files, in_place, folder
        self._bounds: dict[int, Bounds] = {}
        self._sources: dict[range, ChunkSources] = {}
        self._reordered: dict[range, ChunkSources] = {}

    @property
    def max_chunks(self) -> int:
        """Largest number of chunks that is tried: one for each row of the rank that has most."""
        return min(max(each.rows.numel() for each in self.needed), MAX_CHUNKS)

    def bounds(self, count: int) -> Bounds:
        """Return the bounds of the chunks of each rank and aggregate, if each is divided into `count` chunks."""
        if count not in self._bounds:
            self._bounds[count] = [[even_ranges(hop.block, count) for hop in each.hops] for each in self.needed]
        return self._bounds[count]

    def spans(self) -> list[range]:
        """Return the ranges of successive aggregates that share a schedule, since a rank has one block for them."""
        num_hops = self.programs[True].num_hops
        same = [
            hop > 0 and all(each.hops[hop] is each.hops[hop - 1] for each in self.needed) for hop in range(num_hops)
        ]
        firsts = [hop for hop in range(num_hops) if not same[hop]]
        return [range(first, last) for first, last in zip(firsts, [*firsts[1:], num_hops], strict=False)]

    def choose_orders(self, bounds: Bounds, rates: Rates) -> Orders:
        """Return the faster order of chunks for each schedule: the original one, or one by the rows that chunks share.

        Args:
            bounds: Bounds of the chunks.
            rates: Rates at which rows move.
        """
        return [self._choose_order(hops, [each[hops[0]] for each in bounds], rates) for hops in self.spans()]

    def _choose_order(self, hops: range, cuts: Sequence[Sequence[int]], rates: Rates) -> Sequence[Sequence[int]] | None:
        if not 2 < len(cuts[0]) <= MAX_REORDERED + 1:
            return None
        sources = self._chunk_sources(hops, cuts)
        step = sources.num_neighbours // MAX_COMPARED + 1
        sets = [
            [vertices[vertices % step == 0] // step for vertices in sources.chunk_vertices(rank)]
            for rank in range(len(self.needed))
        ]
        orders = reorder(sets, self.work.stats.num_vertices // step + 1)
        reordered = self._chunk_sources(hops, cuts, orders).volumes
        return orders if reordered.seconds(rates) < sources.volumes.seconds(rates) else None

    def cut(self, rank: int, bounds: Bounds, orders: Orders | None = None) -> RankChunks:
        """Return the chunks of a rank.

        Args:
            rank: The rank.
            bounds: Bounds of the chunks.
            orders: Order of the chunks; None: the original one.
        """
        needed, spans = self.needed[rank], self.spans()
        cuts = [[rank_bounds[hops[0]] for rank_bounds in bounds] for hops in spans]
        chosen_orders = orders or [None] * len(spans)
        schedules = [self._schedule(rank, *cut) for cut in zip(spans, cuts, chosen_orders, strict=True)]
        chunks = tuple(self._chunks(schedule) for schedule in schedules)
        widest = max((shape.targets for shapes in chunks for shape, _ in shapes), default=len(needed.rows))
        if not chunks:
            chunks = (((ChunkShape(widest, 1, 0), 0),),)
        elif self.prefetch and len(chunks[0]) > 1:
            chunks = (*chunks, self._ranges(widest, chunks[0]))
        return RankChunks(
            programs=self.programs,
            dependencies=needed,
            schedules=tuple(schedules),
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
        """Return whether a rank reads features where the graph stores them.

        In memory, only a contiguous range of rows can be read there.
        """
        if self.work.graph.x is None or self.in_files:
            return False
        return not self.in_memory or isinstance(as_slice(needed.rows), slice)

    def _schedule(
        self, rank: int, hops: range, cuts: Sequence[Sequence[int]], orders: Sequence[Sequence[int]] | None
    ) -> HopSchedule:
        """Return the schedule of a rank for some aggregates with the same block."""
        needed, optimisations = self.needed[rank], self.work.optimisations
        hop = needed.hops[hops[0]]
        if self._works_in_place(hops, hop, len(cuts[rank]) - 1):
            schedule, unordered, volumes = in_place(hop, cuts[rank]), NOTHING_MOVES, NOTHING_MOVES
        else:
            sources = self._chunk_sources(hops, cuts, orders)
            schedule = sources.schedule(rank, share=optimisations.share, keep=optimisations.keep)
            unordered, volumes = self._chunk_sources(hops, cuts).volumes, sources.volumes
        lacks_loop = ~self.work.graph.in_edges.has_loop[needed.rows]
        return HopSchedule(
            hop=hop,
            schedule=schedule,
            layouts=layouts_of(self.programs.values(), hops),
            volumes=volumes,
            unordered_volumes=unordered,
            missing_loops=tuple(int(lacks_loop[each.targets].sum()) for each in schedule.sizes),
        )

    def _works_in_place(self, hops: range, hop: Hop, count: int) -> bool:
        """Return whether a rank reads rows in place.

        It does not if gradients are computed for all rows first and added afterwards.
        """
        aggregating = (
            segment for program in self.programs.values() for segment in program.segments if segment.aggregates
        )
        concerned = (
            segment for segment in aggregating if set(hops) & set(range(segment.hop, segment.hop + segment.steps))
        )
        pays = pays_in_place(hop, count) if self.in_place is None else self.in_place
        is_alone = self.in_memory and len(self.needed) == 1
        return is_alone and pays and all(segment.op.linear or segment.hop in self.saved_hops for segment in concerned)

    def _parts(self, hops: range) -> list[RankHop]:
        return [RankHop(each.hops[hops[0]], each.rows) for each in self.needed]

    def _chunk_sources(
        self, hops: range, cuts: Sequence[Sequence[int]], orders: Sequence[Sequence[int]] | None = None
    ) -> ChunkSources:
        """Return the rows that the chunks of all ranks read; the last results are cached."""
        if hops not in self._sources or self._sources[hops].bounds != cuts:
            for cached in (self._sources, self._reordered):
                cached.pop(hops, None)  # release it before the next one is computed
            self._sources[hops] = ChunkSources(
                self._parts(hops),
                cuts,
                loops="looped" in layouts_of(self.programs.values(), hops),
                ahead=self.prefetch,
                arrays=ArrayFile(self.folder) if self.in_files else ArrayMemory(),
            )
        if orders is None:
            return self._sources[hops]
        if hops not in self._reordered or self._reordered[hops].orders != orders:
            self._reordered[hops] = self._sources[hops].in_order(orders)
        return self._reordered[hops]

    def _chunks(self, schedule: HopSchedule) -> tuple[tuple[ChunkShape, int], ...]:
        """Return each chunk's shape, and the bytes next to it: rows in exchange, and loads for the next chunk."""
        shapes, rounds = schedule.shapes(), schedule.schedule.sizes
        loads = [0] * len(shapes)
        if self.prefetch:
            loads = [*map(self._load_bytes, [schedule] * len(shapes), shapes, rounds), 0][1:]
        return tuple(
            (shape, load + self._exchange_bytes(round_))
            for shape, load, round_ in zip(shapes, loads, rounds, strict=True)
        )

    def _exchange_bytes(self, round_: RoundSizes) -> int:
        """Return the peak bytes of rows in exchange before a round, or of gradients after it: sent and received.

        If several tensors are sent, they count twice, because they are copied into one message.
        """
        peak = 0
        for program in self.programs.values():
            for segment in program.segments:
                copies = 2 if len(segment.source_ports) > 1 else 1
                rows = copies * sum(round_.send_row_counts) + sum(round_.recv_row_counts)
                grads = copies * sum(round_.send_grad_counts) + sum(round_.recv_grad_counts)
                per_column = max(rows * self.work.itemsize, grads * self.work.dtype.itemsize)
                peak = max(peak, per_column * segment.source_width)
        return peak

    def _ranges(self, widest: int, chunks: Sequence[tuple[ChunkShape, int]]) -> tuple[tuple[ChunkShape, int], ...]:
        """Return the shape of a range without an aggregate; all ranges have as many rows as the widest chunk."""
        segments = [segment for program in self.programs.values() for segment in program.segments]
        range_bytes = (
            widest
            * max(own_width(segment) + segment.width * segment.constant for segment in segments)
            * self.work.itemsize
        )
        smallest = min((shape for shape, _ in chunks), key=lambda shape: shape.edges)
        return ((smallest._replace(targets=widest), range_bytes),)

    def _load_bytes(self, schedule: HopSchedule, shape: ChunkShape, round_: RoundSizes) -> int:
        """Return the peak bytes that are loaded for a round, in addition to rows in slots."""
        itemsize = self.work.itemsize
        weight_bytes = 0 if schedule.hop.block.weight is None else self.work.dtype.itemsize
        element_bytes = schedule.hop.block.indices.itemsize, weight_bytes
        forward_ids, backward_ids = 8 * round_.num_forward_ids, 8 * round_.num_backward_ids
        peak = 0
        aggregating = [
            (training, segment)
            for training, program in self.programs.items()
            for segment in program.segments
            if segment.aggregates
        ]
        for training, segment in aggregating:
            width = own_width(segment)
            peak = max(
                peak, forward_ids + edge_bytes("forward", *shape, *element_bytes) + shape.targets * width * itemsize
            )
            if not (training and needs_backward(segment)):
                continue
            saved = segment.hop in self.saved_hops
            step = AggregateStep.backward(segment, segment.steps - 1, saved=saved, retained=False, on_cpu=self.on_cpu)
            backward_bytes = forward_ids * step.values + backward_ids + edge_bytes(step.edges, *shape, *element_bytes)
            peak = max(peak, backward_bytes + shape.targets * (width + segment.total_saved_width * saved) * itemsize)
        return peak + (8 + element_bytes[0]) * (shape.targets + shape.slots)  # ids, as stored and as int64


def own_width(segment: Segment) -> int:
    """Return the number of columns that a segment reads of each of its target rows."""
    return sum(segment.live[port].width for port in {*segment.targets.values(), *segment.rows.values()})


def layouts_of(programs: Iterable[ChunkProgram], hops: range) -> tuple[SlotLayout, ...]:
    """Return the layouts in which the edges of some aggregates are stored.

    Args:
        programs: The model cut into segments.
        hops: Numbers of the aggregates.
    """
    aggregating = (segment for program in programs for segment in program.segments if segment.aggregates)
    layouts = {
        layout_of(segment.op)
        for segment in aggregating
        if set(hops) & set(range(segment.hop, segment.hop + segment.steps))
    }
    return tuple(sorted(layouts))
