"""Tensor parallelism (NeutronTP, sections 3 and 4): rows for the network's maps, columns for the graph's products.

Every rank holds the whole topology, answers for N / P rows, and aggregates F / P columns of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.chunks.bounds import cut_to_fit
from weft.chunks.columns import ChunkedGraph, Chunking
from weft.comm import (
    Group,
    Layout,
    RowSet,
    cols_to_rows,
    column_layout,
    count_shared,
    even_bounds,
    rows_to_cols,
    sum_over_ranks,
    sum_shared,
)
from weft.core.errors import InputError
from weft.core.native import count_parts
from weft.cost import Operation, all_reduce
from weft.nn import (
    Aggregate,
    ByRelation,
    EdgeSoftmax,
    GraphOperation,
    GraphView,
    OwnRelationRows,
    Rows,
    Total,
    UnitCost,
    WorkingSet,
)
from weft.strategies.base import Options, Placed, Plan
from weft.strategies.tensor.attention import AttentionPlan


class TensorView(GraphView):
    """Split, product on this rank's columns of all rows, gather. The features' columns are here from the start."""

    unit_cost = UnitCost(inputs=1, dropped=1, rows=4)
    sparse_first = False  # a kept aggregate crosses the network once, mapped rows every epoch
    no_block = (
        "strategy tensor cannot run a layer that asks for whole source rows (view.block), because a rank holds only "
        "some columns of every row: use --strategy single"
    )

    def __init__(self, home: PlacedTensor, view_key: int) -> None:
        super().__init__(home.topology, key=view_key, inputs=home.inputs, meter=home.group.meter)
        self.home = home

    @property
    def row_ids(self) -> Tensor:
        return self.topology.ids[self.home.rows]

    def total(self, x: Tensor) -> Tensor:
        return sum_over_ranks(x.sum(0), self.home.group, tag="statistics")

    @property
    def relation_rows(self) -> OwnRelationRows:
        home = self.home
        if home.chunked:
            return home.chunked.chunking.relations(home.group.rank, home.group.size).home
        return self.topology.relation_rows

    def _aggregate(self, op: Aggregate, rows: Rows, steps: int) -> Tensor:
        if isinstance(op, EdgeSoftmax):
            return self._attend(op, rows, steps)
        home, x = self.home, rows[op.first]
        width, split = x.shape[1], self.origin(x) == "rows"
        layout = column_layout(home.bounds, width)
        if home.chunked:
            x, needs = x if split else self._columns(x, layout), home.needs(op, width)
            return home.chunked.aggregate(x, op, needs, layout if split else None, layout, steps=steps)
        y = self._run(op, {op.first: self._columns(x, layout)}, steps, self.topology)
        leaving = column_layout(self.topology.relation_rows.bounds, width) if isinstance(op, ByRelation) else layout
        return cols_to_rows(y, leaving, home.group)

    def _attend(self, op: EdgeSoftmax, rows: Rows, steps: int) -> Tensor:
        home, rank, width = self.home, self.home.group.rank, rows[op.first].shape[1]
        plan = AttentionPlan.of(
            op,
            num_vertices=self.num_vertices,
            num_edges=self.topology.adjacency.num_edges,
            size=home.group.size,
            may_sum=home.chunked is None,
        )
        start, stop = plan.logit_columns(sums=plan.sums)[rank]
        shared = {name: rows[name][..., start:stop] for name in op.shared}
        mine, leaving = plan.share(op, rank), column_layout(home.bounds, width)
        packed = [rows[name] for name in (*op.source, *op.target)]
        if home.chunked:
            own = plan.own_columns(rank)
            return home.chunked.aggregate(
                torch.cat(packed, 1),
                mine,
                home.needs(op, width),
                plan.layout(sums=False),
                leaving,
                steps=steps,
                own=own,
                extra=slice(own.stop if op.beside_width else 0, None),
                shared=shared,
            )
        layout = plan.layout(sums=plan.sums)
        widths = [last - first for first, last in layout.columns[rank]]
        dealt = [part.contiguous() for part in rows_to_cols(torch.cat(packed, 1), layout, home.group).split(widths, 1)]
        if not op.beside_width:
            first, last = plan.columns[rank]
            dealt.insert(0, dealt[0][:, first - start : last - start])
        prepared = mine.prepare(self.topology, dict(zip((*mine.source, *mine.target), dealt, strict=True)) | shared)
        if plan.sums:
            prepared["logits"] = sum_shared(prepared["logits"], plan.held, home.group)
        return cols_to_rows(self._run(mine, prepared, steps, self.topology), leaving, home.group)

    def _columns(self, x: Tensor, layout: Layout) -> Tensor:
        """This rank's columns of all rows, from its rows; those of features are here."""
        if self.origin(x) == "rows":
            return rows_to_cols(x, layout, self.home.group)
        return self._constant(x, self.home.columns, self.topology.ids, self.home.column_range.start)


@dataclass(frozen=True, kw_only=True)
class TensorOptions(Options):
    """What can be said of aggregates chunk by chunk."""

    device_memory: int | None = None
    """Bytes that aggregates may have on the device at once; None: no limit."""
    chunks: int = 0
    """In how many chunks they are made at least; 0: as few as that allows."""
    nn_device: str = "auto"
    """Where rows are mapped: on the device, on the host, or auto, on the host under a limit."""
    device: str = ""
    """The device of the aggregates, if it is another than that of the rows."""


class TensorPlan(Plan):
    """One program on P ranks, exact: the ranks' loads differ by at most one row and one column."""

    name = "tensor"
    options_type = TensorOptions
    savings = ("pipeline",)
    view_type = TensorView
    options: TensorOptions

    @cached_property
    def row_bounds(self) -> tuple[int, ...]:
        """Where each rank's rows begin and end, without chunks."""
        return even_bounds(self.work.stats.num_vertices, self.size)

    @cached_property
    def chunking(self) -> Chunking | None:
        """The chunks that a person asked for, if any."""
        options = self.options
        if options.device_memory is None and not options.chunks:
            return None
        graph = self.work.graph
        return Chunking(
            graph.in_edges,
            limit=options.device_memory,
            count=options.chunks,
            pipeline=self.work.savings.pipeline,
            edge_type=graph.edge_type,
            num_relations=len(graph.relations),
        )

    @cached_property
    def relation_rows(self) -> list[int]:
        """By rank, the pairs of one of its vertices and a relation; evenly shared where the graph is not there."""
        work = self.work
        if not work.has_graph:
            return [stop - start for start, stop in pairwise(even_bounds(work.stats.num_relation_rows, self.size))]
        counts = work.graph.num_relations_in
        return [int(counts[start:stop].sum()) for start, stop in pairwise(self.row_bounds)]

    @cached_property
    def num_remote(self) -> int:
        """Sources that are not among a rank's even share of the rows, of all ranks together; -1: not known."""
        if not self.work.has_graph:
            return -1
        edges = self.work.graph.in_edges
        part = torch.arange(self.size, dtype=torch.int32).repeat_interleave(torch.tensor(self.row_bounds).diff())
        counts, _ = count_parts(edges.indptr, edges.indices, part, self.size)
        return int(counts[2].sum())

    def require(self) -> None:
        limit = self.options.device_memory
        if limit is not None and (least := self.least_bytes()) > limit:
            raise InputError(
                f"--device-memory: {limit:,} bytes are too few, since one vertex with its in-edges takes {least:,}: "
                f"give at least {least:,}, or more ranks"
            )

    def least_bytes(self) -> int:
        """What the largest aggregate of a single vertex has on the device of one of the ranks."""
        work = self.work
        found = {(one.op, one.width) for one in work.outline(self.view_type, training=True) if one.is_aggregate}
        needs = {self.needs(op, width) for op, width in found if isinstance(op, Aggregate)}
        return max((cut_to_fit(work.graph.in_edges, one, 0)[1] for one in needs), default=0)

    def needs(self, op: Aggregate, width: int) -> WorkingSet:
        """What an aggregate of a chunk has on the device of the rank that holds the most columns."""
        work = self.work
        sizes = {"itemsize": work.itemsize, "size": self.size, "num_edge_features": work.stats.num_edge_features}
        return op.working_set(work.graph.in_edges, width, **sizes)

    def attention(self, op: EdgeSoftmax) -> AttentionPlan:
        """How an attention is assigned to the ranks."""
        stats, may_sum = self.work.stats, self.chunking is None
        sizes = {"num_vertices": stats.num_vertices, "num_edges": stats.num_edges, "size": self.size}
        return AttentionPlan.of(op, **sizes, may_sum=may_sum)

    def explain(self, plan: AttentionPlan) -> str:
        """The way that logits take, and what each way would send."""
        return plan.explain(self.work.itemsize, self.num_remote)

    def lower(self, op: GraphOperation, rank: int) -> list[Operation]:
        """Columns, aggregate, rows, by section 3.2's formulas, chunk by chunk."""
        size, itemsize = self.size, self.work.itemsize
        if isinstance(op.op, Total):
            return [all_reduce("statistics", op.width, itemsize, size)] if size > 1 else []
        if op.op == "embed":
            return []
        widths = [stop - start for start, stop in pairwise(even_bounds(op.width, size))]
        plan = self.attention(op.op) if isinstance(op.op, EdgeSoftmax) else None
        packed = [plan.layout(sums=plan.sums).width(one) for one in range(size)] if plan else widths
        again = self.chunking is not None and self.chunking.limit is not None and not op.linear
        made: list[Operation] = []
        for arriving, num_edges, leaving in self.schedule(op, rank):
            if arriving and op.origin == "rows" and size > 1:
                how = self.explain(plan) if plan and not made else ""
                made.append(exchanged("split", arriving, packed, rank, itemsize, how))
            if plan and plan.sums:
                sent, received = (number * itemsize for number in count_shared(plan.held, plan.num_logits, rank))
                apart = Operation(kind="collective", tag="logits", bytes_sent=sent, bytes_received=received)
                made += [apart, apart.mirrored()]
            edges = num_edges * widths[rank] * op.steps
            made.append(Operation(kind="aggregate", edges=edges, recomputed=again))
            if leaving and size > 1:
                made.append(exchanged("split", leaving, widths, rank, itemsize).mirrored())
        return made

    def schedule(self, op: GraphOperation, rank: int) -> list[tuple[RowCounts | None, int, RowCounts | None]]:
        """Chunk by chunk, the rows that are split before it, its edges, and the rows that are gathered after it."""
        chunking, size, stats = self.chunking, self.size, self.work.stats
        if chunking is None:
            own = self.row_bounds[rank + 1] - self.row_bounds[rank]
            leaving = everything = RowCounts(own, stats.num_vertices - own)
            if isinstance(op.op, ByRelation):
                leaving = RowCounts(self.relation_rows[rank], sum(self.relation_rows) - self.relation_rows[rank])
            return [(everything, stats.num_edges, leaving)]
        assert isinstance(op.op, Aggregate)
        chunks = chunking.chunks(self.needs(op.op, op.width))
        relations = chunking.relations(rank, size) if isinstance(op.op, ByRelation) else None
        crossing = chunking.crossing(chunks, relations, rank, size)
        ends = zip(crossing.arrivals, chunks, crossing.departures, strict=True)
        return [(RowCounts.of(coming), chunk.block.num_edges, RowCounts.of(going)) for coming, chunk, going in ends]

    def place(self, group: Group, *, seed: int = 0) -> PlacedTensor:
        self.require()
        rows: slice | Tensor = slice(self.row_bounds[group.rank], self.row_bounds[group.rank + 1])
        if self.chunking is not None:  # every chunk's rows are to be spread evenly over the ranks
            every = torch.arange(group.rank, self.work.stats.num_vertices, group.size)
            rows = every if group.size > 1 else slice(0, self.work.stats.num_vertices)
        return PlacedTensor(self, group, rows, seed=seed)


class PlacedTensor(Placed):
    """The whole topology, N / P rows, and F / P columns of all rows."""

    plan: TensorPlan

    def __init__(self, plan: TensorPlan, group: Group, rows: slice | Tensor, *, seed: int) -> None:
        super().__init__(plan, group, rows, seed=seed)
        columns = even_bounds(self.graph.num_features, group.size)
        self.bounds, self.column_range = plan.row_bounds, range(columns[group.rank], columns[group.rank + 1])
        self.topology.target_parts = self.bounds, group.rank
        self.chunked: ChunkedGraph | None = None
        if plan.chunking is not None:
            device = torch.device(plan.options.device) if plan.options.device else group.device
            self.chunked = ChunkedGraph(self.topology, plan.chunking, group, device)

    def needs(self, op: Aggregate, width: int) -> WorkingSet:
        """What an aggregate of a chunk has on the device."""
        return self.plan.needs(op, width)

    @cached_property
    def columns(self) -> Tensor:
        """This rank's columns [N, f] of the features; read from the graph only if a model aggregates them."""
        assert self.graph.x is not None
        held = self.graph.x[:, self.column_range.start : self.column_range.stop]
        return held.to(self.group.device, self.work.dtype).contiguous()

    def view(self, stage: int, view_key: int) -> GraphView:
        del stage
        return TensorView(self, view_key)

    def describe(self) -> dict[str, Any]:
        plan = self.plan
        ops = self.work.outline(plan.view_type, training=False) if self.group.size > 1 else ()
        how = [plan.explain(plan.attention(one.op)) for one in ops if isinstance(one.op, EdgeSoftmax)]
        return {"attention": how} if how else {}


class RowCounts(NamedTuple):
    """How many rows of a set a rank answers for, and how many the others."""

    own: int
    others: int

    @classmethod
    def of(cls, rows: RowSet | None) -> RowCounts | None:
        """Those of a set."""
        return None if rows is None else cls(len(rows.own), len(rows.ids) - len(rows.own))


def exchanged(tag: str, rows: RowCounts, widths: Sequence[int], rank: int, itemsize: int, how: str = "") -> Operation:
    """A split of so many rows into `widths` columns of each rank; its mirror is the gather."""
    sent, received = rows.own * (sum(widths) - widths[rank]), rows.others * widths[rank]
    return Operation(
        kind="collective", tag=tag, bytes_sent=sent * itemsize, bytes_received=received * itemsize, how=how
    )
