"""The order in which the chunks of a pass run, and the rows that they send to other ranks.

Source: G3, section 5. Without a pipeline, segments run one after the other. In a pipeline, a chunk runs as soon as the
rows that it reads have arrived; chunks of one segment always run in the same order, so no sum depends on timing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from weft.parallel.chunks.program.chunk_program import Segment
from weft.parallel.chunks.run.activations import Activations, Gradients, StoredRows
from weft.parallel.chunks.run.chunk_halos import GradFlow, HaloFlow, RowFlow, StepId
from weft.parallel.chunks.run.chunk_runtime import PlacedChunks


class ChunkTask(NamedTuple):
    """The next chunk of a segment. After the last chunk: the work that ends the segment."""

    segment: int
    """Number of the segment."""
    chunk: int
    """Number of the chunk; the number of chunks for the work that ends the segment."""
    can_run: Callable[[], bool]
    """Returns True if all rows that the chunk reads are available; also puts received rows in their place."""


ChunkTasks = Iterator[ChunkTask]
"""Chunks of a segment: the iterator yields a chunk before it runs, and runs it when the next one is requested."""


class ChunkOrder:
    """Runs the chunks of a pass, and tracks which rows and gradients are complete.

    Args:
        runtime: Rows and rounds of this rank.
        segments: Segments of the program.
        activations: What each segment has left so far; the pass extends the list.
        grads: Gradients of `activations`, by segment; the pass fills them in.
    """

    def __init__(
        self,
        runtime: PlacedChunks,
        segments: Sequence[Segment],
        activations: list[Activations],
        grads: dict[int, Gradients],
    ) -> None:
        self.runtime, self.group = runtime, runtime.group
        self.segments, self.activations, self.grads = segments, activations, grads
        self.ended, self.ended_backward = set[int](), set[int]()
        """Segments whose forward is done, and segments whose backward is done."""
        self._done, self._done_back = Counter[StepId](), Counter[StepId]()
        """Number of chunks that are done forward, and backward, for each aggregate step."""
        self._rows: RowFlow | None = None
        self._grads: GradFlow | None = None

    def forward(self, numbers: Iterable[int], works: Sequence[ChunkTasks]) -> None:
        """Run the chunks of several segments forward.

        Args:
            numbers: Numbers of the segments, ascending.
            works: Chunks of each segment.
        """
        if self.runtime.halo is not None:
            steps = [(number, step) for number in numbers for step in range(self._steps(number))]
            widths = {step_id: self._rows_width(*step_id) for step_id in steps}
            self._rows = RowFlow(self.runtime.halo, self.group, widths, self.runtime.dtype)
        self._run(works, self._rows, "forward")

    def backward(self, numbers: Iterable[int], works: Sequence[ChunkTasks]) -> None:
        """Run the chunks of several segments backward.

        Args:
            numbers: Numbers of the segments, descending.
            works: Chunks of each segment.
        """
        if self.runtime.halo is not None:
            before = [number - 1 for number in numbers if number]
            steps = [(number, step) for number in before for step in reversed(range(self._steps(number)))]
            widths = {step_id: width for step_id in steps if (width := self._grads_width(*step_id))}
            self._grads = GradFlow(self.runtime.halo, self.group, widths, self.runtime.sum_dtype)
        self._run(works, self._grads, "backward")

    def _run(self, works: Sequence[ChunkTasks], flow: HaloFlow | None, direction: str) -> None:
        """Run all chunks.

        With messages and eager execution, any segment may continue: the last one that can, so that results leave early.
        Otherwise segments run one after the other, and each chunk waits for its rows.
        """
        waiting: list[tuple[ChunkTasks, ChunkTask]] = []
        for work in works:
            task = next(work, None)
            if task is not None and flow is not None and self.runtime.optimisations.eager:
                waiting.insert(0, (work, task))
                continue
            while task is not None:
                if flow is not None:
                    flow.wait_for(partial(_true, task.can_run))
                task = self._do(task, work, direction)
        while waiting:
            assert flow is not None
            index = flow.wait_for(
                lambda: next((index for index, (_, waiting_task) in enumerate(waiting) if waiting_task.can_run()), None)
            )
            work, task = waiting[index]
            following = self._do(task, work, direction)
            waiting[index : index + 1] = [(work, following)] if following is not None else []
        if flow is not None:
            flow.finish()

    def _do(self, task: ChunkTask, work: ChunkTasks, direction: str) -> ChunkTask | None:
        """Run a chunk of a segment and return the next one."""
        with self.group.meter.noted("compute", f"{direction} {task.segment}", segment=task.segment, chunk=task.chunk):
            return next(work, None)

    def _steps(self, number: int) -> int:
        """Return the number of aggregate steps after a segment for which ranks exchange rows."""
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
        """Return True if a segment without an aggregate before it may run: all earlier segments are done.

        Args:
            number: Number of the segment.
            _chunk: Ignored.
        """
        return not number or number - 1 in self.ended

    def can_read(self, step_id: StepId, chunk: int) -> bool:
        """Return True if all rows that a chunk reads are available; store the rows that have arrived.

        Args:
            step_id: Aggregate step of the chunk.
            chunk: Number of the chunk.
        """
        halo, flow = self.runtime.halo, self._rows
        if halo is None or chunk >= halo.num_chunks:
            return True
        assert flow is not None
        if self._done[step_id] < halo.reads_own[chunk] or not flow.has_arrived(step_id, chunk):
            return False
        arrays = self._read_at_sources(*step_id)
        widths = [rows.width for rows in arrays]
        for span, values in flow.receive(step_id, chunk):
            for rows, part in zip(arrays, values.split(widths, 1), strict=True):
                rows.write(span.start, part)
        return True

    def _read_at_sources(self, number: int, step: int) -> list[StoredRows]:
        """Return the rows that ranks exchange before a step of the aggregate after a segment."""
        activations = self.activations[number]
        if step:
            return [activations.intermediates[step - 1]]
        return [activations.arrays[port] for port in activations.segment.source_ports]

    def forward_done(self, step_id: StepId, chunk_rows: slice, rows: Sequence[Tensor]) -> None:
        """Note that a chunk has computed the source rows of an aggregate step; send those that other ranks read.

        Args:
            step_id: Aggregate step that reads the rows.
            chunk_rows: Local row numbers of the chunk.
            rows: Rows of the chunk, one tensor [n, .] for each port.
        """
        if self._rows is not None and step_id[1] < self._steps(step_id[0]):
            self._rows.send(step_id, self._done[step_id], torch.cat(list(rows), 1), chunk_rows.start)
        self._done[step_id] += 1

    def can_backward(self, number: int, chunk: int) -> bool:
        """Return True if the gradients of the rows that a chunk left are complete; add those that have arrived.

        Args:
            number: Number of the segment that left the rows.
            chunk: Number of the chunk.
        """
        halo, segment = self.runtime.halo, self.segments[number]
        if halo is None or segment.boundary is None or number + 1 in self.ended_backward:
            complete = True
        else:  # the last chunk needs the gradients of the shared parameters
            complete = segment.aggregates and chunk < halo.num_chunks - 1
        if halo is None or chunk >= halo.num_chunks or not segment.aggregates:
            return complete
        live = self.grads[number].live
        return complete and self.can_accumulate((number, 0), chunk, [live[port] for port in self._grads_ports(number)])

    def can_accumulate(self, step_id: StepId, chunk: int, grads: Sequence[StoredRows]) -> bool:
        """Return True if all gradients of a chunk's source rows are available; add those that have arrived.

        Args:
            step_id: Aggregate step that read the rows.
            chunk: Number of the chunk.
            grads: Gradient rows to which received gradients are added.
        """
        halo, flow = self.runtime.halo, self._grads
        if halo is None or chunk >= halo.num_chunks:
            return True
        assert flow is not None
        if self._done_back[step_id] < halo.own_done[chunk]:
            return False
        if step_id not in flow.widths:
            return True
        if not flow.has_arrived(step_id, chunk):
            return False
        widths = [rows.width for rows in grads]
        for row_numbers, values in flow.receive(step_id, chunk):
            for rows, part in zip(grads, values.split(widths, 1), strict=True):
                rows.add(row_numbers, part.contiguous())
        return True

    def backward_done(self, step_id: StepId, chunk: int, step_grads: StoredRows | None) -> None:
        """Note that a chunk has added its gradients for an aggregate step; send those that are complete.

        Args:
            step_id: Aggregate step that read the rows.
            chunk: Number of the chunk.
            step_grads: Gradients of an earlier step's result; None for the first step, whose rows are a segment's
                ports.
        """
        if self._grads is not None and step_id in self._grads.widths:
            live = self.grads[step_id[0]].live
            grads = (
                [cast(StoredRows, step_grads)] if step_id[1] else [live[port] for port in self._grads_ports(step_id[0])]
            )
            self._grads.send(
                step_id, chunk, lambda span: torch.cat([rows.read(span.start, span.stop) for rows in grads], 1)
            )
        self._done_back[step_id] += 1


def _true(can_run: Callable[[], bool]) -> bool | None:
    """Return True if the task can run, else None (for `wait_for`)."""
    return can_run() or None
