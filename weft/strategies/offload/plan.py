"""What offload does on a rank, settled before anything large is allocated: programs, chunks, and what they take.

(HongTu, sections 4.1 and 5.3.) Every rank plans the same by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from weft.chunks.products import back_way, layout_of, reads_values
from weft.chunks.program import Part as ProgramPart
from weft.chunks.program import Program, Rehearsal
from weft.chunks.ranges import Part, chunk_vertices
from weft.chunks.ranges import reorder as reorder_chunks
from weft.chunks.schedule import Batch, Rates, Schedule, Volumes, make_schedule
from weft.chunks.slots import BACKWARD, FORWARD, Layout, edge_bytes
from weft.core.errors import InputError
from weft.core.savings import Savings
from weft.core.units import format_bytes
from weft.data import Graph
from weft.partition import Dependencies, Hop, range_bounds
from weft.strategies.base import Placement, Strategy
from weft.strategies.offload.miniature import ChunkShape, Miniature
from weft.strategies.vertex.plan import Communicated, Hybrid

NOMINAL = Rates(host=1.0, ranks=2.0, inplace=8.0)
"""How fast rows move, as ratios, where nobody has measured it."""
MAX_CHUNKS = 1 << 14
MAX_REORDERED = 1 << 11  # chunks: what they have in common is counted for every two of them
MARGIN = 0.91  # of a limit is filled: what is found in little has been up to 8 % below what chunks then took
ATTENTION_COST = 3  # an edge of attention costs as much as so many of a sum
VERTEX_COST = 4  # a target costs as much as so many edges, where chunks are to cost the same


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The schedule of some hops on this rank, and how its batches' edges are to stand.

    hop: the first of them. given: what would move if the chunks were not reordered.
    """

    hop: Hop
    schedule: Schedule
    layouts: tuple[Layout, ...]
    given: Volumes

    def shapes(self) -> list[ChunkShape]:
        """Those of its chunks."""
        return [
            ChunkShape(one.targets.stop - one.targets.start, self.schedule.num_slots, one.edges.stop - one.edges.start)
            for one in self.schedule.batches
        ]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a rank does. programs: by whether it trains. schedule_of: the number of each hop's schedule.

    span: rows of a range that is worked on without a product. kept: the first hops of the products whose answers are
    kept for the backward pass. chunks: of each schedule, with the bytes that are loaded beside each.
    """

    programs: dict[bool, Program]
    dependencies: Dependencies
    schedules: tuple[Planned, ...]
    schedule_of: tuple[int, ...]
    span: int
    kept: frozenset[int]
    chunks: tuple[tuple[tuple[ChunkShape, int], ...], ...]

    @property
    def num_chunks(self) -> int:
        """How many chunks the products of the first hop are made in."""
        return len(self.schedules[0].schedule.batches) if self.schedules else 1


class Planner:
    """Plans all ranks of a run. InputError for a model that cannot be run part by part.

    place_at: see Miniature; it is also given what is kept.
    """

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        size: int,
        placement: Placement,
        savings: Savings,
        place_at: Callable[..., Strategy],
    ) -> None:
        self.graph, self.model, self.placement, self.savings = graph, model, placement, savings
        if placement.chunks > MAX_CHUNKS:
            raise InputError(f"--chunks {placement.chunks}: give at most {MAX_CHUNKS}")
        self.on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        rehearsal = Rehearsal(graph, model, savings)
        self.programs = {training: rehearsal.program(training=training) for training in (True, False)}
        kind = Communicated if placement.cache_ratio is None and placement.factors is None else Hybrid
        self.needed = [
            kind.plan(graph, model, rank=one, size=size, placement=placement, savings=savings) for one in range(size)
        ]
        self.rates = placement.rates or NOMINAL
        if (asked := self.programs[True].num_hops) != (foreseen := len(self.needed[0].hops)):
            raise InputError(
                f"strategy offload makes {asked} products over the edges, and the model's layers {foreseen}: give a "
                "layer that maps rows alone as weft.nn.RowLayer, and each product a layer of its own"
            )
        products = (part for part in self.programs[True].parts if part.aggregates and not part.constant)
        self.kept = frozenset(part.hop for part in products if self._keeps(part))
        self.miniature = Miniature(graph, model, partial(place_at, kept=self.kept))

    def plan(self, rank: int) -> Plan:
        """The plan of a rank, with as few chunks as fit. InputError where the device's memory is too little for any."""
        count, limit = max(self.placement.chunks, 1), self.placement.device_bytes
        if limit is None:
            return self.cut(rank, count)
        while True:
            plans = self._cut_all(count, reorder=False)
            most = max(self.miniature.most(plan.chunks) for plan in plans)
            if most <= MARGIN * limit:
                other = self._cut_all(count, reorder=True) if self.savings.reorder else plans
                fits = max(self.miniature.most(plan.chunks) for plan in other) <= MARGIN * limit
                return other[rank] if fits else plans[rank]
            if count >= self.max_chunks:
                raise InputError(
                    f"--device-memory {format_bytes(limit)}: a chunk takes at least {format_bytes(most)}, of {count:,} "
                    f"chunks: give --device-memory {int(most / MARGIN) + 1}, more --workers, or a smaller --hidden"
                )
            count = min(self.max_chunks, max(count + 1, int(count * min(1.05 * most / limit, 4))))

    @property
    def max_chunks(self) -> int:
        """More than this many chunks are not tried: one for each row of the rank that has most."""
        return min(max(each.rows.numel() for each in self.needed), MAX_CHUNKS)

    def _cut_all(self, count: int, *, reorder: bool) -> list[Plan]:
        """Every rank's plan in so many chunks."""
        return [self.cut(rank, count, reorder=reorder) for rank in range(len(self.needed))]

    def cut(self, rank: int, count: int, *, reorder: bool = True) -> Plan:
        """A rank's plan in so many chunks."""
        bounds = [[range_bounds(hop.block, count, VERTEX_COST) for hop in each.hops] for each in self.needed]
        return self.cut_at(rank, bounds, reorder=reorder)

    def cut_at(self, rank: int, bounds: Sequence[Sequence[Sequence[int]]], *, reorder: bool = True) -> Plan:
        """A rank's plan with given bounds of the chunks of each rank's hops."""
        needed, num_hops = self.needed, self.programs[True].num_hops
        same = [hop > 0 and all(each.hops[hop] is each.hops[hop - 1] for each in needed) for hop in range(num_hops)]
        schedule_of: list[int] = []
        planned: list[Planned] = []
        for hop in range(num_hops):
            if not same[hop]:
                last = next((later for later in range(hop + 1, num_hops) if not same[later]), num_hops)
                planned.append(self._planned(rank, range(hop, last), [each[hop] for each in bounds], reorder=reorder))
            schedule_of.append(len(planned) - 1)
        chunks = tuple(self._chunks(one) for one in planned)
        widest = max((shape.targets for each in chunks for shape, _ in each), default=len(needed[rank].rows))
        return Plan(
            programs=self.programs,
            dependencies=needed[rank],
            schedules=tuple(planned),
            schedule_of=tuple(schedule_of),
            span=max(widest, 1),
            chunks=chunks or (((ChunkShape(widest, 1, 0), 0),),),
            kept=self.kept,
        )

    def _keeps(self, part: ProgramPart) -> bool:
        """Whether a product's answers are kept for the backward pass, or made again from its sources (section 4.2).

        That is asked only of answers which that pass needs. Kept, they and what is kept beside them are written and
        read; made again, each edge reads a row on the device, and of a sum, which needs no rows otherwise, every source
        comes from the host at least once.
        """
        wanted, linear = self.placement.intermediates, part.op.linear
        if wanted == "recompute" or not part.op.can_save or (linear and not part.needs_answer):
            return False
        if not linear and part.steps > 1:
            return False
        if wanted == "keep" or part.steps > 1:
            return True
        width = part.aggregated.width
        by_edge = 1 if linear else ATTENTION_COST
        again = (linear * self.graph.num_vertices + by_edge * self.graph.num_edges / NOMINAL.inplace) * width
        return 2 * self.graph.num_vertices * part.kept_width <= again

    def _chunks(self, planned: Planned) -> tuple[tuple[ChunkShape, int], ...]:
        """Each chunk, and what is brought for the next one while it is worked on."""
        shapes = planned.shapes()
        if not self.savings.prefetch:
            return tuple((shape, 0) for shape in shapes)
        loads = map(self._load_bytes, [planned] * len(shapes), shapes, planned.schedule.batches)
        return tuple(zip(shapes, [*loads, 0][1:], strict=True))

    def _load_bytes(self, planned: Planned, shape: ChunkShape, batch: Batch) -> int:
        """What is brought to the device at most for a batch, beside rows in slots."""
        item = self.miniature.itemsize
        known = planned.hop.block.indices.itemsize, 0 if planned.hop.block.weight is None else item
        forward, back = (8 * sum(len(getattr(batch, name)) for name in names) for names in (FORWARD, BACKWARD))
        most = 0
        for part in (part for program in self.programs.values() for part in program.parts):
            own = sum(part.ports[port].width for port in {*part.targets.values(), *part.rows.values()})
            if not part.aggregates:
                most = max(most, shape.targets * (own + part.width) * item)
                continue
            kept = part.hop in self.kept
            values = reads_values(part, part.steps - 1, kept=kept)
            way = back_way(part, values=values, kept=kept, on_cpu=self.on_cpu)
            first = forward + edge_bytes("forward", *shape, *known) + shape.targets * own * item
            then = forward * values + back + edge_bytes(way, *shape, *known)
            most = max(most, first, then + shape.targets * (own + part.kept_width * kept) * item)
        return most + 8 * (shape.targets + shape.slots)  # what the vertices are called

    def _planned(self, rank: int, hops: range, bounds: Sequence[Sequence[int]], *, reorder: bool) -> Planned:
        parts = [Part(each.hops[hops[0]], each.own, each.rows) for each in self.needed]
        layouts = layouts_of(self.programs.values(), hops)
        loops, savings = "looped" in layouts, self.savings

        def schedule(orders: Sequence[Sequence[int]] | None) -> Schedule:
            return make_schedule(
                parts,
                bounds,
                rank,
                loops=loops,
                orders=orders,
                share=savings.share,
                keep=savings.keep,
                ahead=savings.prefetch,
            )

        best = given = schedule(None)
        if reorder and savings.reorder and 2 < len(bounds[0]) <= MAX_REORDERED + 1:
            sets = [chunk_vertices(part, cuts, loops=loops) for part, cuts in zip(parts, bounds, strict=True)]
            other = schedule(reorder_chunks(sets, self.graph.num_vertices))
            best = min(given, other, key=lambda one: one.volumes.seconds(self.rates))
        return Planned(
            hop=parts[rank].hop,
            schedule=best,
            layouts=layouts,
            given=given.volumes,
        )


def layouts_of(programs: Iterable[Program], hops: range) -> tuple[Layout, ...]:
    """How the edges of these hops are to stand for the aggregates over them."""
    asked = (part for program in programs for part in program.parts if part.aggregates)
    found = {layout_of(one.op) for one in asked if set(hops) & set(range(one.hop, one.hop + one.steps))}
    return tuple(sorted(found))
