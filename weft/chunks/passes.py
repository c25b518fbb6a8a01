"""One pass of a model over a graph whose rows are on the host, chunk by chunk (HongTu, section 4.3, algorithm 1).

Forward, segment by segment: the rows of a chunk come to the device with the result at the last boundary, the model goes
on with them to the next one, and what that leaves goes to the host. Backward from the last segment to the first: a
segment is run again on what the host has, and the gradients of what it read are added up there.

Where chunks send their rows to other ranks by themselves, a segment's next chunk waits until all rows that it reads are
there, and chunks of other segments run meanwhile (G3, section 5). Those of one segment run in one order, so that no sum
depends on it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from weft.chunks.aggregates import ChunkAggregates
from weft.chunks.embedded import EmbeddedRows
from weft.chunks.order import ChunkOrder, Task, Work
from weft.chunks.placed import PlacedChunks
from weft.chunks.program import Program, Segment, differentiable, goes_back, left_by, stepwise
from weft.chunks.tables import BoundaryRows, Grads, Rows, deposit, read, store
from weft.chunks.views import RowsView
from weft.core.random import key
from weft.nn import Inputs, Total
from weft.nn.phases import Boundary, BoundaryState, PhasedModel
from weft.store.files import release

Item = TypeVar("Item")
Own = dict[int, Tensor]
"""Rows of a range by their port."""


class SegmentRun(NamedTuple):
    """A segment that was run on a range of rows: the leaves that it began with, and what it reached."""

    own: Own
    result: Tensor | None
    shared: dict[str, Tensor]
    reached: Boundary | Tensor


class Pass:
    """A forward pass of a program on a rank, and the backward pass that may follow."""

    def __init__(self, home: PlacedChunks, program: Program, *, step_key: tuple[int, ...], training: bool) -> None:
        self.home, self.segments = home, program.segments
        self.model, self.group, self.meter = cast(PhasedModel, home.model), home.group, home.group.meter
        self.keys = [key(home.seed, *step_key, stage) for stage in home.stages]
        self.tables: list[BoundaryRows] = []
        self.grads: dict[int, Grads] = {}
        """Of what each table's boundary left."""
        self.embedded = EmbeddedRows(home, training=training)
        self.order = ChunkOrder(home, self.segments, self.tables, self.grads)
        self._retains = training and home.in_memory
        """Whether segments stay as they were run, so that the backward pass need not run them again."""
        self._retained: dict[int, deque[SegmentRun]] = defaultdict(deque)
        """By segment."""

    def forward(self) -> Rows:
        """The logits [n, C] of this rank's rows."""
        with torch.no_grad():
            first = 0
            if self.segments[0].constant:
                first = 1
                if self.home.constant is None:
                    with self.meter.during("setup"):
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
        self.embedded.backward()

    def end(self, but: Rows | None = None) -> None:
        """Gives back what the pass has on the host, but for some rows."""
        for table in self.tables:
            if table is not self.home.constant:
                given = (*table.arrays, table.result, *table.kept, *table.between)
                self.home.pool.free(*(rows for rows in given if rows is not but))
        self.tables.clear()
        self._retained.clear()

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
            ready = partial(self.order.can_read, level)
            yield Task(number, 0, partial(ready, 0))
            results = self._aggregates(number - 1).results(level[1], last=True, ready=ready)
            for chunk, (round_, loaded, result) in numbered(results):
                self._advance(number, round_.targets, loaded.own, result, table)
                del loaded, result
                yield Task(number, chunk, partial(ready, chunk))
        else:
            yield Task(number, 0, lambda: before is None or number - 1 in self.order.ended)
            brought = home.ahead(home.spans(num_rows), partial(self._rows, before))
            for chunk, (span, (own, known)) in numbered(brought):
                self._count(own, known)
                self._advance(number, span, own, known, table)
                del own, known
                yield Task(number, chunk, lambda: True)
        if table.total is not None:
            table.total = self.group.all_reduce(table.total, tag="statistics")
            if table.on_result is not None:
                table.on_result(table.total)
        self.order.ended.add(number)

    def _advance(self, number: int, span: slice, own: Own, result: Tensor | None, table: BoundaryRows) -> None:
        """Runs a segment on a range of rows and leaves on the host what it gives."""
        shared = self.tables[number - 1].shared if number else {}
        if self._retains:
            run = self._run_on(number, span, own, result, shared)
            self._retained[number].append(run)
            reached = run.reached
        else:
            reached = self._resume(number, span, own, result, shared)
        if not isinstance(reached, Boundary):
            store(table.arrays[0], span, reached, self.meter)
            return
        left = left_by(reached, table.segment)
        for port, rows in left.items():
            store(table.arrays[port], span, rows, self.meter)
        if table.op is None:  # the same for all ranges
            table.shared = {**reached.request.shared, **reached.shared}
            table.op, table.context, table.on_result = stepwise(reached).request.op, reached.context, reached.on_result
        if isinstance(reached.request.op, Total):
            added = reached.request.rows["x"][: self._num_own(span)].sum(0)
            table.total = added if table.total is None else table.total + added
        self.order.made((number, 0), span, [left[port] for port in table.segment.source_ports])

    def _resume(
        self, number: int, span: slice, own: Own, result: Tensor | None, shared: dict[str, Tensor]
    ) -> Boundary | Tensor:
        """Segment `number` on a range of rows."""
        home, segment = self.home, self.segments[number]
        inputs = home.inputs_of(span) if number == 0 else Inputs(optimisations=home.optimisations)
        make = partial(RowsView, home.topology, home.row_ids[span], home.graph.num_vertices, meter=self.meter)
        calls, embedded = zip(self.keys, segment.calls, strict=True), partial(self.embedded.of, span)
        views = [make(key=k, calls=c, inputs=inputs, embedded=embedded) for k, c in calls]
        if number == 0:
            return self.model.begin(views, cast(Tensor, inputs.rows))
        before = self.tables[number - 1]
        rows = {name: own[port] for name, port in before.segment.rows.items()}
        state = BoundaryState(result=cast(Tensor, result), rows=rows, shared=shared, context=before.context)
        return self.model.resume(views, state)

    def _aggregates(self, number: int) -> ChunkAggregates:
        boundary = self.segments[number].boundary
        assert boundary is not None
        return ChunkAggregates(self.home, self.tables[number], self.keys[boundary.stage])

    def _make_steps(self, number: int) -> Work:
        """All steps of the aggregate behind a segment but the last one."""
        home, table = self.home, self.tables[number]
        segment = table.segment
        for step in range(segment.steps - 1):
            made = home.pool.alloc(home.num_held(segment.hop + step + 1), segment.width)
            ready = partial(self.order.can_read, (number, step))
            yield Task(number, 0, partial(ready, 0))
            results = self._aggregates(number).results(step, last=False, ready=ready)
            for chunk, (round_, loaded, result) in numbered(results):
                store(made, round_.targets, result, self.meter)
                self.order.made((number, step + 1), round_.targets, [result])
                del loaded, result
                yield Task(number, chunk, partial(ready, chunk))
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
        yield Task(0, 0, partial(ready, 0))
        results = self._aggregates(0).results(segment.steps - 1, last=False, ready=ready)
        for chunk, result in numbered(results):
            del result  # it is kept
            yield Task(0, chunk, partial(ready, chunk))
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
            into.live = {port: self._zeros(before, port) for port in differentiable(before.segment)}
        ready = partial(self.order.can_go_back, number)
        if before is not None and before.segment.aggregates and not before.segment.constant:
            step = before.segment.steps - 1
            to = self._step_gradients(before, step)
            rounds = home.rounds(before.segment.hop + step)
            yield Task(number, 0, partial(ready, 0))
            again_ = self._aggregates(number - 1).again(step, into, last=True, into=to, retained=self._retains)
            for chunk, (round_, loaded, again) in numbered(again_):
                last = chunk == len(rounds)
                again.back(self._redo(number, round_.targets, loaded.own, again.result, out, into, last=last))
                del loaded, again
                self.order.went_back((number - 1, step), chunk - 1, to)
                yield Task(number, chunk, partial(ready, chunk))
            yield from self._steps_back(number - 1, into, to)
        else:
            spans = home.spans(home.num_rows(segment.hop))
            yield Task(number, 0, partial(ready, 0))
            load = partial(self._rows, None if self._retains else before)
            for chunk, (span, (own, result)) in numbered(home.ahead(spans, load)):
                self._count(own, result)
                into.add_total(self._redo(number, span, own, result, out, into, last=chunk == len(spans)))
                del own, result
                yield Task(number, chunk, partial(ready, chunk))
            into.total = None if into.total is None else self.group.all_reduce(into.total, tag="statistics")
        home.pool.free(*(rows for rows in out.live.values() if not isinstance(rows, Tensor)))
        self.order.ended_back.add(number)

    def _zeros(self, table: BoundaryRows, port: int) -> Rows:
        rows = self.home.pool.alloc(table.arrays[port].num_rows, table.segment.live[port].width)
        rows.clear()
        return rows

    def _step_gradients(self, table: BoundaryRows, step: int) -> Rows | None:
        """Where the gradient of what step `step` reads goes, if an earlier one made it."""
        if not step or not table.segment.differentiable:
            return None
        rows = self.home.pool.alloc(self.home.num_held(table.segment.hop + step), table.segment.width)
        rows.clear()
        return rows

    def _steps_back(self, number: int, into: Grads, grads: Rows | None) -> Work:
        """The steps of the aggregate behind a segment before its last one; grads: of what that one read."""
        table = self.tables[number]
        for step in reversed(range(table.segment.steps - 1)):
            assert grads is not None
            to = self._step_gradients(table, step)
            ready = partial(self.order.can_add, (number, step + 1), grads=[grads])
            yield Task(number, 0, partial(ready, 0))
            again_ = self._aggregates(number).again(step, into, last=False, into=to)
            for chunk, (round_, loaded, again) in numbered(again_):
                again.back(self._grads(grads, round_.targets))
                del loaded, again
                self.order.went_back((number, step), chunk - 1, to)
                yield Task(number, chunk, partial(ready, chunk))
            self.home.pool.free(grads)
            grads = to

    def _redo(
        self, number: int, span: slice, own: Own, result: Tensor | None, out: Grads, into: Grads, *, last: bool
    ) -> Tensor | None:
        """Runs a segment on a range of rows again, and back; the gradient of the result.

        last: whether it is the last range, which takes the gradients of what all ranges share.
        """
        if self._retains:  # chunks go back in the order in which they came
            run = self._retained[number].popleft()
        else:
            run = self._run_on(number, span, own, result, self.tables[number - 1].shared if number else {})
        results = list(self._results(run.reached, self.segments[number], span, out, last=last))
        if not results:
            return None
        torch.autograd.backward([result for result, _ in results], [grad for _, grad in results])
        if number == 0:
            self.embedded.collect(span)
        for port, rows in run.own.items():
            if rows.grad is not None:
                deposit(into.live[port], span, rows.grad, self.meter)
        for name, value in run.shared.items():
            into.add_shared(name, value.grad)
        return None if run.result is None else run.result.grad

    def _run_on(
        self, number: int, span: slice, own: Own, result: Tensor | None, shared: dict[str, Tensor]
    ) -> SegmentRun:
        """Runs a segment on a range of rows so that gradients can go back."""
        if number:
            before = self.tables[number - 1].segment
            own = {port: leaf(rows, before.live[port].differentiable) for port, rows in own.items()}
            result = leaf(cast(Tensor, result), before.differentiable)
            named = before.boundary.shared if before.boundary else {}
            shared = {name: leaf(shared[name], before.shared[name]) for name in named}
        with torch.enable_grad():
            return SegmentRun(own, result, shared, self._resume(number, span, own, result, shared))

    def _results(
        self, reached: Boundary | Tensor, segment: Segment, span: slice, out: Grads, *, last: bool
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """What a segment gave for a range of rows that has a gradient, and that."""
        if not isinstance(reached, Boundary):
            if reached.requires_grad:
                grad = out.live[0][span].to(reached.device)
                release(out.live[0])
                self.meter.transfer("gradients", grad.nbytes, 0)
                yield reached, grad
            return
        for port, rows in left_by(reached, segment).items():
            if port in out.live and rows.requires_grad:
                yield rows, self._grads(out.live[port], span)
        if out.total is not None:
            assert isinstance(reached.request.op, Total)
            grad = torch.zeros_like(reached.request.rows["x"])
            grad[: self._num_own(span)] = out.total
            yield reached.request.rows["x"], grad
        named = {**reached.request.shared, **reached.shared}
        for name, grad in out.shared.items() if last else ():
            yield named[name], grad

    def _rows(self, table: BoundaryRows | None, span: slice) -> tuple[Own, Tensor | None]:
        """What goes on with a range of rows behind a boundary whose result is known, and the result."""
        if table is None:
            return {}, None
        device = self.group.device
        own = {port: read(table.arrays[port], span, device) for port in sorted(set(table.segment.rows.values()))}
        return own, table.total if table.result is None else read(table.result, span, device)

    def _num_own(self, span: slice) -> int:
        """How many of a range of rows belong to vertices that this rank results for: a total counts them once."""
        num_own: int = min(span.stop, self.home.num_own) - span.start
        return max(0, num_own)

    def _grads(self, rows: Rows, span: slice) -> Tensor:
        grad = read(rows, span, self.group.device)
        self.meter.transfer("gradients", grad.nbytes, 0)
        return grad

    def _count(self, own: Own, result: Tensor | None) -> None:
        """Notes what `_rows` has brought."""
        rows = (*own.values(), *(() if result is None or result.dim() < 2 else (result,)))
        self.meter.transfer("rows", sum(one.nbytes for one in rows), 0)


def leaf(value: Tensor, differentiable: bool) -> Tensor:
    """The same numbers, from which a gradient can begin; with a version of their own, since others' rows are beside."""
    return value.data.requires_grad_(differentiable)


def numbered(items: Iterator[Item]) -> Iterator[tuple[int, Item]]:
    """Each item with its number, from 1. `enumerate` would hold an item until the next one is made."""
    with suppress(StopIteration):
        for number in count(1):
            yield number, next(items)
