"""Aggregates over columns of all rows, while the rows of other chunks cross the network (NeutronTP, 4.2, algorithm 1).

A rank has its columns of all N rows where rounds read them: it is alone, and the network is a feed before its rounds
and a drain behind them. Rank r answers for the rows r, r + P, ..., so that every chunk's rows are spread evenly over
the ranks. A row goes from rows to columns with the first chunk that reads it, and its gradient back when that chunk,
the last one backward, is done: the backward pass goes through the chunks from the last to the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from weft.comm import ColsToRows, ColumnLayout, Group, Key, RowSet, RowsToCols
from weft.nn import Aggregate, ByRelation, Request, Topology, WorkingSet, Workload
from weft.nn import Rows as Tensors
from weft.nn.layers.phases import Boundary
from weft.parallel.chunks.program.chunk_program import LiveRows, Segment
from weft.parallel.chunks.program.stages import AggregateStep
from weft.parallel.chunks.run.activations import BoundaryRows, Grads, Rows
from weft.parallel.chunks.run.chunk_aggregates import ChunkAggregates, layout_of
from weft.parallel.chunks.run.chunk_runtime import Runtime
from weft.parallel.chunks.run.slots import PlacedRound
from weft.parallel.columns.chunking import Chunking
from weft.parallel.columns.exchange_plan import Receives, Sends
from weft.storage.host_rows import MemoryRows

EVERYTHING = slice(None)


class ColumnRounds(Runtime):
    """The rounds of an aggregate over all rows, any step's, and what crosses with them.

    whole: the graph's topology: with a limit on the host, else on the device of the aggregates.
    """

    def __init__(
        self,
        work: Workload,
        whole: Topology,
        chunking: Chunking,
        group: Group,
        device: torch.device,
        op: Aggregate,
        needs: WorkingSet,
    ) -> None:
        cut, in_memory = chunking.cut(op, needs), chunking.limit is None
        super().__init__(work, group, device, folder=None, in_memory=in_memory, prefetch=cut.ahead)
        self.chunking, self.num_bytes, size = chunking, cut.num_bytes, group.size
        self.num_rows = self.num_results = whole.adjacency.num_targets
        self.num_own = self.num_local = len(range(group.rank, self.num_rows, size))
        relations, every = None, torch.arange(self.num_rows)
        self.place: Tensor | None = None
        """Of results that are relation rows, int64, where each stands among the rank's own, if it is one of those."""
        self.order: Tensor | None = None
        """The other way round: of the rank's own ones, which result each is, if it is alone."""
        if isinstance(op, ByRelation):
            assigned = chunking.relations(group.rank, size)
            relations, self.place, self.order = assigned.rows, assigned.place, assigned.place.argsort()
            self.num_results, self.num_local = len(assigned.place), sum(assigned.local.counts)
        self._rounds = [
            PlacedRound(one, chunking.hop, every, whole, (layout_of(op),), self.array_file, relations)
            for one in cut.schedule.rounds
        ]
        self._rounds_back = [one.mirrored for one in reversed(self._rounds)]
        self.exchange_plan = chunking.exchange_plan(op, cut.bounds, group.rank, size, whole.adjacency.device)

    def rounds(self, hop: int, *, back: bool = False) -> Sequence[PlacedRound]:
        del hop
        return self._rounds_back if back else self._rounds

    def transfer(self, tag: str, to_device: int, to_host: int) -> None:
        if not self.in_memory:  # where nothing moves
            super().transfer(tag, to_device, to_host)


class ColumnPass:
    """One forward pass of `steps` aggregates of this rank's rows, and what it leaves for the backward pass.

    rows_in: how the columns of the rows x [n, .] are assigned to ranks; None: x is this rank's columns [N, f] already,
    without a gradient. rows_out: those of the result. columns: which of this rank's columns of x each of the
    aggregate's rows has, by name.
    """

    def __init__(
        self,
        runtime: ColumnRounds,
        op: Aggregate,
        columns: dict[str, slice],
        rows_in: ColumnLayout | None,
        rows_out: ColumnLayout,
        steps: int = 1,
    ) -> None:
        self.runtime, self.op, self.group, self.plan = runtime, op, runtime.group, runtime.exchange_plan
        self.columns, self.rows_in, self.rows_out, self.steps = tuple(columns.values()), rows_in, rows_out, steps
        self.name, self.width = "{} {}".format(*self.group.next_key("aggregate")), rows_out.width(self.group.rank)
        self.num_columns = self.width if rows_in is None else rows_in.width(self.group.rank)
        ports = {name: port for port, name in enumerate(columns)}
        segment = Segment(
            boundary=Boundary(request=Request(op, {}), steps=steps),
            calls=(),
            live=tuple(LiveRows(len(range(self.num_columns)[some]), True) for some in self.columns),
            sources={name: ports[name] for name in op.source},
            targets={name: ports[name] for name in op.target},
            rows={},
            shared=dict.fromkeys(op.shared, True),
            width=self.width,
            differentiable=True,
            constant=False,
            hop=0,
            needs_result=False,
        )
        self.table = BoundaryRows(segment=segment, op=op)
        self.alone = self.group.size == 1
        """Whether nothing crosses the network, since this rank's rows are its columns."""

    def run(self, x: Tensor, shared: Tensors) -> Tensor:
        """The rows [n, F] of the result, with a gradient; shared: the aggregate's tensors that all rows share."""
        given = [shared[name].to(self.runtime.device) for name in self.op.shared]
        y: Tensor = _Chunked.apply(x, self, *given)  # type: ignore[no-untyped-call]
        return y

    def forward(self, x: Tensor, *, differentiable: bool) -> Tensor:
        """The rows [n, F] of the result."""
        runtime, table = self.runtime, self.table
        self.group.meter.record_working_set(runtime.num_bytes)
        arrays, receives = self._arrays(x), None
        table.arrays = dict(enumerate(arrays))
        if self.rows_in is not None and not self.alone:
            receives = self._receives(x, self.plan.receives, self.rows_in, "rows")
        sends = None if self.alone else self._sends(x, runtime.num_local, self.rows_out, "rows")
        for step in range(self.steps):
            y, last = runtime.pool.alloc(runtime.num_results, self.width), step == self.steps - 1
            if differentiable and runtime.chunking.keeps(self.op, self.steps):
                table.result = y
            leaving = iter(self.plan.sends)
            for round_, loaded, result in self._results(step, receives if step == 0 else None):
                if table.result is None:
                    runtime.store(y, round_.results, result)
                del loaded, result  # before its rows leave and the next round is worked on
                if last and sends:
                    sends.send(next(leaving), partial(y.tensor().index_select, 0))
            if not last:
                if self.op.linear:
                    self._free(*table.between[-1:])
                table.between.append(y)
        rows = sends.finish() if sends else y.read(0, runtime.num_results)
        if self.alone and runtime.order is not None:
            rows = rows[runtime.order]
        if table.result is None:
            self._free(y)
        if self.op.linear:
            self._free(*arrays, *table.between[-1:])  # of which the backward pass asks for the widths alone
        elif not differentiable:
            self._free(*arrays, *table.between)
        return rows

    def backward(self, grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient [n, .] of the rows, and those of what is shared, from that of the result."""
        runtime, table = self.runtime, self.table
        receives = sends = None
        if self.alone:
            of_result: Rows = MemoryRows.of(grad.contiguous() if runtime.place is None else grad[runtime.place])
        else:
            assert self.rows_in is not None
            receives = self._receives(grad, self.plan.sends[::-1], self.rows_out, "gradients")
            sends = self._sends(grad, runtime.num_own, self.rows_in, "gradients")
            of_result = runtime.pool.alloc(runtime.num_results, self.width)
        found = [runtime.zeros(runtime.num_rows, rows.width) for rows in table.segment.live]
        grads = Grads(live=dict(enumerate(found)))
        for step in reversed(range(self.steps)):
            last, into = step == self.steps - 1, runtime.zeros(runtime.num_rows, self.width) if step else None
            kept, on_cpu = table.result is not None, runtime.device.type == "cpu"
            back = AggregateStep.backward(table.segment, step, kept=kept, retained=False, on_cpu=on_cpu)
            rounds = ChunkAggregates(runtime, table, 0).backward(back, grads, into=into)
            leaving = reversed(self.plan.receives)
            for round_, loaded, backward in rounds:
                if last and receives:
                    self._arrive(receives, [of_result], [EVERYTHING])
                backward.back(runtime.read_grads(of_result, round_.results))
                del loaded, backward  # and what was made again for it
                if step == 0 and sends:
                    sends.send(next(leaving), partial(self._side_by_side, found))
            if not (last and self.alone):
                self._free(of_result)
            of_result = into or of_result
        rows = sends.finish() if sends else self._side_by_side(found, EVERYTHING)
        self._free(*found)
        if not self.op.linear:
            self._free(*table.arrays.values(), *table.between, *table.kept, *((table.result,) if table.result else ()))
        return rows, grads.shared

    def _results(self, step: int, receives: Receives | None) -> Iterator[tuple[PlacedRound, Any, Tensor]]:
        """A step's rounds; receives: the rows that arrive with them."""
        aggregates, made = ChunkAggregates(self.runtime, self.table, 0), AggregateStep.forward(self.table.segment, step)
        if receives is None:
            return aggregates.results(made)
        arrive = partial(self._arrive, receives, [*self.table.arrays.values()], self.columns)
        due = max((number for number, rows in enumerate(self.plan.receives) if rows is not None), default=-1)
        return aggregates.results(made, ready=lambda number: number > due, arrive=arrive)

    def _arrays(self, x: Tensor) -> list[Rows]:
        """Where the rows are that are read, by port: filled if they are all here, else as they arrive."""
        runtime, all_here = self.runtime, self.alone or self.rows_in is None
        if all_here and runtime.in_memory:
            return [MemoryRows.of(x[:, some].contiguous()) for some in self.columns]
        arrays = [runtime.pool.alloc(runtime.num_rows, port.width) for port in self.table.segment.live]
        for rows, some in zip(arrays, self.columns, strict=True) if all_here else ():
            rows.write(0, x[:, some].contiguous())
        return arrays

    def _arrive(self, receives: Receives, arrays: Sequence[Rows], columns: Sequence[slice]) -> None:
        """Puts the next set of rows, if one is due, in its place: each array has some of the columns that come."""
        if arrived := receives.take():
            ids, values = arrived
            for rows, some in zip(arrays, columns, strict=True):
                rows.tensor()[ids] = values[:, some]

    def _side_by_side(self, grads: Sequence[Rows], ids: Tensor | slice) -> Tensor:
        """Of some vertices, the gradients of all columns that came, [c, .]."""
        if self.alone and len(grads) == 1:
            return grads[0].read(0, self.runtime.num_rows)
        parts = [rows.tensor()[ids] for rows in grads]
        found = parts[0].new_zeros(len(parts[0]), self.num_columns)
        for part, some in zip(parts, self.columns, strict=True):
            found[:, some] += part
        return found

    def _free(self, *rows: Rows) -> None:
        """Gives back rows: on the host to be used again, in memory as far as they are not the caller's, too."""
        if not self.runtime.in_memory:
            self.runtime.pool.free(*rows)
            return
        for one in rows:
            one.close()

    @property
    def _in_flight(self) -> int | None:
        """How many sets of rows may be on their way at once; each takes memory of the host. None: any number."""
        return None if self.runtime.in_memory else 1

    def _receives(self, x: Tensor, sets: Sequence[RowSet | None], layout: ColumnLayout, what: str) -> Receives:
        def start(number: int, rows: RowSet) -> RowsToCols:
            return RowsToCols(x, rows, layout, self.group, Key(f"{self.name} {what} split", number))

        return Receives(sets, start, ahead=self._in_flight)

    def _sends(self, like: Tensor, num_rows: int, layout: ColumnLayout, what: str) -> Sends:
        def start(number: int, rows: RowSet, values: Tensor) -> ColsToRows:
            return ColsToRows(values, rows, layout, self.group, Key(f"{self.name} {what} gather", number))

        return Sends(start, like.new_zeros(num_rows, layout.num_columns), behind=self._in_flight)


class _Chunked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: ColumnPass, *shared: Tensor) -> Tensor:
        ctx.run, run.table.shared = run, {name: one.detach() for name, one in zip(run.op.shared, shared, strict=True)}
        return run.forward(x.detach(), differentiable=any(ctx.needs_input_grad))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, shared = ctx.run.backward(grad)
        return rows, None, *(shared.get(name) for name in ctx.run.op.shared)
