"""What offload does on a rank, settled before anything large is allocated: programs, schedules, and what they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.core.savings import Savings
from weft.data import Graph
from weft.partition import Dependencies, Hop, Part, Schedule, cut_block, make_schedule, reorder
from weft.partition import chunk_vertices
from weft.strategies.base import Placement
from weft.strategies.hybrid import Communicated, Hybrid, part_of
from weft.strategies.program import Part as ProgramPart
from weft.strategies.program import Program, Rehearsal
from weft.strategies.products import layout_of
from weft.strategies.slots import Layout


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The schedule of a hop on this rank, and how its batches' edges are to stand. first: the first hop that has it."""

    hop: Hop
    first: int
    schedule: Schedule
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """programs: by whether it trains. schedule_of: the number of each hop's schedule. span: rows of a range."""

    programs: dict[bool, Program]
    dependencies: Dependencies
    schedules: tuple[Planned, ...]
    schedule_of: tuple[int, ...]
    span: int
    intermediates: str

    def keeps(self, part: ProgramPart) -> bool:
        """Whether a product's answers are kept for the backward pass."""
        return part.linear and part.needs_answer and self.intermediates != "recompute"


def make_plan(
    graph: Graph, model: nn.Module, *, rank: int, size: int, placement: Placement, savings: Savings
) -> Plan:
    """What rank `rank` of `size` does: the same wherever it is asked."""
    rehearsal = Rehearsal(graph, model, savings)
    programs = {training: rehearsal.program(training=training) for training in (True, False)}
    kind = Communicated if placement.cache_ratio is None and placement.factors is None else Hybrid
    needed = [
        kind.plan(graph, model, rank=one, size=size, placement=placement, savings=savings) for one in range(size)
    ]
    part = part_of(graph, size, placement)
    num_hops = programs[True].num_hops
    schedule_of: list[int] = []
    planned: list[Planned] = []
    count = max(placement.chunks, 1)
    for hop in range(num_hops):
        if hop and all(each.hops[hop] is each.hops[hop - 1] for each in needed):
            schedule_of.append(schedule_of[-1])
            continue
        hops = {number for number in range(hop, num_hops) if all(each.hops[number] is each.hops[hop] for each in needed)}
        layouts = layouts_of(programs.values(), hops)
        parts = [Part(each.hops[hop], each.own, each.rows) for each in needed]
        bounds = [cut_block(each.hops[hop].block, count) for each in needed]
        loops = "looped" in layouts
        orders = None
        if savings.reorder:
            orders = reorder([chunk_vertices(one, cuts, loops=loops) for one, cuts in zip(parts, bounds, strict=True)], graph.num_vertices)
        schedule = make_schedule(
            parts, bounds, rank, loops=loops, orders=orders, share=savings.share, keep=savings.keep, ahead=savings.prefetch
        )
        schedule_of.append(len(planned))
        planned.append(Planned(hop=parts[rank].hop, first=hop, schedule=schedule, layouts=layouts))
    del part
    widest = max((batch.targets.stop - batch.targets.start for one in planned for batch in one.schedule.batches), default=0)
    return Plan(
        programs=programs,
        dependencies=needed[rank],
        schedules=tuple(planned),
        schedule_of=tuple(schedule_of),
        span=max(widest, 1) if planned else max(graph.num_vertices // count, 1),
        intermediates=placement.intermediates,
    )


def layouts_of(programs: Sequence[Program], hops: set[int]) -> tuple[Layout, ...]:
    """How the edges of these hops are to stand for the questions that are asked over them."""
    asked = (part for program in programs for part in program.parts if part.is_product)
    return tuple(sorted({layout_of(part.question) for part in asked if hops & set(range(part.hop, part.hop + part.steps))}))
