"""Aggregates over columns of all rows, while the rows of other chunks cross the network (NeutronTP, 4.2, algorithm 1).

A rank has its columns of all N rows where rounds read them: it is alone, and the network is a feed before its rounds
and a drain behind them. Rank r answers for the rows r, r + P, ..., so that every chunk's rows are spread evenly over
the ranks. A row goes from rows to columns with the first chunk that reads it, and its gradient back when that chunk,
the last one backward, is done: the backward pass goes through the chunks from the last to the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from weft.chunks.aggregates import ChunkAggregates, layout_of
from weft.chunks.chunking import Chunking
from weft.chunks.exchange_plan import Receives, Sends
from weft.chunks.home import Home
from weft.chunks.program import LiveRows, Segment
from weft.chunks.slots import PlacedRound
from weft.chunks.tables import BoundaryRows, Grads, Rows, read
from weft.comm import ColsToRows, Group, Key, Layout, RowSet, RowsToCols
from weft.core.meter import Meter
from weft.data import Adjacency
from weft.nn import Aggregate, ByRelation, Request, Topology, WorkingSet, Workload
from weft.nn import Rows as Tensors
from weft.nn.phases import Boundary
from weft.store.rows import MemoryRows

EVERYTHING, NOTHING = slice(None), slice(0)


class ChunkedGraph:
    """A graph whose aggregates are made chunk by chunk on `device`, from rows to rows.

    whole: its topology: with a limit on the host, else on the device. chunking: of its edges.
    """

    def __init__(self, work: Workload, whole: Topology, chunking: Chunking, group: Group, device: torch.device) -> None:
        self.work, self.whole, self.chunking, self.group, self.device = work, whole, chunking, group, device
        self._rounds: dict[tuple[str, bool, WorkingSet], ColumnRounds] = {}
        self.num_aggregates = 0

    def rounds(self, op: Aggregate, needs: WorkingSet) -> ColumnRounds:
        """The rounds of an aggregate."""
        key = layout_of(op), op.linear, needs
        if key not in self._rounds:
            self._rounds[key] = ColumnRounds(self, op, needs)
        return self._rounds[key]

    def aggregate(
        self,
        x: Tensor,
        op: Aggregate,
        needs: WorkingSet,
        rows_in: Layout | None,
        rows_out: Layout,
        *,
        steps: int = 1,
        own: slice = EVERYTHING,
        extra: slice = NOTHING,
        shared: Tensors | None = None,
    ) -> Tensor:
        """The rows [n, F] of `steps` aggregates of this rank's rows x [n, .], whose columns are assigned by `rows_in`.

        rows_in None: x is this rank's columns [N, f] already, without a gradient. rows_out: columns of the result.
        own, extra: of this rank's columns of x, those that are aggregated, and those that logits of sources and then of
        targets are made of in every step. shared: the aggregate's tensors that all rows share, by name.
        """
        self.num_aggregates += 1
        given = shared or {}
        run = ColumnPass(
            self.rounds(op, needs), op, f"aggregate {self.num_aggregates}", rows_in, rows_out, steps, own, extra
        )
        y: Tensor = _Chunked.apply(x, run, *(given[name] for name in op.shared))  # type: ignore[no-untyped-call]
        return y


class ColumnRounds(Home):
    """The rounds of an aggregate over all rows, those of any step, and what crosses with them.

    What moves between host and device under a limit is not in a trace, and so is counted apart.
    """

    def __init__(self, graph: ChunkedGraph, op: Aggregate, needs: WorkingSet) -> None:
        chunking, whole, group = graph.chunking, graph.whole, graph.group
        cut, in_memory = chunking.cut(op, needs), chunking.limit is None
        super().__init__(
            graph.work,
            group,
            graph.device,
            folder=None,
            in_memory=in_memory,
            prefetch=cut.ahead,
            transfers=Meter(),
        )
        self.chunking, self.num_bytes = chunking, cut.num_bytes
        self.num_rows = self.num_results = whole.adjacency.num_targets
        self.num_own = self.num_home = len(range(group.rank, self.num_rows, group.size))
        relations, every, self._place = None, torch.arange(self.num_rows), None
        if isinstance(op, ByRelation):
            assigned = chunking.relations(group.rank, group.size)
            relations, self.num_results, self.num_home = assigned.rows, len(assigned.place), sum(assigned.home.counts)
            self._place = assigned.place
        placed = partial(PlacedRound, relations=relations)
        self._rounds = [
            placed(one, chunking.hop, every, whole, (layout_of(op),), self.array_file) for one in cut.schedule.rounds
        ]
        self.exchange_plan = chunking.exchange_plan(op, cut.bounds, group.rank, group.size, whole.adjacency.device)

    def rounds(self, hop: int) -> Sequence[PlacedRound]:
        del hop
        return self._rounds

    def rounds_back(self, hop: int) -> Sequence[PlacedRound]:
        del hop
        return self._rounds_back

    @cached_property
    def _rounds_back(self) -> list[PlacedRound]:
        return [one.mirrored for one in reversed(self._rounds)]

    def by_home(self, results: Tensor) -> Tensor:
        """All results in the order of the rank's own rows, where it is alone."""
        return results if self._place is None else results[self._place.argsort()]

    def by_result(self, rows: Tensor) -> Tensor:
        """Its adjoint."""
        return rows if self._place is None else rows[self._place]

    def zeros(self, width: int) -> Rows:
        """Rows of all vertices, zero."""
        rows = self.pool.alloc(self.num_rows, width)
        rows.clear()
        return rows


class _Chunked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: ColumnPass, *shared: Tensor) -> Tensor:
        ctx.run, ctx.shared_devices = run, [one.device for one in shared]
        named = zip(run.op.shared, shared, strict=True)
        run.table.shared = {name: one.detach().to(run.home.device) for name, one in named}
        return run.forward(x.detach(), differentiable=any(ctx.needs_input_grad))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, shared = ctx.run.backward(grad)
        named = zip(ctx.run.op.shared, ctx.shared_devices, strict=True)
        return rows, None, *(None if (one := shared.get(name)) is None else one.to(device) for name, device in named)


class ColumnPass:
    """One forward pass of an aggregate over columns, and what it leaves for the backward pass."""

    def __init__(
        self,
        home: ColumnRounds,
        op: Aggregate,
        name: str,
        rows_in: Layout | None,
        rows_out: Layout,
        steps: int,
        own: slice,
        extra: slice,
    ) -> None:
        self.home, self.op, self.name, self.group, self.plan = home, op, name, home.group, home.exchange_plan
        self.rows_in, self.rows_out, self.steps, self.own, self.extra = rows_in, rows_out, steps, own, extra
        self.width = rows_out.width(self.group.rank)
        self.num_columns = self.width if rows_in is None else rows_in.width(self.group.rank)
        beside = [name for name in op.source if name != op.first]
        num_beside = len((*beside, *op.target))
        widths = [self.width, *[len(range(self.num_columns)[extra]) // max(num_beside, 1)] * num_beside]
        ports = {name: port for port, name in enumerate((op.first, *beside, *op.target))}
        segment = Segment(
            boundary=Boundary(request=Request(op, {}), steps=steps),
            calls=(),
            live=tuple(LiveRows(width, differentiable=True) for width in widths),
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
        self.table = BoundaryRows(segment=segment, arrays=[], op=op)
        self.alone = self.group.size == 1
        """Whether nothing crosses the network, since this rank's rows are its columns."""
        self.in_flight = None if home.in_memory else 1
        """How many sets of rows may be on their way at once; each takes memory of the host."""

    def forward(self, x: Tensor, *, differentiable: bool) -> Tensor:
        """The rows [n, F] of the result."""
        home, table = self.home, self.table
        self.group.meter.record_working_set(home.num_bytes)
        table.arrays, receives = self._arrays(x), None
        if self.rows_in is not None and not self.alone:
            receives = self._receives(x, self.plan.receives, self.rows_in, "rows")
        sends = None if self.alone else self._sends(x, home.num_home, self.rows_out, "rows")
        for step in range(self.steps):
            y, last = home.pool.alloc(home.num_results, self.width), step == self.steps - 1
            if differentiable and home.chunking.keeps(self.op, self.steps):
                table.result, table.kept = y, self._alloc_kept()
            for number, (round_, _, result) in enumerate(self._results(step, receives if step == 0 else None)):
                if table.result is None:
                    y.write(round_.results.start, result)
                if last and sends:
                    sends.send(self.plan.sends[number], partial(y.tensor().index_select, 0))
            if not last:
                if step and self.op.linear:
                    self._free(table.between.pop())
                table.between.append(y)
        rows = sends.finish() if sends else home.by_home(y.read(0, home.num_results))
        self._free(*(() if table.result else (y,)))
        if self.op.linear or not differentiable:
            self._free(*table.arrays, *table.between)  # of which the backward pass asks for the widths alone
        return rows

    def backward(self, grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient [n, .] of the rows, and those of what is shared, from that of the result."""
        home, table = self.home, self.table
        receives = sends = None
        if self.alone:
            of_result: Rows = MemoryRows.of(home.by_result(grad.contiguous()))
        else:
            assert self.rows_in is not None
            receives = self._receives(grad, self.plan.sends[::-1], self.rows_out, "gradients")
            sends = self._sends(grad, home.num_own, self.rows_in, "gradients")
            of_result = home.pool.alloc(home.num_results, self.width)
        grads = Grads(live={port: home.zeros(rows.width) for port, rows in enumerate(table.segment.live)})
        found = list(grads.live.values())
        for step in reversed(range(self.steps)):
            last, into = step == self.steps - 1, home.zeros(self.width) if step else None
            rounds = ChunkAggregates(home, table, 0).again(step, grads, last=last, into=into)
            for number, (round_, _, again) in enumerate(rounds, start=1):
                if last and receives:
                    self._arrive(receives, [of_result], [EVERYTHING])
                again.back(read(of_result, round_.results, home.device))
                if step == 0 and sends:
                    sends.send(self.plan.receives[-number], partial(self._side_by_side, found))
            if not (last and self.alone):
                self._free(of_result)
            of_result = into or of_result
        rows = sends.finish() if sends else self._side_by_side(found, EVERYTHING)
        self._free(*found)
        if not self.op.linear:
            self._free(*table.arrays, *table.between, *table.kept)
        return rows, grads.shared

    def _results(self, step: int, receives: Receives | None) -> Iterator[tuple[PlacedRound, Any, Tensor]]:
        """A step's rounds; receives: the rows that arrive with them."""
        aggregates = ChunkAggregates(self.home, self.table, 0)
        if receives is None:
            return aggregates.results(step, last=False)
        arrive = partial(self._arrive, receives, self.table.arrays, self._columns())
        waits = [rows is not None for rows in self.plan.receives]
        return aggregates.results(step, last=False, ready=lambda number: not waits[number], arrive=arrive)

    def _columns(self) -> list[slice]:
        """By port, which of this rank's columns of x are its rows'."""
        first, _, _ = self.extra.indices(self.num_columns)
        widths = [port.width for port in self.table.segment.live[1:]]
        return [self.own, *(slice(first + i * width, first + (i + 1) * width) for i, width in enumerate(widths))]

    def _arrays(self, x: Tensor) -> list[Rows]:
        """Where the rows are that are read, by port: filled if they are all here, else as they arrive."""
        home, all_here = self.home, self.alone or self.rows_in is None
        if all_here and home.in_memory:
            return [MemoryRows.of(x[:, some].contiguous()) for some in self._columns()]
        arrays = [home.pool.alloc(home.num_rows, port.width) for port in self.table.segment.live]
        for rows, some in zip(arrays, self._columns() if all_here else (), strict=False):
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
            return grads[0].read(0, self.home.num_rows)
        parts = [rows.tensor()[ids] for rows in grads]
        found = parts[0].new_zeros(len(parts[0]), self.num_columns)
        for part, some in zip(parts, self._columns(), strict=True):
            found[:, some] += part
        return found

    def _free(self, *rows: Rows) -> None:
        """Gives back rows on the host; those in memory may be the caller's, too."""
        if not self.home.in_memory:
            self.home.pool.free(*rows)

    def _alloc_kept(self) -> tuple[Rows, ...]:
        """Rows for what is kept of results, which is seen at that of a vertex without edges."""
        device, dtype, segment = self.home.device, self.home.dtype, self.table.segment
        alone = Adjacency(
            indptr=torch.zeros(2, dtype=torch.int64, device=device),
            indices=torch.empty(0, dtype=torch.int32, device=device),
            num_sources=1,
        )
        named = {**segment.sources, **segment.targets}
        rows = {
            name: torch.zeros(1, segment.live[port].width, dtype=dtype, device=device) for name, port in named.items()
        }
        kept = self.op.apply_saving(Topology(alone), rows)[1]
        return tuple(self.home.pool.alloc(self.home.num_results, one.shape[1]) for one in kept)

    def _receives(self, x: Tensor, sets: Sequence[RowSet | None], layout: Layout, what: str) -> Receives:
        def start(number: int, rows: RowSet) -> RowsToCols:
            return RowsToCols(x, rows, layout, self.group, Key(f"{self.name} {what} split", number))

        return Receives(sets, start, ahead=self.in_flight)

    def _sends(self, like: Tensor, num_rows: int, layout: Layout, what: str) -> Sends:
        def start(number: int, rows: RowSet, values: Tensor) -> ColsToRows:
            return ColsToRows(values, rows, layout, self.group, Key(f"{self.name} {what} gather", number))

        return Sends(start, like.new_zeros(num_rows, layout.num_columns), behind=self.in_flight)
