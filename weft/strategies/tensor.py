"""Tensor parallelism (NeutronTP, sections 3 and 4.1): rows for the network's maps, columns for the graph's products.

Every rank holds the whole topology, answers for N / P rows, and aggregates F / P columns of all rows.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import (
    cols_to_rows,
    column_layout,
    count_shared,
    even_bounds,
    rows_to_cols,
    sum_over_ranks,
    sum_shared,
)
from weft.core.native import count_parts
from weft.core.savings import ALL_SAVINGS, Savings
from weft.cost import Operation, all_reduce
from weft.data import Graph
from weft.nn import GraphOperation, GraphView, Product, UnitCost
from weft.strategies.attention import AttentionPlan
from weft.strategies.base import ANYWHERE, GraphShape, Placement, Strategy


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

    def attend(self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1) -> Tensor:
        plan = self._plan(h, logit_src.shape[1], logit_src.shape[1], left_apart=True)
        h_Nf, logit_src, logit_dst = self._deal(plan, h, logit_src, logit_dst)
        bounds = plan.bounds(self.home.group.rank)
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
        if left is None:
            left_Nc, right_Nc = self._deal(plan, h, right)
            first, last = plan.columns[group.rank]
            h_Nf = left_Nc[:, first - start : last - start]
        else:
            h_Nf, left_Nc, right_Nc = self._deal(plan, h, left, right)
        logits = self._pair_logits(
            left_Nc,
            right_Nc,
            attention.reshape(-1)[start:stop],
            None if edge_map is None else edge_map[:, start:stop],
            plan.logit_bounds(group.rank),
            slope,
            self.topology,
        )
        if plan.sums:
            logits = sum_shared(logits, plan.held, group)
        return self._gather(self._attend_edges(h_Nf, logits, plan.bounds(group.rank), steps, self.topology), h.shape[1])

    def total(self, x: Tensor) -> Tensor:
        return sum_over_ranks(x.sum(0), self.home.group, tag="statistics")

    def _propagate(self, x: Tensor, product: Product) -> Tensor:
        home = self.home
        layout = column_layout(home.bounds, x.shape[1])
        if self.origin(x) == "rows":
            x_Nf = rows_to_cols(x, layout, home.group)
        else:
            x_Nf = self._constant(x, home.columns, self.topology.ids, home.column_range.start)
        return cols_to_rows(self._product(x_Nf, product, self.topology), layout, home.group)

    def _plan(self, h: Tensor, heads: int, logit_width: int, *, left_apart: bool) -> AttentionPlan:
        return AttentionPlan(
            num_vertices=self.num_vertices,
            num_edges=self.topology.adjacency.num_edges,
            size=self.home.group.size,
            width=h.shape[1],
            heads=heads,
            logit_width=logit_width,
            left_apart=left_apart,
        )

    def _deal(self, plan: AttentionPlan, *parts: Tensor) -> list[Tensor]:
        """Of tensors of rows side by side, this rank's columns of each."""
        layout, group = plan.layout(sums=plan.sums), self.home.group
        widths = [stop - start for start, stop in layout.columns[group.rank]]
        return [part.contiguous() for part in rows_to_cols(torch.cat(parts, 1), layout, group).split(widths, 1)]

    def _gather(self, y_Nf: Tensor, width: int) -> Tensor:
        return cols_to_rows(y_Nf, column_layout(self.home.bounds, width), self.home.group)


class TensorParallel(Strategy):
    """One program on P ranks, exact: the ranks' loads differ by at most one row and one column."""

    view_type = TensorView

    def place(self) -> slice:
        group = self.group
        self.bounds = even_bounds(self.graph.num_vertices, group.size)
        columns = even_bounds(self.graph.num_features, group.size)
        self.column_range = range(columns[group.rank], columns[group.rank + 1])
        return slice(self.bounds[group.rank], self.bounds[group.rank + 1])

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
        trace = self.trace(self.model, shape, rank=group.rank, size=group.size, training=False, savings=self.savings)
        return {"attention": how} if (how := [made.how for made in trace.operations if made.how]) else {}

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
        """With attention, also the remote sources of even shares of the rows, which one pass over the edges counts."""
        del rank, placement
        shape = GraphShape.of(graph)
        attends = any(asked.kind == "attend" for asked in cls.operations(model, shape, True, savings))
        if size == 1 or not attends:
            return shape
        rows = torch.tensor(even_bounds(graph.num_vertices, size)).diff()
        part = torch.arange(size, dtype=torch.int32).repeat_interleave(rows)
        counts, _ = count_parts(graph.in_edges.indptr, graph.in_edges.indices, part, size)
        return shape._replace(num_remote=int(counts[2].sum()))

    @classmethod
    def carry_out(
        cls, asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int
    ) -> list[Operation]:
        """Split, product, gather, by section 3.2's formulas."""
        if asked.kind == "total":
            return [all_reduce("statistics", asked.width, itemsize, size)] if size > 1 else []
        rows, columns = even_bounds(shape.num_vertices, size), even_bounds(asked.width, size)
        n, f = rows[rank + 1] - rows[rank], columns[rank + 1] - columns[rank]
        product = Operation(kind="aggregate", edges=shape.num_edges * f * asked.steps)
        if size == 1:
            return [product]
        sent, received = n * (asked.width - f) * itemsize, (shape.num_vertices - n) * f * itemsize
        gather = Operation(kind="collective", tag="gather", bytes_sent=received, bytes_received=sent)
        if asked.origin != "rows":
            return [product, gather]
        if asked.kind == "attend":
            return [*cls._logits(asked, shape, rank, size, itemsize), product, gather]
        return [Operation(kind="collective", tag="split", bytes_sent=sent, bytes_received=received), product, gather]

    @staticmethod
    def _logits(asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int) -> list[Operation]:
        """The split of an attention, and the sums of logits where ranks share heads."""
        plan = AttentionPlan(
            num_vertices=shape.num_vertices,
            num_edges=shape.num_edges,
            size=size,
            width=asked.width,
            heads=asked.heads,
            logit_width=asked.logit_width,
            left_apart=asked.left_apart,
        )
        layout = plan.layout(sums=plan.sums)
        n, widths = layout.num_rows(rank), [layout.width(other) for other in range(size)]
        split = Operation(
            kind="collective",
            tag="split",
            bytes_sent=n * (sum(widths) - widths[rank]) * itemsize,
            bytes_received=(shape.num_vertices - n) * widths[rank] * itemsize,
            how=plan.explain(itemsize, shape.num_remote),
        )
        if not plan.sums:
            return [split]
        sent, received = (number * itemsize for number in count_shared(plan.held, plan.num_logits, rank))
        apart = Operation(kind="collective", tag="logits", bytes_sent=sent, bytes_received=received)
        return [split, apart, apart.mirrored()]
