"""Which chunk of a pass can run: progress by level, and what crosses between ranks by itself (G3, section 5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from weft.parallel.chunks.program.chunk_program import Segment
from weft.parallel.chunks.run.activations import BoundaryRows, Grads, Rows
from weft.parallel.chunks.run.chunk_halos import GradFlow, HaloFlow, Level, RowFlow
from weft.parallel.chunks.run.chunk_runtime import PlacedChunks


class ChunkTask(NamedTuple):
    """A chunk of a segment that comes next; behind the last one, what ends the segment."""

    segment: int
    chunk: int
    can_run: Callable[[], bool]
    """Whether what it reads is there; prepares that where it is."""


Work = Iterator[ChunkTask]
"""A segment's chunks, one after the other: each is given before it runs."""


class ChunkOrder:
    """The order of a pass's chunks: one segment after the other, or whichever can run where rows cross by themselves.

    tables, grads: what segments have left, and the gradients of that, as the pass makes them.
    """

    def __init__(
        self,
        runtime: PlacedChunks,
        segments: Sequence[Segment],
        tables: list[BoundaryRows],
        grads: dict[int, Grads],
    ) -> None:
        self.runtime, self.group = runtime, runtime.group
        self.segments, self.tables, self.grads = segments, tables, grads
        self.ended, self.ended_back = set[int](), set[int]()
        """Segments that are done, and that are done backward."""
        self._done, self._done_back = Counter[Level](), Counter[Level]()
        """Chunks that have made a level's rows, and that have added to their gradients."""
        self._rows: RowFlow | None = None
        self._grads: GradFlow | None = None

    def forward(self, numbers: Iterable[int], works: Sequence[Work]) -> None:
        """Runs the chunks of some segments."""
        if self.runtime.halo is not None:
            levels = [(number, step) for number in numbers for step in range(self._steps(number))]
            widths = {level: self._rows_width(*level) for level in levels}
            self._rows = RowFlow(self.runtime.halo, self.group, widths, self.runtime.dtype)
        self._run(works, self._rows, "forward")

    def backward(self, numbers: Iterable[int], works: Sequence[Work]) -> None:
        """Runs them backward, of segments from the last to the first."""
        if self.runtime.halo is not None:
            before = [number - 1 for number in numbers if number]
            levels = [(number, step) for number in before for step in reversed(range(self._steps(number)))]
            widths = {level: width for level in levels if (width := self._grads_width(*level))}
            self._grads = GradFlow(self.runtime.halo, self.group, widths, self.runtime.dtype)
        self._run(works, self._grads, "backward")

    def _run(self, works: Sequence[Work], flow: HaloFlow | None, way: str) -> None:
        """All chunks: those of one segment after the other, or whichever can run, of the segment that is furthest."""
        waiting: list[tuple[Work, ChunkTask]] = []
        for work in works:
            task = next(work, None)
            if task is not None and flow is not None and self.runtime.optimisations.eager:
                waiting.insert(0, (work, task))
                continue
            while task is not None:
                if flow is not None:
                    flow.wait_for(partial(_true, task.can_run))
                task = self._do(task, work, way)
        while waiting:
            assert flow is not None
            place = flow.wait_for(
                lambda: next((place for place, (_, one) in enumerate(waiting) if one.can_run()), None)
            )
            work, task = waiting[place]
            following = self._do(task, work, way)
            waiting[place : place + 1] = [(work, following)] if following is not None else []
        if flow is not None:
            flow.finish()

    def _do(self, task: ChunkTask, work: Work, way: str) -> ChunkTask | None:
        """Runs a chunk of a segment; the next one."""
        with self.group.meter.noted("compute", f"{way} {task.segment}", segment=task.segment, chunk=task.chunk):
            return next(work, None)

    def _steps(self, number: int) -> int:
        """The aggregates behind a segment whose rows cross."""
        segment = self.segments[number]
        return segment.steps if segment.aggregates else 0

    def _rows_width(self, number: int, step: int) -> int:
        segment = self.segments[number]
        return segment.width if step else segment.source_width

    def _grads_width(self, number: int, step: int) -> int:
        segment = self.segments[number]
        if step:
            return segment.width * segment.differentiable
        return sum(segment.live[port].width for port in self._grads_ports(number))

    def _grads_ports(self, number: int) -> list[int]:
        segment = self.segments[number]
        return [port for port in segment.source_ports if segment.live[port].differentiable]

    def can_begin(self, number: int, _chunk: int) -> bool:
        """Whether a segment that reads no rows of other ranks may run: behind all that comes before it."""
        return not number or number - 1 in self.ended

    def can_read(self, level: Level, chunk: int) -> bool:
        """Whether the rows of a level are there that a chunk reads; those that have come are put in their places."""
        halo, flow = self.runtime.halo, self._rows
        if halo is None or chunk >= halo.num_chunks:
            return True
        assert flow is not None
        if self._done[level] < halo.reads_own[chunk] or not flow.here(level, chunk):
            return False
        arrays = self._read_at_sources(*level)
        widths = [rows.width for rows in arrays]
        for span, values in flow.take(level, chunk):
            for rows, part in zip(arrays, values.split(widths, 1), strict=True):
                rows.write(span.start, part)
        return True

    def _read_at_sources(self, number: int, step: int) -> list[Rows]:
        """The rows that cross before a step of the aggregate behind a segment."""
        table = self.tables[number]
        if step:
            return [table.between[step - 1]]
        return [table.arrays[port] for port in table.segment.source_ports]

    def made(self, level: Level, chunk_rows: slice, rows: Sequence[Tensor]) -> None:
        """Notes that a chunk has made its rows of a level, and sends those that other ranks read."""
        if self._rows is not None and level[1] < self._steps(level[0]):
            self._rows.send(level, self._done[level], torch.cat(list(rows), 1), chunk_rows.start)
        self._done[level] += 1

    def can_go_back(self, number: int, chunk: int) -> bool:
        """Whether the gradients of what a chunk left behind a segment are complete; those that have come are added."""
        halo, segment = self.runtime.halo, self.segments[number]
        if halo is None or segment.boundary is None or number + 1 in self.ended_back:
            complete = True
        else:  # the last chunk has the gradients of what all rows share
            complete = segment.aggregates and chunk < halo.num_chunks - 1
        if halo is None or chunk >= halo.num_chunks or not segment.aggregates:
            return complete
        live = self.grads[number].live
        return complete and self.can_add((number, 0), chunk, [live[port] for port in self._grads_ports(number)])

    def can_add(self, level: Level, chunk: int, grads: Sequence[Rows]) -> bool:
        """Whether all gradients of a chunk's rows of a level are there; those that have come are added."""
        halo, flow = self.runtime.halo, self._grads
        if halo is None or chunk >= halo.num_chunks:
            return True
        assert flow is not None
        if self._done_back[level] < halo.own_done[chunk]:
            return False
        if level not in flow.widths:
            return True
        if not flow.here(level, chunk):
            return False
        widths = [rows.width for rows in grads]
        for places, values in flow.take(level, chunk):
            for rows, part in zip(grads, values.split(widths, 1), strict=True):
                rows.add(places, part.contiguous())
        return True

    def went_back(self, level: Level, chunk: int, step_grads: Rows | None) -> None:
        """Notes that a chunk has added its gradients at a level, and sends those that others wait for."""
        if self._grads is not None and level in self._grads.widths:
            live = self.grads[level[0]].live
            grads = [cast(Rows, step_grads)] if level[1] else [live[port] for port in self._grads_ports(level[0])]
            self._grads.send(
                level, chunk, lambda span: torch.cat([rows.read(span.start, span.stop) for rows in grads], 1)
            )
        self._done_back[level] += 1


def _true(can_run: Callable[[], bool]) -> bool | None:
    return can_run() or None
