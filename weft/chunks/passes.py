"""One pass of a model over a graph whose rows are on the host, chunk by chunk (HongTu, section 4.3, algorithm 1).

Forward, segment by segment: the rows of a chunk come to the device with the result at the last boundary, the model goes
on with them to the next one, and what that leaves goes to the host. Backward from the last segment to the first: a
segment is run again on what the host has, and the gradients of what it read are added up there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from weft.chunks.aggregates import ChunkAggregates
from weft.chunks.embedded import EmbeddedRows
from weft.chunks.placed import PlacedChunks
from weft.chunks.program import Program, Segment, differentiable, left_by, stepwise
from weft.chunks.tables import BoundaryRows, Grads, Rows, deposit, read, store
from weft.chunks.views import RowsView
from weft.core.random import key
from weft.nn import Inputs, Total
from weft.nn.phases import Boundary, BoundaryState, PhasedModel
from weft.store.files import release

Own = dict[int, Tensor]
"""Rows of a range by their port."""


class Pass:
    """A forward pass of a program on a rank, and the backward pass that may follow."""

    def __init__(self, home: PlacedChunks, program: Program, *, step_key: tuple[int, ...], training: bool) -> None:
        self.home, self.segments = home, program.segments
        self.model, self.group, self.meter = cast(PhasedModel, home.model), home.group, home.group.meter
        self.keys = [key(home.seed, *step_key, stage) for stage in home.stages]
        self.tables: list[BoundaryRows] = []
        self.embedded = EmbeddedRows(home, training=training)

    def forward(self) -> Rows:
        """The logits [n, C] of this rank's rows."""
        with torch.no_grad():
            for number in range(len(self.segments)):
                self.tables.append(self._forward(number))
        return self.tables[-1].arrays[0]

    def backward(self, grad: Tensor) -> None:
        """Leaves the gradients of the parameters, this rank's part of those that all ranks have."""
        out: Grads | None = Grads(live={0: grad})
        for number in reversed(range(len(self.segments))):
            out = self._backward(number, out) if out else None
        self.embedded.backward()

    def end(self, but: Rows | None = None) -> None:
        """Gives back what the pass has on the host, but for some rows."""
        for table in self.tables:
            if table is not self.home.constant:
                given = (*table.arrays, table.result, *table.kept, *table.between)
                self.home.pool.free(*(rows for rows in given if rows is not but))
        self.tables = []

    def _forward(self, number: int) -> BoundaryRows:
        """Segment `number`, chunk by chunk."""
        home, segment = self.home, self.segments[number]
        if segment.constant:
            if home.constant is None:
                with self.meter.during("setup"):
                    home.constant = self._make(number)
                    self._result_once(home.constant)
            return home.constant
        return self._make(number)

    def _make(self, number: int) -> BoundaryRows:
        home, segment = self.home, self.segments[number]
        before, num_rows = self.tables[-1] if number else None, home.num_rows(segment.hop)
        table = BoundaryRows(segment=segment, arrays=[home.pool.alloc(num_rows, port.width) for port in segment.live])
        if before is not None and before.segment.aggregates and not before.segment.constant:
            aggregates = self._aggregates(before)
            self._make_steps(before, aggregates)
            if home.keeps(before.segment):
                before.result = home.pool.alloc(num_rows, before.segment.width)
                before.kept = tuple(home.pool.alloc(num_rows, width) for width in before.segment.kept_widths)
            for round_, loaded, result in aggregates.results(before.segment.steps - 1, last=True):
                self._advance(number, round_.targets, loaded.own, result, table)
                del loaded, result
        else:
            for span, (own, known) in home.ahead(home.spans(num_rows), partial(self._rows, before)):
                self._count(own, known)
                self._advance(number, span, own, known, table)
                del own, known
        if table.total is not None:
            table.total = self.group.all_reduce(table.total, tag="statistics")
            if table.on_result is not None:
                table.on_result(table.total)
        return table

    def _advance(self, number: int, span: slice, own: Own, result: Tensor | None, table: BoundaryRows) -> None:
        """Runs a segment on a range of rows and leaves on the host what it gives."""
        reached = self._resume(number, span, own, result, self.tables[number - 1].shared if number else {})
        if not isinstance(reached, Boundary):
            store(table.arrays[0], span, reached, self.meter)
            return
        for port, rows in left_by(reached, table.segment).items():
            store(table.arrays[port], span, rows, self.meter)
        if table.op is None:  # the same for all ranges
            table.shared = {**reached.request.shared, **reached.shared}
            table.op, table.context, table.on_result = stepwise(reached).request.op, reached.context, reached.on_result
        if isinstance(reached.request.op, Total):
            added = reached.request.rows["x"][: self._num_own(span)].sum(0)
            table.total = added if table.total is None else table.total + added

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

    def _aggregates(self, table: BoundaryRows) -> ChunkAggregates:
        assert table.segment.boundary is not None
        return ChunkAggregates(self.home, table, self.keys[table.segment.boundary.stage])

    def _make_steps(self, table: BoundaryRows, aggregates: ChunkAggregates) -> None:
        """All steps of an aggregate but the last one."""
        home, segment = self.home, table.segment
        for step in range(segment.steps - 1):
            made = home.pool.alloc(home.num_rows(segment.hop + step + 1), segment.width)
            for round_, _, result in aggregates.results(step, last=False):
                store(made, round_.targets, result, self.meter)
            if segment.op.linear and step:
                home.pool.free(table.between.pop())
            table.between.append(made)

    def _result_once(self, table: BoundaryRows) -> None:
        """The result that is made of constants; nothing but that and the rows that go on with it is kept."""
        home, segment, aggregates = self.home, table.segment, self._aggregates(table)
        self._make_steps(table, aggregates)
        table.result = home.pool.alloc(home.num_rows(segment.hop + segment.steps), segment.width)
        for _ in aggregates.results(segment.steps - 1, last=False):
            pass  # they are kept
        home.pool.free(
            *table.between, *(rows for port, rows in enumerate(table.arrays) if port not in segment.rows.values())
        )
        table.between = []

    def _backward(self, number: int, out: Grads) -> Grads | None:
        """Segment `number` and the aggregate before it: from the gradients of what it gave, those of what it read."""
        home, segment = self.home, self.segments[number]
        before = self.tables[number - 1] if number else None
        into, first = Grads(), True
        if before is not None and not before.segment.constant:
            into = Grads(live={port: self._zeros(before, port) for port in differentiable(before.segment)})
        if before is not None and before.segment.aggregates and not before.segment.constant:
            aggregates, step = self._aggregates(before), before.segment.steps - 1
            to = self._step_gradients(before, step)
            for round_, loaded, again in aggregates.again(step, into, last=True, into=to):
                again.back(self._redo(number, round_.targets, loaded.own, again.result, out, into, first=first))
                del loaded, again
                first = False
            self._steps_back(before, aggregates, into, to)
        else:
            for span, (own, result) in home.ahead(home.spans(home.num_rows(segment.hop)), partial(self._rows, before)):
                self._count(own, result)
                into.add_total(self._redo(number, span, own, result, out, into, first=first))
                del own, result
                first = False
            into.total = None if into.total is None else self.group.all_reduce(into.total, tag="statistics")
        home.pool.free(*(rows for rows in out.live.values() if not isinstance(rows, Tensor)))
        return into if into.live or into.shared or into.total is not None else None

    def _zeros(self, table: BoundaryRows, port: int) -> Rows:
        rows = self.home.pool.alloc(table.arrays[port].num_rows, table.segment.live[port].width)
        rows.clear()
        return rows

    def _step_gradients(self, table: BoundaryRows, step: int) -> Rows | None:
        """Where the gradient of what step `step` reads goes, if an earlier one made it."""
        if not step or not table.segment.differentiable:
            return None
        rows = self.home.pool.alloc(self.home.num_rows(table.segment.hop + step), table.segment.width)
        rows.clear()
        return rows

    def _steps_back(self, table: BoundaryRows, aggregates: ChunkAggregates, into: Grads, grads: Rows | None) -> None:
        """The steps of an aggregate before the last one; grads: of what the last one read."""
        for step in reversed(range(table.segment.steps - 1)):
            assert grads is not None
            to = self._step_gradients(table, step)
            for round_, _, again in aggregates.again(step, into, last=False, into=to):
                again.back(self._grads(grads, round_.targets))
            self.home.pool.free(grads)
            grads = to

    def _redo(
        self, number: int, span: slice, own: Own, result: Tensor | None, out: Grads, into: Grads, *, first: bool
    ) -> Tensor | None:
        """Runs a segment on a range of rows again, and back; the gradient of the result.

        first: whether it is the first range, which takes the gradients of what all ranges share.
        """
        before = self.tables[number - 1] if number else None
        shared: dict[str, Tensor] = {}
        if before is not None:
            own = {port: leaf(rows, before.segment.live[port].differentiable) for port, rows in own.items()}
            result = leaf(cast(Tensor, result), before.segment.differentiable)
            named = before.segment.boundary.shared if before.segment.boundary else {}
            shared = {name: leaf(before.shared[name], before.segment.shared[name]) for name in named}
        with torch.enable_grad():
            reached = self._resume(number, span, own, result, shared)
        results = list(self._results(reached, self.segments[number], span, out, first=first))
        if not results:
            return None
        torch.autograd.backward([result for result, _ in results], [grad for _, grad in results])
        self.embedded.collect(span)
        for port, rows in own.items():
            if rows.grad is not None:
                deposit(into.live[port], span, rows.grad, self.meter)
        for name, value in shared.items():
            into.add_shared(name, value.grad)
        return None if result is None else result.grad

    def _results(
        self, reached: Boundary | Tensor, segment: Segment, span: slice, out: Grads, *, first: bool
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
        for name, grad in out.shared.items() if first else ():
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
    """The same numbers, from which a gradient can begin."""
    return value.detach().requires_grad_(differentiable)
