"""What a rank does chunk by chunk, as a value: programs, blocks, schedules, and what of results is kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.parallel.chunks.cut.residency import Volumes
from weft.parallel.chunks.program.chunk_program import ChunkProgram
from weft.parallel.chunks.program.stages import PassStages, compile_stages
from weft.parallel.chunks.run.chunk_halos import HaloPlan
from weft.parallel.chunks.run.rounds import Schedule
from weft.parallel.chunks.run.slots import SlotLayout
from weft.partition import Dependencies, Hop


class ChunkShape(NamedTuple):
    """The size of a chunk."""

    targets: int
    """Rows that it makes."""
    slots: int
    """Rows on the device that it reads from."""
    edges: int


@dataclass(frozen=True, kw_only=True)
class HopSchedule:
    """The schedule of some hops on a rank, which have the same block."""

    hop: Hop
    """The first of them."""
    schedule: Schedule
    layouts: tuple[SlotLayout, ...]
    """How the edges of its rounds are stored."""
    volumes: Volumes
    """What moves."""
    given: Volumes
    """What would move if the chunks were not reordered."""
    missing_loops: tuple[int, ...]
    """Of each round, the targets that have no edge to themselves."""

    def shapes(self) -> list[ChunkShape]:
        """Those of its chunks."""
        return [
            ChunkShape(one.targets.stop - one.targets.start, self.schedule.num_slots, one.edges.stop - one.edges.start)
            for one in self.schedule.rounds
        ]


@dataclass(frozen=True, kw_only=True)
class RankChunks:
    """What a rank does chunk by chunk."""

    programs: dict[bool, ChunkProgram]
    """By whether it trains."""
    dependencies: Dependencies
    schedules: tuple[HopSchedule, ...]
    schedule_of: tuple[int, ...]
    """The number of each hop's schedule."""
    span: int
    """Rows of a range that is worked on without an aggregate."""
    kept: frozenset[int]
    """The first hops of the aggregates whose results are kept for the backward pass."""
    chunks: tuple[tuple[tuple[ChunkShape, int], ...], ...]
    """Of each schedule, and of ranges without one, the chunks, each with the bytes that are loaded for the next."""

    halo: HaloPlan | None = None
    """What crosses by itself; None: chunks of a round exchange what they read."""
    prefetch: bool = True
    """Whether the next chunk is loaded while one is worked on."""
    on_cpu: bool
    """Whether the device is the CPU."""
    in_memory: bool
    """Whether it is the memory that rows are in, where segments stay as they were run."""
    features_stay: bool = False
    """Whether the graph's features can be read where they are."""

    @cached_property
    def stages(self) -> dict[bool, PassStages]:
        """Those of a pass, by whether it trains."""
        return {training: compile_stages(one, self, training=training) for training, one in self.programs.items()}

    @property
    def reads_features(self) -> bool:
        """Whether rows that are the graph's features are read there, not copied: none come from other ranks."""
        return self.features_stay and self.halo is None

    @property
    def in_place(self) -> bool:
        """Whether chunks read rows where they are."""
        return any(round_.in_place for one in self.schedules for round_ in one.schedule.rounds)

    @property
    def num_chunks(self) -> int:
        """How many chunks the aggregates of the first hop are made in."""
        return len(self.schedules[0].schedule.rounds) if self.schedules else 1

    def spans(self, num_rows: int) -> list[slice]:
        """Ranges of rows that are worked on one after the other without an aggregate.

        One at least, so that ranks do the same; where rows cross by themselves, those of chunks.
        """
        if self.halo is not None:
            return [round_.targets for round_ in self.schedules[0].schedule.rounds]
        firsts = range(0, max(num_rows, 1), self.span)
        return [slice(first, min(first + self.span, num_rows)) for first in firsts]

    def num_rows(self, hop: int) -> int:
        """How many rows this rank has before an aggregate, or, behind the last one, in the end."""
        hops = self.dependencies.hops
        return hops[hop].num_inputs if hop < len(hops) and self.halo is None else self.dependencies.num_own

    def num_held(self, hop: int) -> int:
        """How many rows an aggregate reads from: those, and where other ranks send theirs, these as well."""
        return self.dependencies.hops[hop].num_inputs
