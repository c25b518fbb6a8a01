"""Tensor parallelism (NeutronTP, sections 3 and 4): rows for the network's maps, columns for the graph's products.

Every rank holds the whole topology, answers for N / P rows, and aggregates F / P columns of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.chunks.bounds import cut_to_fit
from weft.chunks.columns import ChunkedGraph, Chunking
from weft.comm import (
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
from weft.core.savings import ALL_SAVINGS, Savings
from weft.cost import Operation, all_reduce
from weft.data import Graph
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
from weft.strategies.base import ANYWHERE, GraphShape, Placement, Strategy, dtype_of
from weft.strategies.tensor.attention import AttentionPlan


class TensorView(GraphView):
    """Split, product on this rank's columns of all rows, gather. The features' columns are here from the start."""

    unit_cost = UnitCost(inputs=1, dropped=1, rows=4)
    sparse_first = False  # a kept aggregate crosses the network once, mapped rows every epoch
    no_block = (
        "strategy tensor cannot run a layer that asks for whole source rows (view.block), because a rank holds only "
        "some columns of every row: use --strategy single"
    )

    def __init__(self, home: TensorParallel, view_key: int) -> None:
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


class TensorParallel(Strategy):
    """One program on P ranks, exact: the ranks' loads differ by at most one row and one column."""

    view_type = TensorView

    def place(self) -> slice | Tensor:
        group, placement, num_vertices = self.group, self.placement, self.graph.num_vertices
        self.bounds = even_bounds(num_vertices, group.size)
        self.topology.target_parts = self.bounds, group.rank
        columns = even_bounds(self.graph.num_features, group.size)
        self.column_range = range(columns[group.rank], columns[group.rank + 1])
        self.check_fits(self.graph, self.model, size=group.size, placement=placement, savings=self.savings)
        chunking = make_chunking(self.graph, placement, self.savings)
        self.chunked: ChunkedGraph | None = None
        if chunking is None:
            return slice(self.bounds[group.rank], self.bounds[group.rank + 1])
        device = torch.device(placement.device) if placement.device else group.device
        self.chunked = ChunkedGraph(self.topology, chunking, group, device)
        if group.size == 1:
            return slice(0, num_vertices)
        return torch.arange(group.rank, num_vertices, group.size)

    def needs(self, op: Aggregate, width: int) -> WorkingSet:
        """What an aggregate of a chunk has on the device of the rank that holds the most columns."""
        return op.working_set(
            self.topology.adjacency,
            width,
            itemsize=self.dtype.itemsize,
            size=self.group.size,
            num_edge_features=self.graph.num_edge_features,
        )

    @cached_property
    def columns(self) -> Tensor:
        """This rank's columns [N, f] of the features; read from the graph only if a model aggregates them."""
        assert self.graph.x is not None
        held = self.graph.x[:, self.column_range.start : self.column_range.stop]
        return held.to(self.group.device, self.dtype).contiguous()

    def view(self, stage: int, view_key: int) -> GraphView:
        del stage
        return TensorView(self, view_key)

    def facts(self) -> dict[str, Any]:
        group = self.group
        shape = self.shape(self.graph, self.model, rank=group.rank, size=group.size, savings=self.savings)
        shape = shape._replace(chunking=self.chunked.chunking if self.chunked else None)
        asked = self.operations(self.model, shape, False, self.savings) if group.size > 1 else []
        plans = [attention_plan(one.op, shape, group.size) for one in asked if isinstance(one.op, EdgeSoftmax)]
        how = [plan.explain(self.dtype.itemsize, shape.num_remote) for plan in plans]
        return {"attention": how} if how else {}

    @classmethod
    def shape(
        cls,
        graph: Graph,
        model: nn.Module,
        *,
        rank: int,
        size: int,
        placement: Placement = ANYWHERE,
        savings: Savings = ALL_SAVINGS,
    ) -> GraphShape:
        """With the chunks, the pairs of each rank, and, for attention, the remote sources of even shares of rows."""
        del rank
        bounds = even_bounds(graph.num_vertices, size)
        chunking = make_chunking(graph, placement, savings)
        shape = GraphShape.of(graph)._replace(
            chunking=chunking,
            pairs=tuple(int(graph.num_relations_in[start:stop].sum()) for start, stop in pairwise(bounds)),
        )
        attends = any(isinstance(asked.op, EdgeSoftmax) for asked in cls.operations(model, shape, True, savings))
        if size == 1 or not attends:
            return shape
        rows = torch.tensor(bounds).diff()
        part = torch.arange(size, dtype=torch.int32).repeat_interleave(rows)
        counts, _ = count_parts(graph.in_edges.indptr, graph.in_edges.indices, part, size)
        return shape._replace(num_remote=int(counts[2].sum()))

    @classmethod
    def check_fits(
        cls,
        graph: Graph,
        model: nn.Module,
        *,
        size: int,
        placement: Placement,
        savings: Savings = ALL_SAVINGS,
    ) -> None:
        limit = placement.device_bytes
        if limit is not None and (least := cls.least_bytes(graph, model, size, savings)) > limit:
            raise InputError(
                f"--device-memory: {limit:,} bytes are too few, since one vertex with its in-edges takes {least:,}: "
                f"give at least {least:,}, or more ranks"
            )

    @classmethod
    def least_bytes(cls, graph: Graph, model: nn.Module, size: int, savings: Savings = ALL_SAVINGS) -> int:
        """What the largest aggregate of a single vertex has on the device of one of `size` ranks."""
        asked, adjacency = cls.operations(model, GraphShape.of(graph), True, savings), graph.in_edges
        features = graph.num_edge_features
        kinds = {(one.op, one.width) for one in asked if isinstance(one.op, Aggregate) and one.is_aggregate}
        sizes: dict[str, int] = {"itemsize": dtype_of(model).itemsize, "size": size}
        needs = {op.working_set(adjacency, width, **sizes, num_edge_features=features) for op, width in kinds}
        return max((cut_to_fit(adjacency, one, 0)[1] for one in needs), default=0)

    @classmethod
    def carry_out(
        cls, asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int
    ) -> list[Operation]:
        """Split, product, gather, by section 3.2's formulas, chunk by chunk."""
        if isinstance(asked.op, Total):
            return [all_reduce("statistics", asked.width, itemsize, size)] if size > 1 else []
        if asked.op == "embed":
            return []
        widths = [stop - start for start, stop in pairwise(even_bounds(asked.width, size))]
        plan = attention_plan(asked.op, shape, size) if isinstance(asked.op, EdgeSoftmax) else None
        packed = [plan.layout(sums=plan.sums).width(one) for one in range(size)] if plan else widths
        again = shape.chunking is not None and shape.chunking.limit is not None and not asked.linear
        made: list[Operation] = []
        for arriving, num_edges, leaving in schedule(asked, shape, rank, size, itemsize):
            if arriving and asked.origin == "rows" and size > 1:
                how = plan.explain(itemsize, shape.num_remote) if plan and not made else ""
                made.append(exchanged("split", arriving, packed, rank, itemsize, how))
            if plan and plan.sums:
                sent, received = (number * itemsize for number in count_shared(plan.held, plan.num_logits, rank))
                apart = Operation(kind="collective", tag="logits", bytes_sent=sent, bytes_received=received)
                made += [apart, apart.mirrored()]
            edges = num_edges * widths[rank] * asked.steps
            made.append(Operation(kind="aggregate", edges=edges, recomputed=again))
            if leaving and size > 1:
                made.append(exchanged("split", leaving, widths, rank, itemsize).mirrored())
        return made


def schedule(
    asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int
) -> list[tuple[RowCounts | None, int, RowCounts | None]]:
    """Chunk by chunk, the rows that are split before it, its edges, and the rows that are gathered after it."""
    chunking = shape.chunking
    if chunking is None:
        rows = even_bounds(shape.num_vertices, size)
        own = rows[rank + 1] - rows[rank]
        leaving = everything = RowCounts(own, shape.num_vertices - own)
        if isinstance(asked.op, ByRelation):
            pairs = shape.pairs or [stop - start for start, stop in pairwise(even_bounds(shape.num_edges, size))]
            leaving = RowCounts(pairs[rank], sum(pairs) - pairs[rank])
        return [(everything, shape.num_edges, leaving)]
    assert isinstance(asked.op, Aggregate)
    edges, features = chunking.adjacency, shape.num_edge_features
    needs = asked.op.working_set(edges, asked.width, itemsize=itemsize, size=size, num_edge_features=features)
    chunks = chunking.chunks(needs)
    relations = chunking.relations(rank, size) if isinstance(asked.op, ByRelation) else None
    crossing = chunking.crossing(chunks, relations, rank, size)
    ends = zip(crossing.arrivals, chunks, crossing.departures, strict=True)
    return [(RowCounts.of(coming), chunk.block.num_edges, RowCounts.of(going)) for coming, chunk, going in ends]


def attention_plan(op: EdgeSoftmax, shape: GraphShape, size: int) -> AttentionPlan:
    """How an attention is dealt out to `size` ranks."""
    may_sum = shape.chunking is None
    return AttentionPlan.of(op, num_vertices=shape.num_vertices, num_edges=shape.num_edges, size=size, may_sum=may_sum)


def make_chunking(graph: Graph, placement: Placement, savings: Savings) -> Chunking | None:
    """The chunks that a person asked for, if any."""
    if placement.device_bytes is None and not placement.chunks:
        return None
    return Chunking(
        graph.in_edges,
        limit=placement.device_bytes,
        count=placement.chunks,
        pipeline=savings.pipeline,
        edge_type=graph.edge_type,
        num_relations=len(graph.relations),
    )


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
