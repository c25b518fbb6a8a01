"""The chunks of one rank: its programs, the schedules of its aggregates, and which results it saves."""

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
    """Numbers of rows and edges of a chunk, which determine its memory."""

    targets: int
    """Number of rows that the chunk computes."""
    slots: int
    """Number of rows in the buffer that the chunk reads from."""
    edges: int
    """Number of edges into the targets."""


@dataclass(frozen=True, kw_only=True)
class HopSchedule:
    """The chunks of one or more aggregates on a rank that have the same block."""

    hop: Hop
    """Block of the aggregates."""
    schedule: Schedule
    """Rounds of this rank."""
    layouts: tuple[SlotLayout, ...]
    """Layouts in which the edges of each round are stored."""
    volumes: Volumes
    """Rows that one pass moves, all ranks together."""
    unordered_volumes: Volumes
    """Rows that one pass would move if the chunks were not reordered."""
    missing_loops: tuple[int, ...]
    """Number of targets without a self-loop, for each round."""

    def shapes(self) -> list[ChunkShape]:
        """Return the shape of each chunk, in the order of rounds."""
        num_slots = self.schedule.num_slots
        return [ChunkShape(each.num_targets, num_slots, each.num_edges) for each in self.schedule.sizes]


@dataclass(frozen=True, kw_only=True)
class RankChunks:
    """Everything that a rank does chunk by chunk, decided before the first pass."""

    programs: dict[bool, ChunkProgram]
    """Model cut into segments, for training (True) and for evaluation (False)."""
    dependencies: Dependencies
    """Rows that this rank computes and fetches, and the block of each aggregate."""
    schedules: tuple[HopSchedule, ...]
    """Schedules of the aggregates; aggregates with the same block share one."""
    schedule_of: tuple[int, ...]
    """Index in `schedules` of each aggregate's schedule."""
    range_size: int
    """Number of rows processed at once where no aggregate comes first."""
    saved_hops: frozenset[int]
    """Numbers of the aggregates whose results are saved for the backward pass (the first of several steps)."""
    chunks: tuple[tuple[tuple[ChunkShape, int], ...], ...]
    """Chunks of each schedule, and of ranges without an aggregate: shape, and bytes resident next to the chunk."""

    halo: HaloPlan | None = None
    """Rows that chunks send by themselves (pipeline); None if the chunks of a round exchange rows together."""
    prefetch: bool = True
    """True if the next chunk is loaded while one is computed."""
    on_cpu: bool
    """True if the device is the CPU."""
    in_memory: bool
    """True if host rows stay in memory (the device is the CPU); segments keep their autograd graphs for backward."""
    features_stay: bool = False
    """True if the graph's features can be read where the graph stores them."""

    @cached_property
    def stages(self) -> dict[bool, PassStages]:
        """Compiled stages of a pass over the chunks, for training (True) and for evaluation (False)."""
        return {
            training: compile_stages(program, self, training=training) for training, program in self.programs.items()
        }

    @property
    def reads_features(self) -> bool:
        """True if features are read where the graph stores them. Rows from other ranks rule that out."""
        return self.features_stay and self.halo is None

    @property
    def in_place(self) -> bool:
        """True if chunks read rows where they are stored, without slots."""
        return any(planned.schedule.in_place for planned in self.schedules)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the first aggregate."""
        return len(self.schedules[0].schedule.sizes) if self.schedules else 1

    def spans(self, num_rows: int) -> list[slice]:
        """Return the ranges of rows that are processed one after the other where no aggregate comes first.

        There is at least one range, so that all ranks take part in collectives. In a pipeline, the ranges are those of
        the chunks.
        """
        if self.halo is not None:
            return [each.targets for each in self.schedules[0].schedule.sizes]
        firsts = range(0, max(num_rows, 1), self.range_size)
        return [slice(first, min(first + self.range_size, num_rows)) for first in firsts]

    def num_rows(self, hop: int) -> int:
        """Return the number of local rows before an aggregate.

        Args:
            hop: Number of the aggregate; the number of aggregates stands for the rows after the last one.
        """
        hops = self.dependencies.hops
        return hops[hop].num_inputs if hop < len(hops) and self.halo is None else self.dependencies.num_own

    def num_source_rows(self, hop: int) -> int:
        """Return the number of rows that an aggregate may read: local rows, and in a pipeline those of other ranks.

        Args:
            hop: Number of the aggregate.
        """
        return self.dependencies.hops[hop].num_inputs
