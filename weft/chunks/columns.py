"""Aggregates chunk by chunk, while the rows of other chunks cross the network (NeutronTP, section 4.2, algorithm 1).

Host arrays hold all N rows of this rank's columns; of them, only what one chunk needs is taken to the device. Rank r
answers for the rows r, r + P, ..., so that every chunk's rows are spread evenly over the ranks. A row goes from rows to
columns with the first chunk that reads it, and its gradient back when that chunk, the last one backward, is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from weft.chunks.bounds import Chunk
from weft.chunks.chunking import Chunking, RelationTopology
from weft.chunks.exchange_plan import AssignedRelations, ExchangePlan, Receives, Sends
from weft.comm import ColsToRows, Group, Key, Layout, RowSet, RowsToCols
from weft.data import Adjacency, Transpose
from weft.nn import Aggregate, ByRelation, Rows, SubTopology, Topology, WorkingSet
from weft.store.files import is_mapped, mapped_empty
from weft.store.rows import add_rows

EVERYTHING, NOTHING = slice(None), slice(0)
OFFLOADED_BYTES = 1 << 20  # arrays of chunks that are smaller are left where they are


class Placed(NamedTuple):
    """The chunks of an aggregate, what crosses with them, and how many rows of results there are in all and at home."""

    chunks: tuple[SubTopology, ...]
    exchange_plan: ExchangePlan
    num_results: int
    num_home: int


class ChunkedGraph:
    """A graph whose aggregates are made chunk by chunk on `device`, from rows to rows.

    whole: its topology: with a limit on the host, else on the device. chunking: of its edges.
    """

    def __init__(self, whole: Topology, chunking: Chunking, group: Group, device: torch.device) -> None:
        self.whole, self.chunking, self.group, self.device = whole, chunking, group, device
        self._placed: dict[tuple[WorkingSet, bool], Placed] = {}
        self.num_aggregates = 0

    @property
    def limited(self) -> bool:
        """Whether the device may hold no more than a chunk needs."""
        return self.chunking.limit is not None

    def placed(self, needs: WorkingSet, *, by_relation: bool) -> Placed:
        """The chunks of an aggregate, and what crosses; by_relation: whether its results are relation rows."""
        if (needs, by_relation) not in self._placed:
            group, chunking, home = self.group, self.chunking, self.whole.adjacency.device
            chunks, num_rows = chunking.chunks(needs), self.whole.adjacency.num_targets
            relations = chunking.relations(group.rank, group.size) if by_relation else None
            own = len(range(group.rank, num_rows, group.size))
            self._placed[needs, by_relation] = Placed(
                chunks=tuple(self._place(one, relations) for one in chunks),
                exchange_plan=chunking.exchange_plan(chunks, relations, group.rank, group.size, home),
                num_results=num_rows if relations is None else len(relations.place),
                num_home=own if relations is None else sum(relations.home.counts),
            )
        return self._placed[needs, by_relation]

    def _place(self, chunk: Chunk, relations: AssignedRelations | None) -> SubTopology:
        weight, home, kind = self.whole.adjacency.weight, self.whole.adjacency.device, SubTopology
        block, targets = chunk.block if weight is None else chunk.block.cast(weight.dtype), chunk.targets
        if relations is not None:
            assert self.chunking.edge_type is not None
            types, kind = self.chunking.edge_type[chunk.edges], RelationTopology
            block = relations.rows.in_edges(block, targets, types, self.chunking.num_relations)
            targets = relations.rows.span(targets)
        if self.limited:
            return kind(offloaded(block), offloaded_array(chunk.sources), targets, self.whole, chunk.edges)
        return kind(block.to(home), chunk.sources.to(home), targets, self.whole, chunk.edges)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory for whole columns: of the device, or, where that has a limit, of the host, in a file if need be."""
        if not self.limited:
            return torch.empty(*shape, dtype=dtype, device=self.device)
        if self.device.type == "cpu":
            return mapped_empty(*shape, dtype=dtype)
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """The same, zero: as a new file is, none of whose pages need be written."""
        made = self.empty(*shape, dtype=dtype)
        return made if is_mapped(made) else made.zero_()

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
        shared: Rows | None = None,
    ) -> Tensor:
        """The rows [n, F] of `steps` aggregates of this rank's rows x [n, .], whose columns are assigned by `rows_in`.

        rows_in None: x is this rank's columns [N, f] already, without a gradient. rows_out: columns of the result.
        own, extra: of this rank's columns of x, those that are aggregated, and those that logits of sources and then of
        targets are made of in every step. shared: the aggregate's tensors that all rows share, by name.
        """
        self.num_aggregates += 1
        run = _Run(self, op, needs, rows_in, rows_out, steps, own, extra)
        given = shared or {}
        y: Tensor = _Chunked.apply(x, run, *(given[name] for name in op.shared))  # type: ignore[no-untyped-call]
        return y


class _Chunked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Run, *shared: Tensor) -> Tensor:
        ctx.run = run
        run.shared = dict(zip(run.op.shared, (one.detach().requires_grad_() for one in shared), strict=True))
        return run.forward(x.detach(), differentiable=any(ctx.needs_input_grad))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.run.backward(grad), None, *ctx.run.grads.values()


class _Run:
    """One forward pass of a chunked aggregate, and what it leaves for the backward pass."""

    def __init__(
        self,
        graph: ChunkedGraph,
        op: Aggregate,
        needs: WorkingSet,
        rows_in: Layout | None,
        rows_out: Layout,
        steps: int,
        own: slice,
        extra: slice,
    ) -> None:
        self.graph, self.op, self.needs, self.name = graph, op, needs, f"aggregate {graph.num_aggregates}"
        self.rows_in, self.rows_out, self.steps = rows_in, rows_out, steps
        self.group, self.num_vertices = graph.group, graph.whole.adjacency.num_targets
        self.num_own = len(range(self.group.rank, self.num_vertices, self.group.size))
        self.chunks, self.exchange_plan, self.num_results, self.num_home = graph.placed(
            needs, by_relation=isinstance(op, ByRelation)
        )
        self.width = rows_out.width(self.group.rank)
        self.num_columns = self.width if rows_in is None else rows_in.width(self.group.rank)
        self.own, self.extra_columns = own, extra
        self.num_extra = len(range(self.num_columns)[extra])
        self.in_flight = 1 if graph.limited else None
        """How many sets of rows may be on their way at once; each takes memory of the host."""
        self.shared: Rows = {}
        self.grads: dict[str, Tensor | None] = {}
        """Those of what is shared, once `backward` is done."""
        self.inputs: list[Tensor] = []
        """The h of each step, where the backward pass computes a chunk again."""
        self.made: list[tuple[tuple[Tensor, Tensor], Tensor]] = []
        """Rows and result of every step and chunk, where it need not."""

    def forward(self, x: Tensor, *, differentiable: bool) -> Tensor:
        """The rows [n, F] of the result."""
        h, extra = x, x.new_empty(len(x), 0)
        receives = None
        if self.rows_in is not None:
            h, extra = (
                self.graph.empty(self.num_vertices, width, dtype=x.dtype) for width in (self.width, self.num_extra)
            )
            receives = self._receives(x, self.exchange_plan.receives, self.rows_in, "rows")
        sends = self._sends(x, self.num_home, self.rows_out, "rows")
        for step in range(self.steps):
            y = self.graph.empty(self.num_results, self.width, dtype=x.dtype)
            for number, chunk in enumerate(self.chunks):
                if receives and step == 0 and (arrived := receives.take()):
                    ids, values = arrived
                    h[ids], extra[ids] = values[:, self.own], values[:, self.extra_columns]
                y[chunk.targets] = self._compute(chunk, h, extra, differentiable)
                if step == self.steps - 1:
                    sends.send(self.exchange_plan.sends[number], partial(y.index_select, 0))
            if differentiable and self.graph.limited and not self.op.linear:
                self.inputs.append(h)
            h = y
        self.extra = extra
        return sends.finish()

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient [n, .] of the rows, from that of the result."""
        assert self.rows_in is not None
        receives = self._receives(grad, self.exchange_plan.sends[::-1], self.rows_out, "gradients")
        sends = self._sends(grad, self.num_own, self.rows_in, "gradients")
        grad_y = self.graph.empty(self.num_results, self.width, dtype=grad.dtype)
        grad_extra = self.graph.zeros(self.num_vertices, self.num_extra, dtype=grad.dtype)
        self.grads = dict.fromkeys(self.shared)
        for step in reversed(range(self.steps)):
            grad_h = self.graph.zeros(self.num_vertices, self.width, dtype=grad.dtype)
            for number, chunk in reversed(list(enumerate(self.chunks))):
                if step == self.steps - 1 and (arrived := receives.take()):
                    ids, values = arrived
                    grad_y[ids] = values
                added = self._compute_back(chunk, step, grad_y)
                for whole, part in zip((grad_h, grad_extra), added, strict=True):
                    if part is not None:
                        add_rows(whole, chunk.sources, part)
                if step == 0:
                    of_ids = partial(self._side_by_side, grad_h, grad_extra)
                    sends.send(self.exchange_plan.receives[number], of_ids)
            grad_y = grad_h
        return sends.finish()

    def _side_by_side(self, grad_h: Tensor, grad_extra: Tensor, ids: Tensor) -> Tensor:
        """Of some vertices, the gradients of all columns that came, [c, .]."""
        grad = grad_h.new_zeros(len(ids), self.num_columns)
        grad[:, self.own] += grad_h.index_select(0, ids)
        grad[:, self.extra_columns] += grad_extra.index_select(0, ids)
        return grad

    def _compute(self, chunk: SubTopology, h: Tensor, extra: Tensor, differentiable: bool) -> Tensor:
        """A chunk's results [c, f]."""
        inputs = self._load(chunk, h, extra)
        kept = differentiable and not self.graph.limited and not self.op.linear
        y = self._aggregate(chunk, inputs, kept)
        if kept:
            self.made.append((inputs, y))
        return y.detach()

    def _compute_back(self, chunk: SubTopology, step: int, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What a chunk adds to the gradients of its sources' h and extra; those of what is shared are added up."""
        grad = grad_y[chunk.targets].to(self.graph.device)
        if self.op.linear:
            self._note(chunk)
            return self.op.transposed(self._placed(chunk), grad), None
        if self.made:
            inputs, y = self.made.pop()
        else:
            inputs = self._load(chunk, self.inputs[step], self.extra)
            y = self._aggregate(chunk, inputs, True)
        self._note(chunk)
        wanted = (*inputs, *self.shared.values())
        grad_h, grad_extra, *added = torch.autograd.grad(y, wanted, grad, allow_unused=True)
        for name, now in zip(self.shared, added, strict=True):
            before = self.grads[name]
            self.grads[name] = now if before is None else before + now
        return grad_h, grad_extra

    def _aggregate(self, chunk: SubTopology, inputs: tuple[Tensor, Tensor], differentiable: bool) -> Tensor:
        self._note(chunk)
        with torch.set_grad_enabled(differentiable):
            for tensor in inputs:
                tensor.requires_grad_(differentiable)
            shared = {name: one.to(self.graph.device) for name, one in self.shared.items()}
            return self.op.apply(self._placed(chunk), {**self._rows(chunk, *inputs), **shared})

    def _rows(self, chunk: SubTopology, h: Tensor, extra: Tensor) -> Rows:
        """What is aggregated, and what logits are made of, those of sources before those of targets, by name."""
        op, names = self.op, [name for name in self.op.source if name != self.op.first]
        names += op.target
        found = dict(zip(names, extra.tensor_split(len(names), 1), strict=True)) if names else {}
        num_targets = chunk.adjacency.num_targets
        own = {name: found[name][:num_targets] for name in op.target}
        return {op.first: h, **{name: one.contiguous() for name, one in {**found, **own}.items()}}

    def _note(self, chunk: SubTopology) -> None:
        """Counts an aggregate over a chunk, and what it has on the device."""
        meter = self.group.meter
        meter.aggregate(chunk.adjacency.num_edges, self.width)
        if self.graph.limited:
            meter.record_working_set(self.needs.bytes(chunk.adjacency))

    def _placed(self, chunk: SubTopology) -> SubTopology:
        """The chunk on the device; where that has a limit, with nothing that outlives the caller."""
        if not self.graph.limited:
            return chunk
        adjacency = chunk.adjacency.to(self.graph.device)
        return type(chunk)(adjacency, chunk.sources, chunk.targets, chunk.whole, chunk.edges)

    def _load(self, chunk: SubTopology, h: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the chunk's sources, on the device."""
        device = self.graph.device
        return h.index_select(0, chunk.sources).to(device), extra.index_select(0, chunk.sources).to(device)

    def _receives(self, x: Tensor, sets: Sequence[RowSet | None], layout: Layout, what: str) -> Receives:
        def start(number: int, rows: RowSet) -> RowsToCols:
            return RowsToCols(x, rows, layout, self.group, Key(f"{self.name} {what} split", number))

        return Receives(sets, start, ahead=self.in_flight)

    def _sends(self, like: Tensor, num_rows: int, layout: Layout, what: str) -> Sends:
        def start(number: int, rows: RowSet, values: Tensor) -> ColsToRows:
            return ColsToRows(values, rows, layout, self.group, Key(f"{self.name} {what} gather", number))

        return Sends(start, like.new_zeros(num_rows, layout.num_columns), behind=self.in_flight)


def offloaded(adjacency: Adjacency) -> Adjacency:
    """The same edges and their transpose, large arrays in files."""
    weight, edges = adjacency.weight, adjacency.transpose
    return Adjacency(
        indptr=offloaded_array(adjacency.indptr),
        indices=offloaded_array(adjacency.indices),
        num_sources=adjacency.num_sources,
        weight=None if weight is None else offloaded_array(weight),
        known_transpose=Transpose(
            indptr=offloaded_array(edges.indptr),
            indices=offloaded_array(edges.indices),
            edge_ids=offloaded_array(edges.edge_ids),
            weight=None if edges.weight is None else offloaded_array(edges.weight),
        ),
    )


def offloaded_array(array: Tensor) -> Tensor:
    """The same numbers, in a file if they are many."""
    return array if array.nbytes < OFFLOADED_BYTES else mapped_empty(*array.shape, dtype=array.dtype).copy_(array)
