"""One pass of a model over a graph whose rows are on the host, chunk by chunk.

Source: HongTu, section 4.3, algorithm 1.

Forward, segment by segment: load the rows of a chunk and the result of the last boundary, run the segment up to the
next boundary, and write the rows that it leaves to the host. Backward, from the last segment to the first: run a
segment again on the rows from the host, backpropagate, and add the gradients of its inputs on the host.

In a pipeline (G3, section 5), chunks send their rows to other ranks by themselves. The next chunk of a segment then
waits until all rows that it reads have arrived, and chunks of other segments run meanwhile. Chunks of one segment
always run in the same order, so no sum depends on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from weft.nn import Total, sum_rows
from weft.nn.layers.phases import Boundary
from weft.parallel.chunks.program.chunk_program import ChunkProgram, rows_by_port, stepwise
from weft.parallel.chunks.program.segments import PortRows, SegmentRuns
from weft.parallel.chunks.program.stages import AggregateStep, Buffer, PassStage
from weft.parallel.chunks.run.activations import Activations, Gradients, StoredRows
from weft.parallel.chunks.run.chunk_aggregates import ChunkAggregates, Loaded, RoundBackward
from weft.parallel.chunks.run.chunk_order import ChunkOrder, ChunkTask, ChunkTasks
from weft.parallel.chunks.run.chunk_runtime import PlacedChunks
from weft.parallel.chunks.run.slots import PlacedRound
from weft.utils.random import key

Item = TypeVar("Item", bound=tuple[object, ...])
RangeInputs = tuple[PortRows, Tensor | None]
"""Rows of a range that a boundary passes on, by port, and the result of the boundary: rows of the range or a sum."""


class ChunkPass:
    """A forward pass of a program on a rank, and the backward pass that may follow.

    Args:
        runtime: Rows, rounds and model of this rank.
        program: The model cut into segments.
        step_key: Numbers of epoch and step, part of the random keys.
        training: A backward pass follows.
    """

    def __init__(
        self, runtime: PlacedChunks, program: ChunkProgram, *, step_key: tuple[int, ...], training: bool
    ) -> None:
        self.runtime, self.segments, self.group = runtime, program.segments, runtime.group
        self.stages = runtime.stages[training]
        self.keys = [key(runtime.seed, *step_key, stage) for stage in runtime.model_stages]
        self.activations: list[Activations] = []
        self.grads: dict[int, Gradients] = {}
        """Gradients of `activations`, by segment."""
        self._allocated: dict[Buffer, StoredRows] = {}
        """Rows that stages have allocated and not freed yet."""
        self.runs = SegmentRuns(runtime, self.segments, self.keys, self.activations, training=training)
        self.order = ChunkOrder(runtime, self.segments, self.activations, self.grads)

    def forward(self) -> StoredRows:
        """Return the logits [n, C] of this rank's rows."""
        with torch.no_grad():
            if self.stages.once:
                if self.runtime.constant is None:
                    with self.runtime.meter.during("setup"):
                        self.order.forward([0], self._works(self.stages.once, self._forward))
                    self.runtime.constant = self.activations.pop()
                    self._allocated.clear()
                    if not self.runtime.only_first:
                        self.runtime.pool.close_free()  # such as the rows of all features, which no later pass needs
                self.activations.append(self.runtime.constant)
                self.order.ended.add(0)
            numbers = sorted({stage.number for stage in self.stages.forward})
            self.order.forward(numbers, self._works(self.stages.forward, self._forward))
        return self.activations[-1].arrays[0]

    def backward(self, grad: Tensor) -> None:
        """Add the gradients of all parameters; for parameters that ranks share, this rank's part.

        Args:
            grad: Gradient of the logits, [n, C].
        """
        self.grads[len(self.segments) - 1] = Gradients(live={0: grad})
        numbers = sorted({stage.number for stage in self.stages.backward}, reverse=True)
        self.order.backward(numbers, self._works(self.stages.backward, self._backward))
        self.runs.embedded.backward()

    def end(self, but: StoredRows | None = None) -> None:
        """Free all rows of the pass on the host, except for `but`."""
        self.runtime.pool.free(*(rows for rows in self._allocated.values() if rows is not but))
        self._allocated.clear()
        self.activations.clear()
        self.runs.end()

    def _works(
        self, stages: Sequence[PassStage], run: Callable[[int, list[PassStage]], ChunkTasks]
    ) -> list[ChunkTasks]:
        """Return the chunks of each segment as an iterator."""
        return [run(number, list(group)) for number, group in groupby(stages, lambda stage: stage.number)]

    def _alloc(self, stage: PassStage, kind: str) -> list[StoredRows]:
        """Allocate and return those rows that a stage makes whose `Buffer.kind` is `kind`."""
        allocated = [
            (buffer, self.runtime.pool.alloc(buffer.num_rows, buffer.width, in_sum_dtype=buffer.in_sum_dtype))
            for buffer in stage.makes
            if buffer.kind == kind
        ]
        self._allocated.update(allocated)
        return [rows for _, rows in allocated]

    def _rows_left(self, stage: PassStage) -> dict[int, StoredRows]:
        """Return the rows that a segment leaves, by port: newly allocated, or the graph's features themselves."""
        ports = [buffer.number for buffer in stage.makes if buffer.kind in ("rows", "logits")]
        rows = dict(zip(ports, [*self._alloc(stage, "rows"), *self._alloc(stage, "logits")], strict=True))
        if (features := self.runtime.features) is not None:
            live = self.segments[stage.number].live
            rows |= {port: features for port, rows_live in enumerate(live) if rows_live.features}
        return rows

    def _spans(self, number: int) -> Sequence[slice]:
        """Return the ranges of rows on which to run a segment that no aggregate precedes."""
        segment = self.segments[number]
        spans = self.runtime.spans(self.runtime.num_rows(segment.hop))
        return spans[:1] if self.runtime.features is not None and segment.only_features else spans

    def _free(self, stage: PassStage) -> None:
        """Free the rows that a stage no longer needs."""
        self.runtime.pool.free(*(self._allocated.pop(buffer) for buffer in stage.frees))

    def _forward(self, number: int, stages: list[PassStage]) -> ChunkTasks:
        """Run the stages of one segment chunk by chunk: its aggregate steps, and the segment itself."""
        activations = Activations(segment=self.segments[number])
        if stages[-1].runs:
            self.activations.append(activations)
        for stage in stages:
            if stage.runs:
                activations.arrays = self._rows_left(stage)
            yield from self._aggregate(stage, activations) if stage.step else self._run(stage, activations)
            self._free(stage)
        if activations.total is not None:
            activations.total = self.group.all_reduce(activations.total, tag="statistics")
            if activations.on_result is not None:
                activations.on_result(activations.total)
        if stages[-1].runs:
            self.order.ended.add(number)

    def _aggregate(self, stage: PassStage, activations: Activations) -> ChunkTasks:
        """Run a step of the aggregate before a segment, and after the last step the segment."""
        assert stage.step is not None
        before, step_id = self.activations[stage.number - 1], (stage.number - 1, stage.step.step)
        intermediates = self._alloc(stage, "intermediate")
        before.intermediates += intermediates
        if saved := self._alloc(stage, "result"):
            before.result, before.saved = saved[0], self._alloc(stage, "saved")

        def resume(chunk: int, round_: PlacedRound, loaded: Loaded, result: Tensor) -> None:
            for rows in intermediates:
                self.runtime.write(rows, round_.targets, result)
                self.order.forward_done((step_id[0], step_id[1] + 1), round_.targets, [result])
            if stage.runs:
                self._advance(stage.number, chunk, round_.targets, loaded.target_rows, result, activations)

        ready = partial(self.order.can_read, step_id)
        results = self._aggregates(step_id[0]).results(stage.step, ready=ready)
        return chunk_by_chunk(stage.number, results, ready, resume)

    def _run(self, stage: PassStage, activations: Activations) -> ChunkTasks:
        """Run a segment that no aggregate precedes, range by range."""
        runtime, number = self.runtime, stage.number
        before = self.activations[number - 1] if number else None

        def resume(chunk: int, span: slice, inputs: RangeInputs) -> None:
            self._count(*inputs)
            self._advance(number, chunk, span, *inputs, activations)

        loaded = runtime.load_ahead(self._spans(number), partial(self._rows, before))
        return chunk_by_chunk(number, loaded, partial(self.order.can_begin, number), resume)

    def _advance(
        self, number: int, chunk: int, span: slice, port_rows: PortRows, result: Tensor | None, activations: Activations
    ) -> None:
        """Run a segment on a range of rows and write the rows that it leaves to the host.

        Args:
            number: Number of the segment.
            chunk: Number of the range.
            span: Range of rows.
            port_rows: Rows that the previous boundary passed on, by port.
            result: Result of the previous boundary.
            activations: Destination of what the segment leaves.
        """
        reached = self.runs.forward(number, chunk, span, port_rows, result)
        if not isinstance(reached, Boundary):
            self.runtime.write(activations.arrays[0], span, reached)
            return
        left = rows_by_port(reached, activations.segment)
        for port, rows in left.items():
            if activations.arrays[port] is not self.runtime.features:
                self.runtime.write(activations.arrays[port], span, rows)
        if activations.op is None:  # these are the same for all ranges
            activations.shared = {**reached.request.shared, **reached.shared}
            activations.op = stepwise(reached).request.op
            activations.context, activations.on_result = reached.context, reached.on_result
        if isinstance(reached.request.op, Total):
            added = sum_rows(reached.request.rows["x"][: self.runs.num_own(span)])
            activations.total = added if activations.total is None else activations.total + added
        self.order.forward_done((number, 0), span, [left[port] for port in activations.segment.source_ports])

    def _aggregates(self, number: int) -> ChunkAggregates:
        boundary = self.segments[number].boundary
        assert boundary is not None
        return ChunkAggregates(self.runtime, self.activations[number], self.keys[boundary.stage])

    def _backward(self, number: int, stages: list[PassStage]) -> ChunkTasks:
        """Backpropagate through one segment and the aggregate before it, chunk by chunk."""
        into = self.grads[number - 1] = Gradients()
        step_grads: StoredRows | None = None
        for stage in stages:
            if stage.runs:
                ports = [buffer.number for buffer in stage.makes if buffer.kind == "grads"]
                into.live = dict(zip(ports, self._zeros(stage, "grads"), strict=True))
            destination = next(iter(self._zeros(stage, "step grads")), None)
            if stage.step is None:
                yield from self._run_back(number, into)
            else:
                yield from self._aggregate_back(stage, stage.step, into, step_grads, destination)
            self._free(stage)
            step_grads = destination
        self.order.ended_backward.add(number)

    def _zeros(self, stage: PassStage, kind: str) -> list[StoredRows]:
        """Allocate the gradients of one kind that a stage makes, filled with zeros."""
        grads = self._alloc(stage, kind)
        for rows in grads:
            rows.clear()
        return grads

    def _aggregate_back(
        self,
        stage: PassStage,
        step: AggregateStep,
        into: Gradients,
        grads: StoredRows | None,
        destination: StoredRows | None,
    ) -> ChunkTasks:
        """Backpropagate through the segment, if the step is the last one, and then through the step.

        Args:
            stage: Stage of the pass.
            step: Its aggregate step.
            into: Gradients of what the aggregate and the segment read; the chunks add to them.
            grads: Gradients of the step's result, if another step read it.
            destination: Gradients of an earlier step's result, if this step reads it; the chunks add to them.
        """
        number, out = stage.number, self.grads[stage.number]
        last_chunk = len(self.runtime.rounds(step.segment.hop + step.step)) - 1

        def back(chunk: int, round_: PlacedRound, loaded: Loaded, backward: RoundBackward) -> None:
            span, result = round_.targets, backward.result
            if stage.runs:
                last = chunk == last_chunk
                grad = self.runs.backward(number, chunk, span, loaded.target_rows, result, out, into, last=last)
            else:
                assert grads is not None
                grad = self.runtime.read_grads(grads, span)
            backward.back(grad)
            self.order.backward_done((number - 1, step.step), chunk, destination)

        ready: Callable[[int], bool] = partial(self.order.can_backward, number)
        if grads is not None:
            ready = partial(self.order.can_accumulate, (number - 1, step.step + 1), grads=[grads])
        rounds = self._aggregates(number - 1).backward(step, into, into=destination)
        return chunk_by_chunk(number, rounds, ready, back)

    def _run_back(self, number: int, into: Gradients) -> ChunkTasks:
        """Backpropagate through a segment that no aggregate precedes, range by range."""
        runtime, out = self.runtime, self.grads[number]
        spans = self._spans(number)

        def back(chunk: int, span: slice, inputs: RangeInputs) -> None:
            self._count(*inputs)
            last = chunk == len(spans) - 1
            into.add_total(self.runs.backward(number, chunk, span, *inputs, out, into, last=last))

        load = partial(self._rows, self.activations[number - 1] if number and not self.runs.retains else None)
        yield from chunk_by_chunk(
            number, runtime.load_ahead(spans, load), partial(self.order.can_backward, number), back
        )
        into.total = None if into.total is None else self.group.all_reduce(into.total, tag="statistics")

    def _rows(self, activations: Activations | None, span: slice) -> RangeInputs:
        """Load the rows of a range that a boundary passes on, and its result."""
        if activations is None:
            return {}, None
        read = self.runtime.read
        port_rows = {
            port: read(activations.arrays[port], span) for port in sorted(set(activations.segment.rows.values()))
        }
        return port_rows, activations.total if activations.result is None else read(activations.result, span)

    def _count(self, port_rows: PortRows, result: Tensor | None) -> None:
        """Count the bytes that `_rows` has loaded."""
        rows = (*port_rows.values(), *(() if result is None or result.dim() < 2 else (result,)))
        self.runtime.transfer("rows", sum(tensor.nbytes for tensor in rows), 0)


def chunk_by_chunk(
    segment: int, loaded: Iterator[Item], ready: Callable[[int], bool], work: Callable[..., None]
) -> ChunkTasks:
    """Yield each chunk of a segment before it runs, and run it when the next one is requested.

    Args:
        segment: Number of the segment.
        loaded: Loaded data of each chunk in turn.
        ready: Returns True if all rows that a chunk (by number) reads are available.
        work: Runs a chunk; called with its number and its loaded data.
    """
    chunk = 0
    yield ChunkTask(segment, chunk, partial(ready, chunk))
    while (item := next(loaded, None)) is not None:
        work(chunk, *item)
        del item  # free it before the next one is loaded
        chunk += 1
        yield ChunkTask(segment, chunk, partial(ready, chunk))
