"""One pass of a model over a graph whose rows are on the host, chunk by chunk (HongTu, section 4.3, algorithm 1).

Forward, segment by segment: the rows of a chunk come to the device with the result at the last boundary, the model goes
on with them to the next one, and what that leaves goes to the host. Backward from the last segment to the first: a
segment is run again on what the host has, and the gradients of what it read are added up there.

Where chunks send their rows to other ranks by themselves, a segment's next chunk waits until all rows that it reads are
there, and chunks of other segments run meanwhile (G3, section 5). Those of one segment run in one order, so that no sum
depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from weft.chunks.aggregates import Again, ChunkAggregates, Loaded
from weft.chunks.order import ChunkOrder, Task, Work
from weft.chunks.placed import PlacedChunks
from weft.chunks.program import Program, differentiable, goes_back, left_by, stepwise
from weft.chunks.segments import Own, SegmentRuns
from weft.chunks.slots import PlacedRound
from weft.chunks.tables import BoundaryRows, Grads, Rows
from weft.core.random import key
from weft.nn import Total
from weft.nn.phases import Boundary

Item = TypeVar("Item", bound=tuple[object, ...])
Known = tuple[Own, Tensor | None]
"""What goes on with a range of rows, and the result there, or the one for all."""


class Pass:
    """A forward pass of a program on a rank, and the backward pass that may follow."""

    def __init__(self, home: PlacedChunks, program: Program, *, step_key: tuple[int, ...], training: bool) -> None:
        self.home, self.segments, self.group = home, program.segments, home.group
        self.keys = [key(home.seed, *step_key, stage) for stage in home.stages]
        self.tables: list[BoundaryRows] = []
        self.grads: dict[int, Grads] = {}
        """Of what each table's boundary left."""
        self.runs = SegmentRuns(home, self.segments, self.keys, self.tables, training=training)
        self.order = ChunkOrder(home, self.segments, self.tables, self.grads)

    def forward(self) -> Rows:
        """The logits [n, C] of this rank's rows."""
        with torch.no_grad():
            first = 0
            if self.segments[0].constant:
                first = 1
                if self.home.constant is None:
                    with self.home.meter.during("setup"):
                        self.order.forward([0], [self._make(0), self._result_once()])
                    self.home.constant = self.tables.pop()
                self.tables.append(self.home.constant)
                self.order.ended.add(0)
            numbers = range(first, len(self.segments))
            self.order.forward(numbers, [self._make(number) for number in numbers])
        return self.tables[-1].arrays[0]

    def backward(self, grad: Tensor) -> None:
        """Leaves the gradients of the parameters, this rank's part of those that all ranks have."""
        last = len(self.segments) - 1
        self.grads[last] = Grads(live={0: grad})
        numbers = [last]
        while numbers[-1] and goes_back(self.segments[numbers[-1] - 1]):
            numbers.append(numbers[-1] - 1)
        self.order.backward(numbers, [self._backward(number) for number in numbers])
        self.runs.embedded.backward()

    def end(self, but: Rows | None = None) -> None:
        """Gives back what the pass has on the host, but for some rows."""
        for table in self.tables:
            if table is not self.home.constant:
                given = (*table.arrays, table.result, *table.kept, *table.between)
                self.home.pool.free(*(rows for rows in given if rows is not but))
        self.tables.clear()
        self.runs.end()

    def _make(self, number: int) -> Work:
        """Segment `number`, chunk by chunk."""
        home, segment = self.home, self.segments[number]
        before, num_rows = self.tables[number - 1] if number else None, home.num_rows(segment.hop)
        held = home.num_held(segment.hop) if segment.aggregates else num_rows
        table = BoundaryRows(segment=segment, arrays=[home.pool.alloc(held, port.width) for port in segment.live])
        self.tables.append(table)
        if before is not None and before.segment.aggregates and not before.segment.constant:
            yield from self._make_steps(number - 1)
            if home.keeps(before.segment):
                before.result = home.pool.alloc(num_rows, before.segment.width)
            level = number - 1, before.segment.steps - 1

            def go_on(chunk: int, round_: PlacedRound, loaded: Loaded, result: Tensor) -> None:
                self._advance(number, chunk, round_.targets, loaded.own, result, table)

            can_read = partial(self.order.can_read, level)
            results = self._aggregates(number - 1).results(level[1], last=True, ready=can_read)
            yield from chunk_by_chunk(number, results, can_read, go_on)
        else:

            def go_on_known(chunk: int, span: slice, known: Known) -> None:
                self._count(*known)
                self._advance(number, chunk, span, *known, table)

            brought = home.ahead(home.spans(num_rows), partial(self._rows, before))
            yield from chunk_by_chunk(number, brought, partial(self.order.can_begin, number), go_on_known)
        if table.total is not None:
            table.total = self.group.all_reduce(table.total, tag="statistics")
            if table.on_result is not None:
                table.on_result(table.total)
        self.order.ended.add(number)

    def _advance(
        self, number: int, chunk: int, span: slice, own: Own, result: Tensor | None, table: BoundaryRows
    ) -> None:
        """Runs a segment on a range of rows and leaves on the host what it gives."""
        reached = self.runs.forward(number, chunk, span, own, result)
        if not isinstance(reached, Boundary):
            self.home.store(table.arrays[0], span, reached)
            return
        left = left_by(reached, table.segment)
        for port, rows in left.items():
            self.home.store(table.arrays[port], span, rows)
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
        return ChunkAggregates(self.home, self.tables[number], self.keys[boundary.stage])

    def _make_steps(self, number: int) -> Work:
        """All steps of the aggregate behind a segment but the last one."""
        for step in range(self.segments[number].steps - 1):
            yield from self._make_step(number, step)

    def _make_step(self, number: int, step: int) -> Work:
        home, table, segment = self.home, self.tables[number], self.segments[number]
        made = home.pool.alloc(home.num_held(segment.hop + step + 1), segment.width)

        def keep(_chunk: int, round_: PlacedRound, _loaded: Loaded, result: Tensor) -> None:
            home.store(made, round_.targets, result)
            self.order.made((number, step + 1), round_.targets, [result])

        ready = partial(self.order.can_read, (number, step))
        results = self._aggregates(number).results(step, last=False, ready=ready)
        yield from chunk_by_chunk(number, results, ready, keep)
        if segment.op.linear and step:
            home.pool.free(table.between.pop())
        table.between.append(made)

    def _result_once(self) -> Work:
        """The result that is made of constants; nothing but that and the rows that go on with it is kept."""
        home, table = self.home, self.tables[0]
        segment = table.segment
        yield from self._make_steps(0)
        table.result = home.pool.alloc(home.num_rows(segment.hop + segment.steps), segment.width)
        ready = partial(self.order.can_read, (0, segment.steps - 1))
        results = self._aggregates(0).results(segment.steps - 1, last=False, ready=ready)  # which keeps it
        yield from chunk_by_chunk(0, results, ready, lambda *_: None)
        home.pool.free(
            *table.between, *(rows for port, rows in enumerate(table.arrays) if port not in segment.rows.values())
        )
        table.between = []

    def _backward(self, number: int) -> Work:
        """Segment `number` and the aggregate before it: from the gradients of what it gave, those of what it read."""
        home, segment, out = self.home, self.segments[number], self.grads[number]
        before = self.tables[number - 1] if number else None
        into = self.grads[number - 1] = Grads()
        if before is not None and not before.segment.constant:
            ports, arrays = before.segment.live, before.arrays
            into.live = {
                port: home.zeros(arrays[port].num_rows, ports[port].width) for port in differentiable(before.segment)
            }
        ready = partial(self.order.can_go_back, number)
        if before is not None and before.segment.aggregates and not before.segment.constant:
            step = before.segment.steps - 1
            to, num_rounds = self._step_gradients(before, step), len(home.rounds(before.segment.hop + step))

            def back(chunk: int, round_: PlacedRound, loaded: Loaded, again: Again) -> None:
                known, last = (loaded.own, again.result), chunk == num_rounds - 1
                again.back(self.runs.backward(number, chunk, round_.targets, *known, out, into, last=last))
                self.order.went_back((number - 1, step), chunk, to)

            retained = self.runs.retains
            rounds = self._aggregates(number - 1).again(step, into, last=True, into=to, retained=retained)
            yield from chunk_by_chunk(number, rounds, ready, back)
            yield from self._steps_back(number - 1, into, to)
        else:
            spans = home.spans(home.num_rows(segment.hop))

            def back_known(chunk: int, span: slice, known: Known) -> None:
                self._count(*known)
                last = chunk == len(spans) - 1
                into.add_total(self.runs.backward(number, chunk, span, *known, out, into, last=last))

            load = partial(self._rows, None if self.runs.retains else before)
            yield from chunk_by_chunk(number, home.ahead(spans, load), ready, back_known)
            into.total = None if into.total is None else self.group.all_reduce(into.total, tag="statistics")
        home.pool.free(*(rows for rows in out.live.values() if not isinstance(rows, Tensor)))
        self.order.ended_back.add(number)

    def _step_gradients(self, table: BoundaryRows, step: int) -> Rows | None:
        """Where the gradient of what step `step` reads goes, if an earlier one made it."""
        if not step or not table.segment.differentiable:
            return None
        return self.home.zeros(self.home.num_held(table.segment.hop + step), table.segment.width)

    def _steps_back(self, number: int, into: Grads, grads: Rows | None) -> Work:
        """The steps of the aggregate behind a segment before its last one; grads: of what that one read."""
        for step in reversed(range(self.segments[number].steps - 1)):
            assert grads is not None
            to = self._step_gradients(self.tables[number], step)
            yield from self._step_back(number, step, into, grads, to)
            grads = to

    def _step_back(self, number: int, step: int, into: Grads, grads: Rows, to: Rows | None) -> Work:
        def back(chunk: int, round_: PlacedRound, _loaded: Loaded, again: Again) -> None:
            again.back(self.home.read_grads(grads, round_.targets))
            self.order.went_back((number, step), chunk, to)

        ready = partial(self.order.can_add, (number, step + 1), grads=[grads])
        rounds = self._aggregates(number).again(step, into, last=False, into=to)
        yield from chunk_by_chunk(number, rounds, ready, back)
        self.home.pool.free(grads)

    def _rows(self, table: BoundaryRows | None, span: slice) -> Known:
        """What goes on with a range of rows behind a boundary whose result is known."""
        if table is None:
            return {}, None
        read = self.home.read
        own = {port: read(table.arrays[port], span) for port in sorted(set(table.segment.rows.values()))}
        return own, table.total if table.result is None else read(table.result, span)

    def _count(self, own: Own, result: Tensor | None) -> None:
        """Notes what `_rows` has brought."""
        rows = (*own.values(), *(() if result is None or result.dim() < 2 else (result,)))
        self.home.transfer("rows", sum(one.nbytes for one in rows), 0)


def chunk_by_chunk(
    segment: int, brought: Iterator[Item], ready: Callable[[int], bool], work: Callable[..., None]
) -> Work:
    """A segment's chunks. work: is told a chunk's number and what is brought for it; ready: whether that is there."""
    chunk = 0
    yield Task(segment, chunk, partial(ready, chunk))
    while (item := next(brought, None)) is not None:
        work(chunk, *item)
        del item  # before the next is brought
        chunk += 1
        yield Task(segment, chunk, partial(ready, chunk))
