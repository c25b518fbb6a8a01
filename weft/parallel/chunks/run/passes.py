"""One pass of a model over a graph whose rows are on the host, chunk by chunk (HongTu, section 4.3, algorithm 1).

Forward, segment by segment: the rows of a chunk come to the device with the result at the last boundary, the model goes
on with them to the next one, and what that leaves goes to the host. Backward from the last segment to the first: a
segment is run again on what the host has, and the gradients of what it read are added up there.

Where chunks send their rows to other ranks by themselves, a segment's next chunk waits until all rows that it reads are
there, and chunks of other segments run meanwhile (G3, section 5). Those of one segment run in one order, so that no sum
depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from weft.nn import Total
from weft.nn.layers.phases import Boundary
from weft.parallel.chunks.program.chunk_program import ChunkProgram, left_by, stepwise
from weft.parallel.chunks.program.segments import Own, SegmentRuns
from weft.parallel.chunks.program.stages import AggregateStep, Buffer, Stage
from weft.parallel.chunks.run.activations import BoundaryRows, Grads, Rows
from weft.parallel.chunks.run.chunk_aggregates import ChunkAggregates, Loaded, RoundBackward
from weft.parallel.chunks.run.chunk_order import ChunkOrder, ChunkTask, Work
from weft.parallel.chunks.run.chunk_runtime import PlacedChunks
from weft.parallel.chunks.run.slots import PlacedRound
from weft.utils.random import key

Item = TypeVar("Item", bound=tuple[object, ...])
Known = tuple[Own, Tensor | None]
"""What goes on with a range of rows, and the result there, or the one for all."""


class ChunkPass:
    """A forward pass of a program on a rank, and the backward pass that may follow."""

    def __init__(
        self, runtime: PlacedChunks, program: ChunkProgram, *, step_key: tuple[int, ...], training: bool
    ) -> None:
        self.runtime, self.segments, self.group = runtime, program.segments, runtime.group
        self.stages = runtime.stages[training]
        self.keys = [key(runtime.seed, *step_key, stage) for stage in runtime.model_stages]
        self.tables: list[BoundaryRows] = []
        self.grads: dict[int, Grads] = {}
        """Of what each table's boundary left."""
        self._made: dict[Buffer, Rows] = {}
        """What stages have made and not freed yet."""
        self.runs = SegmentRuns(runtime, self.segments, self.keys, self.tables, training=training)
        self.order = ChunkOrder(runtime, self.segments, self.tables, self.grads)

    def forward(self) -> Rows:
        """The logits [n, C] of this rank's rows."""
        with torch.no_grad():
            if self.stages.once:
                if self.runtime.constant is None:
                    with self.runtime.meter.during("setup"):
                        self.order.forward([0], self._works(self.stages.once, self._forward))
                    self.runtime.constant = self.tables.pop()
                    self._made.clear()
                self.tables.append(self.runtime.constant)
                self.order.ended.add(0)
            numbers = sorted({stage.number for stage in self.stages.forward})
            self.order.forward(numbers, self._works(self.stages.forward, self._forward))
        return self.tables[-1].arrays[0]

    def backward(self, grad: Tensor) -> None:
        """Leaves the gradients of the parameters, this rank's part of those that all ranks have."""
        self.grads[len(self.segments) - 1] = Grads(live={0: grad})
        numbers = sorted({stage.number for stage in self.stages.backward}, reverse=True)
        self.order.backward(numbers, self._works(self.stages.backward, self._backward))
        self.runs.embedded.backward()

    def end(self, but: Rows | None = None) -> None:
        """Gives back what the pass has on the host, but for some rows."""
        self.runtime.pool.free(*(rows for rows in self._made.values() if rows is not but))
        self._made.clear()
        self.tables.clear()
        self.runs.end()

    def _works(self, stages: Sequence[Stage], run: Callable[[int, list[Stage]], Work]) -> list[Work]:
        """Those of each segment, one after the other."""
        return [run(number, list(those)) for number, those in groupby(stages, lambda stage: stage.number)]

    def _alloc(self, stage: Stage, kind: str) -> list[Rows]:
        """The rows of a kind that a stage makes."""
        found = [(one, self.runtime.pool.alloc(one.num_rows, one.width)) for one in stage.makes if one.kind == kind]
        self._made.update(found)
        return [rows for _, rows in found]

    def _rows_left(self, stage: Stage) -> dict[int, Rows]:
        """The rows that a segment leaves, by port: those that the stage makes, and else the graph's features."""
        made = [one.place for one in stage.makes if one.kind == "rows"]
        rows = dict(zip(made, self._alloc(stage, "rows"), strict=True))
        if (features := self.runtime.features) is not None:
            live = self.segments[stage.number].live
            rows |= {port: features for port, one in enumerate(live) if one.features}
        return rows

    def _spans(self, number: int) -> Sequence[slice]:
        """The ranges of rows on which a segment runs that no aggregate comes before."""
        segment = self.segments[number]
        spans = self.runtime.spans(self.runtime.num_rows(segment.hop))
        return spans[:1] if self.runtime.features is not None and segment.only_features else spans

    def _free(self, stage: Stage) -> None:
        """Gives back what a stage frees."""
        self.runtime.pool.free(*(self._made.pop(one) for one in stage.frees))

    def _forward(self, number: int, stages: list[Stage]) -> Work:
        """Segment `number`, or what it reads, chunk by chunk."""
        table = BoundaryRows(segment=self.segments[number])
        if stages[-1].runs:
            self.tables.append(table)
        for stage in stages:
            if stage.runs:
                table.arrays = self._rows_left(stage)
            yield from self._aggregate(stage, table) if stage.step else self._run(stage, table)
            self._free(stage)
        if table.total is not None:
            table.total = self.group.all_reduce(table.total, tag="statistics")
            if table.on_result is not None:
                table.on_result(table.total)
        if stages[-1].runs:
            self.order.ended.add(number)

    def _aggregate(self, stage: Stage, table: BoundaryRows) -> Work:
        """A step of the aggregate before a segment; behind the last one the segment goes on."""
        assert stage.step is not None
        before, level = self.tables[stage.number - 1], (stage.number - 1, stage.step.step)
        between = self._alloc(stage, "between")
        before.between += between
        if kept := self._alloc(stage, "result"):
            before.result, before.kept = kept[0], self._alloc(stage, "kept")

        def go_on(chunk: int, round_: PlacedRound, loaded: Loaded, result: Tensor) -> None:
            for made in between:
                self.runtime.store(made, round_.targets, result)
                self.order.made((level[0], level[1] + 1), round_.targets, [result])
            if stage.runs:
                self._advance(stage.number, chunk, round_.targets, loaded.own, result, table)

        ready = partial(self.order.can_read, level)
        results = self._aggregates(level[0]).results(stage.step, ready=ready)
        return chunk_by_chunk(stage.number, results, ready, go_on)

    def _run(self, stage: Stage, table: BoundaryRows) -> Work:
        """A segment, range by range, behind what is known."""
        runtime, number = self.runtime, stage.number
        before = self.tables[number - 1] if number else None

        def go_on(chunk: int, span: slice, known: Known) -> None:
            self._count(*known)
            self._advance(number, chunk, span, *known, table)

        brought = runtime.ahead(self._spans(number), partial(self._rows, before))
        return chunk_by_chunk(number, brought, partial(self.order.can_begin, number), go_on)

    def _advance(
        self, number: int, chunk: int, span: slice, own: Own, result: Tensor | None, table: BoundaryRows
    ) -> None:
        """Runs a segment on a range of rows and leaves on the host what it gives."""
        reached = self.runs.forward(number, chunk, span, own, result)
        if not isinstance(reached, Boundary):
            self.runtime.store(table.arrays[0], span, reached)
            return
        left = left_by(reached, table.segment)
        for port, rows in left.items():
            if table.arrays[port] is not self.runtime.features:
                self.runtime.store(table.arrays[port], span, rows)
        if table.op is None:  # the same for all ranges
            table.shared = {**reached.request.shared, **reached.shared}
            table.op, table.context, table.on_result = stepwise(reached).request.op, reached.context, reached.on_result
        if isinstance(reached.request.op, Total):
            added = reached.request.rows["x"][: self.runs.num_own(span)].sum(0)
            table.total = added if table.total is None else table.total + added
        self.order.made((number, 0), span, [left[port] for port in table.segment.source_ports])

    def _aggregates(self, number: int) -> ChunkAggregates:
        boundary = self.segments[number].boundary
        assert boundary is not None
        return ChunkAggregates(self.runtime, self.tables[number], self.keys[boundary.stage])

    def _backward(self, number: int, stages: list[Stage]) -> Work:
        """Segment `number` and the aggregate before it: from the gradients of what it gave, those of what it read."""
        into = self.grads[number - 1] = Grads()
        step_grads: Rows | None = None
        for stage in stages:
            if stage.runs:
                ports = [one.place for one in stage.makes if one.kind == "grads"]
                into.live = dict(zip(ports, self._zeros(stage, "grads"), strict=True))
            to = next(iter(self._zeros(stage, "step grads")), None)
            if stage.step is None:
                yield from self._run_back(number, into)
            else:
                yield from self._aggregate_back(stage, stage.step, into, step_grads, to)
            self._free(stage)
            step_grads = to
        self.order.ended_back.add(number)

    def _zeros(self, stage: Stage, kind: str) -> list[Rows]:
        """The gradients of a kind that a stage makes, zero at first."""
        made = self._alloc(stage, kind)
        for rows in made:
            rows.clear()
        return made

    def _aggregate_back(
        self, stage: Stage, step: AggregateStep, into: Grads, grads: Rows | None, to: Rows | None
    ) -> Work:
        """The segment where the step is the last one, and back through that.

        grads: of what it made, if another step read that. to: where those go of what an earlier one made.
        """
        number, out = stage.number, self.grads[stage.number]
        last_chunk = len(self.runtime.rounds(step.segment.hop + step.step)) - 1

        def back(chunk: int, round_: PlacedRound, loaded: Loaded, backward: RoundBackward) -> None:
            span, result = round_.targets, backward.result
            if stage.runs:
                last = chunk == last_chunk
                grad = self.runs.backward(number, chunk, span, loaded.own, result, out, into, last=last)
            else:
                assert grads is not None
                grad = self.runtime.read_grads(grads, span)
            backward.back(grad)
            self.order.went_back((number - 1, step.step), chunk, to)

        ready: Callable[[int], bool] = partial(self.order.can_go_back, number)
        if grads is not None:
            ready = partial(self.order.can_add, (number - 1, step.step + 1), grads=[grads])
        rounds = self._aggregates(number - 1).backward(step, into, into=to)
        return chunk_by_chunk(number, rounds, ready, back)

    def _run_back(self, number: int, into: Grads) -> Work:
        """A segment that no aggregate comes before, range by range."""
        runtime, out = self.runtime, self.grads[number]
        spans = self._spans(number)

        def back(chunk: int, span: slice, known: Known) -> None:
            self._count(*known)
            last = chunk == len(spans) - 1
            into.add_total(self.runs.backward(number, chunk, span, *known, out, into, last=last))

        load = partial(self._rows, self.tables[number - 1] if number and not self.runs.retains else None)
        yield from chunk_by_chunk(number, runtime.ahead(spans, load), partial(self.order.can_go_back, number), back)
        into.total = None if into.total is None else self.group.all_reduce(into.total, tag="statistics")

    def _rows(self, table: BoundaryRows | None, span: slice) -> Known:
        """What goes on with a range of rows behind a boundary whose result is known."""
        if table is None:
            return {}, None
        read = self.runtime.read
        own = {port: read(table.arrays[port], span) for port in sorted(set(table.segment.rows.values()))}
        return own, table.total if table.result is None else read(table.result, span)

    def _count(self, own: Own, result: Tensor | None) -> None:
        """Notes what `_rows` has brought."""
        rows = (*own.values(), *(() if result is None or result.dim() < 2 else (result,)))
        self.runtime.transfer("rows", sum(one.nbytes for one in rows), 0)


def chunk_by_chunk(
    segment: int, brought: Iterator[Item], ready: Callable[[int], bool], work: Callable[..., None]
) -> Work:
    """A segment's chunks. work: is told a chunk's number and what is brought for it; ready: whether that is there."""
    chunk = 0
    yield ChunkTask(segment, chunk, partial(ready, chunk))
    while (item := next(brought, None)) is not None:
        work(chunk, *item)
        del item  # before the next is brought
        chunk += 1
        yield ChunkTask(segment, chunk, partial(ready, chunk))
