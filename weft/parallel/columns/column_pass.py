"""Aggregates over columns of all rows, chunk by chunk, while rows of other chunks cross the network.

Source: NeutronTP, section 4.2, algorithm 1. A rank runs its rounds on its columns of all N rows, as a single rank
would. Exchanges feed rows to the rounds and take results from them. Rank r owns the rows r, r + P, ..., so the rows of
each chunk are spread evenly over the ranks. A row is turned into columns with the first chunk that reads it. The
backward pass goes from the last chunk to the first, so its gradient is complete, and sent back, when that chunk is
done.
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
from weft.parallel.chunks.run.activations import Activations, Gradients, StoredRows
from weft.parallel.chunks.run.chunk_aggregates import ChunkAggregates, layout_of
from weft.parallel.chunks.run.chunk_runtime import Runtime
from weft.parallel.chunks.run.slots import PlacedRound
from weft.parallel.columns.chunking import Chunking
from weft.parallel.columns.exchange_plan import Receives, Sends
from weft.storage.host_rows import MemoryRows

FULL_SLICE = slice(None)


class ColumnRounds(Runtime):
    """Rounds of an aggregate over all rows, and the rows that cross the network with them.

    The steps of an aggregate share the rounds.

    Args:
        work: The model and the graph.
        whole: Topology of the graph: on the host if there is a limit, else on the device of the aggregates.
        chunking: Divides the aggregate into chunks.
        group: The ranks.
        device: Device of the aggregates.
        op: The aggregate.
        needs: Bytes per target, source and edge of a chunk.
    """

    in_reverse = True

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
        super().__init__(work, group, device, dtype=work.dtype, folder=None, in_memory=in_memory, prefetch=cut.ahead)
        self.chunking, self.num_bytes, size = chunking, cut.num_bytes, group.size
        self.num_rows = self.num_results = whole.adjacency.num_targets
        self.num_own = self.num_local = len(range(group.rank, self.num_rows, size))
        relations, all_rows = None, torch.arange(self.num_rows)
        self.position: Tensor | None = None
        """For results that are relation rows: position of each among the rows of the rank that owns it, int64."""
        self.order: Tensor | None = None
        """Inverse of `position`, for a single rank."""
        if isinstance(op, ByRelation):
            assigned = chunking.relations(group.rank, size)
            relations, self.position, self.order = assigned.rows, assigned.position, assigned.position.argsort()
            self.num_results, self.num_local = len(assigned.position), sum(assigned.local.counts)
        self._rounds = [
            PlacedRound(round_, chunking.hop, all_rows, whole, (layout_of(op),), self.array_file, relations)
            for round_ in cut.schedule.make_rounds()
        ]
        self.exchange_plan = chunking.exchange_plan(op, cut.bounds, group.rank, size, whole.adjacency.device)

    def rounds(self, hop: int, *, back: bool = False) -> Sequence[PlacedRound]:
        del hop
        return self._rounds[::-1] if back else self._rounds

    def transfer(self, tag: str, to_device: int, to_host: int) -> None:
        if not self.in_memory:  # in memory, nothing is copied
            super().transfer(tag, to_device, to_host)


class ColumnPass:
    """One forward pass of one or more aggregate steps over all rows, with the state for its backward pass.

    Args:
        runtime: Rounds of the aggregate.
        op: The aggregate on this rank's columns.
        columns: For each tensor of the aggregate, its range of this rank's columns of the input, by name.
        rows_in: Assignment of the input's columns to ranks; None: the input is this rank's columns [N, f] already and
            needs no gradient.
        rows_out: Assignment of the result's columns to ranks.
        steps: Number of aggregate steps.
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
            live=tuple(LiveRows(len(range(self.num_columns)[column_range]), True) for column_range in self.columns),
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
        self.activations = Activations(segment=segment, op=op)
        self.alone = self.group.size == 1
        """True for a single rank, whose rows are its columns: nothing crosses the network."""

    def run(self, x: Tensor, shared: Tensors) -> Tensor:
        """Return the rows [n, F] of the result, with autograd.

        Args:
            x: Rows [n, .], or this rank's columns [N, f].
            shared: Tensors of the aggregate that all rows share, by name.
        """
        shared_tensors = [shared[name].to(self.runtime.device) for name in self.op.shared]
        records = torch.is_grad_enabled()  # always false in `forward`
        y: Tensor = _Chunked.apply(x, self, records, *shared_tensors)  # type: ignore[no-untyped-call]
        return y

    def forward(self, x: Tensor, *, differentiable: bool) -> Tensor:
        """Return the rows [n, F] of the result.

        Args:
            x: Rows [n, .], or this rank's columns [N, f].
            differentiable: A backward pass follows.
        """
        runtime, activations = self.runtime, self.activations
        self.group.meter.record_working_set(runtime.num_bytes)
        arrays, receives = self._arrays(x), None
        activations.arrays = dict(enumerate(arrays))
        if self.rows_in is not None and not self.alone:
            receives = self._receives(x, self.plan.receives, self.rows_in, "rows")
        sends = None if self.alone else self._sends(x, runtime.num_local, self.rows_out, "rows")
        for step in range(self.steps):
            y, last = runtime.pool.alloc(runtime.num_results, self.width), step == self.steps - 1
            if differentiable and runtime.chunking.saves_results(self.op, self.steps):
                activations.result = y
            leaving = iter(self.plan.sends)
            for round_, loaded, result in self._results(step, receives if step == 0 else None):
                if activations.result is None:
                    runtime.write(y, round_.results, result)
                del loaded, result  # before its rows leave and the next round runs
                if last and sends:
                    sends.send(next(leaving), partial(y.tensor().index_select, 0))
            if not last:
                if self.op.linear:
                    self._free(*activations.intermediates[-1:])
                activations.intermediates.append(y)
        rows = sends.finish() if sends else y.read(0, runtime.num_results)
        if self.alone and runtime.order is not None:
            rows = rows[runtime.order]
        if activations.result is None:
            self._free(y)
        if self.op.linear:
            self._free(*arrays, *activations.intermediates[-1:])  # the backward pass needs only their widths
        elif not differentiable:
            self._free(*arrays, *activations.intermediates)
        return rows

    def backward(self, grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient [n, .] of the input and those of the shared tensors by name, given that of the result."""
        runtime, activations = self.runtime, self.activations
        receives = sends = None
        if self.alone:
            of_result: StoredRows = MemoryRows.of(
                grad.contiguous() if runtime.position is None else grad[runtime.position]
            )
        else:
            assert self.rows_in is not None
            receives = self._receives(grad, self.plan.sends[::-1], self.rows_out, "gradients")
            sends = self._sends(grad, runtime.num_own, self.rows_in, "gradients")
            of_result = runtime.pool.alloc(runtime.num_results, self.width)
        source_grads = [runtime.zeros(runtime.num_rows, rows.width) for rows in activations.segment.live]
        grads = Gradients(live=dict(enumerate(source_grads)))
        for step in reversed(range(self.steps)):
            last, into = step == self.steps - 1, runtime.zeros(runtime.num_rows, self.width) if step else None
            saved, on_cpu = activations.result is not None, runtime.device.type == "cpu"
            back = AggregateStep.backward(activations.segment, step, saved=saved, retained=False, on_cpu=on_cpu)
            rounds = ChunkAggregates(runtime, activations, 0).backward(back, grads, into=into)
            leaving = reversed(self.plan.receives)
            for round_, loaded, backward in rounds:
                if last and receives:
                    self._arrive(receives, [of_result], [FULL_SLICE])
                backward.back(runtime.read_grads(of_result, round_.results))
                del loaded, backward  # with what was recomputed for it
                if step == 0 and sends:
                    sends.send(next(leaving), partial(self._side_by_side, source_grads))
            if not (last and self.alone):
                self._free(of_result)
            of_result = into or of_result
        rows = sends.finish() if sends else self._side_by_side(source_grads, FULL_SLICE)
        self._free(*source_grads)
        if not self.op.linear:
            self._free(
                *activations.arrays.values(),
                *activations.intermediates,
                *activations.saved,
                *((activations.result,) if activations.result else ()),
            )
        return rows, grads.shared

    def _results(self, step: int, receives: Receives | None) -> Iterator[tuple[PlacedRound, Any, Tensor]]:
        """Yield the rounds of a step with their results.

        Args:
            step: Number of the step.
            receives: Rows that arrive with the rounds; None: all rows are available.
        """
        aggregates = ChunkAggregates(self.runtime, self.activations, 0)
        aggregate_step = AggregateStep.forward(self.activations.segment, step)
        if receives is None:
            return aggregates.results(aggregate_step)
        arrive = partial(self._arrive, receives, [*self.activations.arrays.values()], self.columns)
        last_arrival = max((number for number, rows in enumerate(self.plan.receives) if rows is not None), default=-1)
        return aggregates.results(aggregate_step, ready=lambda number: number > last_arrival, arrive=arrive)

    def _arrays(self, x: Tensor) -> list[StoredRows]:
        """Return each matrix that the aggregate reads; rows that have yet to arrive are uninitialized."""
        runtime, is_complete = self.runtime, self.alone or self.rows_in is None
        if is_complete and runtime.in_memory:
            return [MemoryRows.of(x[:, column_range].contiguous()) for column_range in self.columns]
        arrays = [runtime.pool.alloc(runtime.num_rows, port.width) for port in self.activations.segment.live]
        for rows, column_range in zip(arrays, self.columns, strict=True) if is_complete else ():
            rows.write(0, x[:, column_range].contiguous())
        return arrays

    def _arrive(self, receives: Receives, arrays: Sequence[StoredRows], columns: Sequence[slice]) -> None:
        """Store the next set of rows that arrives, if a set is due.

        Args:
            receives: Sets of rows on their way.
            arrays: Destination of the rows, one array for each port.
            columns: Range of the arriving columns that each array takes.
        """
        if arrived := receives.receive():
            ids, values = arrived
            for rows, column_range in zip(arrays, columns, strict=True):
                rows.tensor()[ids] = values[:, column_range]

    def _side_by_side(self, grads: Sequence[StoredRows], ids: Tensor | slice) -> Tensor:
        """Return the gradients of all columns of given vertices, [c, .]."""
        if self.alone and len(grads) == 1:
            return grads[0].read(0, self.runtime.num_rows)
        parts = [rows.tensor()[ids] for rows in grads]
        joined = parts[0].new_zeros(len(parts[0]), self.num_columns)
        for part, column_range in zip(parts, self.columns, strict=True):
            joined[:, column_range] += part
        return joined

    def _free(self, *rows: StoredRows) -> None:
        """Free rows: on the host for reuse; in memory at once, unless the caller's tensors share them."""
        if not self.runtime.in_memory:
            self.runtime.pool.free(*rows)
            return
        for array in rows:
            array.close()

    @property
    def _in_flight(self) -> int | None:
        """Number of row sets that may be on their way at once, because each takes host memory; None: any number."""
        return None if self.runtime.in_memory else 1

    def _receives(self, x: Tensor, sets: Sequence[RowSet | None], layout: ColumnLayout, content: str) -> Receives:
        def start(number: int, rows: RowSet) -> RowsToCols:
            return RowsToCols(x, rows, layout, self.group, Key(f"{self.name} {content} split", number))

        return Receives(sets, start, ahead=self._in_flight)

    def _sends(self, like: Tensor, num_rows: int, layout: ColumnLayout, content: str) -> Sends:
        def start(number: int, rows: RowSet, values: Tensor) -> ColsToRows:
            return ColsToRows(values, rows, layout, self.group, Key(f"{self.name} {content} gather", number))

        return Sends(start, like.new_zeros(num_rows, layout.num_columns), max_pending=self._in_flight)


class _Chunked(Function):
    """Autograd function of a `ColumnPass`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: ColumnPass, records: bool, *shared: Tensor) -> Tensor:
        ctx.run = run
        run.activations.shared = {name: tensor.detach() for name, tensor in zip(run.op.shared, shared, strict=True)}
        return run.forward(x.detach(), differentiable=records and any(ctx.needs_input_grad))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, shared = ctx.run.backward(grad)
        return rows, None, None, *(shared.get(name) for name in ctx.run.op.shared)
