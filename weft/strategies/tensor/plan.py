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

from weft.chunks.bounds import WorkingSet, cut_to_fit
from weft.chunks.columns import ChunkedGraph, Chunking
from weft.chunks.work import Attend, AttendPairs, MeanByPair, Multiply, Work, working_set
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
from weft.data import Adjacency
from weft.nn import GraphOperation, GraphView, PairMaps, Pairs, Product, UnitCost, logits_of_pairs
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

    def attend(self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1) -> Tensor:
        plan = self._plan(h, logit_src.shape[1], logit_src.shape[1], left_apart=True)
        bounds = plan.bounds(self.home.group.rank)
        if self.home.chunked:
            return self._by_chunks(plan, Attend(tuple(bounds), slope), (h, logit_src, logit_dst), steps)
        h_Nf, logit_src, logit_dst = self._deal(plan, h, logit_src, logit_dst)
        y_Nf = self._attention(h_Nf, logit_src, logit_dst, bounds, slope, steps, self.topology)
        return self._gather(y_Nf, h.shape[1])

    def attend_pairs(
        self,
        h: Tensor,
        left: Tensor | None,
        right: Tensor,
        attention: Tensor,
        *,
        edge_map: Tensor | None = None,
        slope: float,
        steps: int = 1,
    ) -> Tensor:
        group = self.home.group
        plan = self._plan(h, len(attention), right.shape[1], left_apart=left is not None)
        start, stop = plan.logit_columns(sums=plan.sums)[group.rank]
        bounds, logit_bounds = plan.bounds(group.rank), plan.logit_bounds(group.rank)
        vector, edge_map = attention.reshape(-1)[start:stop], None if edge_map is None else edge_map[:, start:stop]
        parts = (h, right) if left is None else (h, left, right)
        if self.home.chunked:
            work = AttendPairs(tuple(bounds), tuple(logit_bounds), slope)
            return self._by_chunks(plan, work, parts, steps, vector, edge_map)
        if left is None:
            left_Nc, right_Nc = self._deal(plan, *parts)
            first, last = plan.columns[group.rank]
            h_Nf = left_Nc[:, first - start : last - start]
        else:
            h_Nf, left_Nc, right_Nc = self._deal(plan, *parts)
        logits = logits_of_pairs(self.topology, left_Nc, right_Nc, vector, edge_map, logit_bounds, slope)
        if plan.sums:
            logits = sum_shared(logits, plan.held, group)
        return self._gather(self._attend_edges(h_Nf, logits, bounds, steps, self.topology), h.shape[1])

    def total(self, x: Tensor) -> Tensor:
        return sum_over_ranks(x.sum(0), self.home.group, tag="statistics")

    def _propagate(self, x: Tensor, product: Product) -> Tensor:
        home, width = self.home, x.shape[1]
        layout = column_layout(home.bounds, width)
        if home.chunked:
            kind = ProductKind(width, weighted=product.weighted, maximum=product.reduce == "max")
            return self._chunked(x, Multiply(product._replace(steps=1)), kind, layout, product.steps)
        return cols_to_rows(self._product(self._columns(x, layout), product, self.topology), layout, home.group)

    @property
    def pairs(self) -> PairMaps:
        home = self.home
        return home.chunked.chunking.pairs(home.group.rank, home.group.size).home if home.chunked else home.pairs

    def _relate(self, x: Tensor) -> Tensor:
        """Back come the rows of the pairs of this rank's vertices."""
        home, width = self.home, x.shape[1]
        layout = column_layout(home.bounds, width)
        if home.chunked:
            return self._chunked(x, MeanByPair(), ProductKind(width, relates=True), layout)
        z_Mf = self._mean_by_pair(self._columns(x, layout), home.pairs)
        return cols_to_rows(z_Mf, column_layout(home.pairs.bounds, width), home.group)

    def _chunked(self, x: Tensor, work: Work, kind: ProductKind, layout: Layout, steps: int = 1) -> Tensor:
        """A product chunk by chunk, of rows, or of features, whose columns are here."""
        home, split = self.home, self.origin(x) == "rows"
        assert home.chunked
        x = x if split else self._columns(x, layout)
        return home.chunked.product(x, work, home.needs(kind), layout if split else None, layout, steps=steps)

    def _columns(self, x: Tensor, layout: Layout) -> Tensor:
        """This rank's columns of all rows, from its rows; those of features are here."""
        if self.origin(x) == "rows":
            return rows_to_cols(x, layout, self.home.group)
        return self._constant(x, self.home.columns, self.topology.ids, self.home.column_range.start)

    def _plan(self, h: Tensor, heads: int, logit_width: int, *, left_apart: bool) -> AttentionPlan:
        return AttentionPlan(
            num_vertices=self.num_vertices,
            num_edges=self.topology.adjacency.num_edges,
            size=self.home.group.size,
            width=h.shape[1],
            heads=heads,
            logit_width=logit_width,
            left_apart=left_apart,
            may_sum=self.home.chunked is None,
        )

    def _by_chunks(
        self, plan: AttentionPlan, work: Work, parts: tuple[Tensor, ...], steps: int, *parameters: Tensor | None
    ) -> Tensor:
        """An attention chunk by chunk: of rows side by side, h first."""
        home, own = self.home, plan.own_columns(self.home.group.rank)
        assert home.chunked
        kind = ProductKind(
            plan.width, plan.heads, plan.logit_width, left_apart=plan.left_apart, by_edge=bool(parameters)
        )
        return home.chunked.product(
            torch.cat(parts, 1),
            work,
            home.needs(kind),
            plan.layout(sums=False),
            column_layout(home.bounds, plan.width),
            steps=steps,
            own=own,
            extra=slice(own.stop if plan.left_apart else 0, None),
            parameters=parameters,
        )

    def _deal(self, plan: AttentionPlan, *parts: Tensor) -> list[Tensor]:
        """Of tensors of rows side by side, this rank's columns of each."""
        layout, group = plan.layout(sums=plan.sums), self.home.group
        widths = [stop - start for start, stop in layout.columns[group.rank]]
        return [part.contiguous() for part in rows_to_cols(torch.cat(parts, 1), layout, group).split(widths, 1)]

    def _gather(self, y_Nf: Tensor, width: int) -> Tensor:
        return cols_to_rows(y_Nf, column_layout(self.home.bounds, width), self.home.group)


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
        ops = [op for op in work.outline(self.view_type, training=True) if op.is_product]
        needs = {self.needs(ProductKind.of(op)) for op in ops}
        return max((cut_to_fit(work.graph.in_edges, one, 0)[1] for one in needs), default=0)

    def needs(self, kind: ProductKind) -> WorkingSet:
        """What an aggregate of a chunk has on the device."""
        work = self.work
        return needs_of(kind, work.graph.in_edges, self.size, work.itemsize, work.stats.num_edge_features)

    def attention(self, op: GraphOperation) -> AttentionPlan:
        """How an attention is assigned to the ranks."""
        return AttentionPlan(
            num_vertices=self.work.stats.num_vertices,
            num_edges=self.work.stats.num_edges,
            size=self.size,
            width=op.width,
            heads=op.heads,
            logit_width=op.logit_width,
            left_apart=op.left_apart,
            may_sum=self.chunking is None,
        )

    def explain(self, plan: AttentionPlan) -> str:
        """The way that logits take, and what each way would send."""
        return plan.explain(self.work.itemsize, self.num_remote)

    def lower(self, op: GraphOperation, rank: int) -> list[Operation]:
        """Columns, aggregate, rows, by section 3.2's formulas, chunk by chunk."""
        size, itemsize = self.size, self.work.itemsize
        if op.kind == "total":
            return [all_reduce("statistics", op.width, itemsize, size)] if size > 1 else []
        if op.kind == "embed":
            return []
        widths = [stop - start for start, stop in pairwise(even_bounds(op.width, size))]
        plan = self.attention(op) if op.kind == "attend" else None
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
            if op.kind == "relate":
                leaving = RowCounts(self.relation_rows[rank], sum(self.relation_rows) - self.relation_rows[rank])
            return [(everything, stats.num_edges, leaving)]
        needs = self.needs(ProductKind.of(op))
        chunks = chunking.chunks(needs)
        crossing = chunking.crossing(chunks, chunking.pairs(rank, size) if needs.relates else None, rank, size)
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
        self.chunked: ChunkedGraph | None = None
        if plan.chunking is not None:
            device = torch.device(plan.options.device) if plan.options.device else group.device
            self.chunked = ChunkedGraph(self.topology, plan.chunking, group, device)

    def needs(self, kind: ProductKind) -> WorkingSet:
        """What an aggregate of a chunk has on the device."""
        return self.plan.needs(kind)

    @cached_property
    def columns(self) -> Tensor:
        """This rank's columns [N, f] of the features; read from the graph only if a model aggregates them."""
        assert self.graph.x is not None
        held = self.graph.x[:, self.column_range.start : self.column_range.stop]
        return held.to(self.group.device, self.work.dtype).contiguous()

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs of vertex and relation, by the rank that answers for the vertex."""
        return self.topology.pairs_of(self.bounds, self.group.rank)

    def view(self, stage: int, view_key: int) -> GraphView:
        del stage
        return TensorView(self, view_key)

    def describe(self) -> dict[str, Any]:
        plan = self.plan
        ops = self.work.outline(plan.view_type, training=False) if self.group.size > 1 else ()
        how = [plan.explain(plan.attention(op)) for op in ops if op.kind == "attend"]
        return {"attention": how} if how else {}


class ProductKind(NamedTuple):
    """What of a product decides how much memory it takes."""

    width: int
    heads: int = 0
    logit_width: int = 0
    left_apart: bool = False
    by_edge: bool = False
    weighted: bool = False
    maximum: bool = False
    relates: bool = False

    @classmethod
    def of(cls, asked: GraphOperation) -> ProductKind:
        """That of a product that a model asks for."""
        return cls(
            asked.width,
            asked.heads,
            asked.logit_width,
            asked.left_apart,
            asked.by_edge,
            asked.weighted,
            asked.reduce == "max",
            asked.kind == "relate",
        )


def needs_of(kind: ProductKind, adjacency: Adjacency, size: int, itemsize: int, num_edge_features: int) -> WorkingSet:
    """What a product of a chunk has on the device of the rank that holds the most columns."""
    share, heads, logit_width = -(-kind.width // size), 0, 0
    if kind.heads:
        heads = min(kind.heads, (share - 1) // (kind.width // kind.heads) + 2)  # it may begin and end within heads
        logit_width = kind.logit_width // kind.heads * heads
    return working_set(
        adjacency,
        width=share,
        heads=heads,
        logit_width=logit_width,
        num_edge_features=num_edge_features if kind.by_edge else 0,
        by_edge=kind.by_edge,
        itemsize=itemsize,
        weighted=kind.weighted and adjacency.weight is not None,
        maximum=kind.maximum,
        relates=kind.relates,
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
