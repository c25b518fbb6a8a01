"""Tensor parallelism (NeutronTP, sections 3 and 4.1): rows for the network's maps, columns for the graph's products.

Every rank holds the whole topology, answers for N / P rows, and aggregates F / P columns of all rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from weft.comm import Layout, cols_to_rows, column_layout, even_bounds, rows_to_cols, sum_over_ranks
from weft.core.savings import ALL_SAVINGS, Savings
from weft.cost import Operation, all_reduce
from weft.data import Graph
from weft.nn import GraphOperation, GraphView, Pairs, Product, UnitCost
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
        home, num_heads, width = self.home, logit_src.shape[1], h.shape[1]
        layout = attention_layout(home.bounds, width, num_heads)
        (start, stop), (first, last), _ = layout.columns[home.group.rank]
        packed = rows_to_cols(torch.cat([h, logit_src, logit_dst], 1), layout, home.group)
        heads = last - first
        h_Nf, logit_src, logit_dst = (part.contiguous() for part in packed.split([stop - start, heads, heads], 1))
        ends = (width // num_heads * head for head in range(first - width, last - width + 1))
        bounds = [min(max(end, start), stop) - start for end in ends]
        y_Nf = self._attention(h_Nf, logit_src, logit_dst, bounds, slope, steps, self.topology)
        return cols_to_rows(y_Nf, column_layout(home.bounds, width), home.group)

    def total(self, x: Tensor) -> Tensor:
        return sum_over_ranks(x.sum(0), self.home.group, tag="statistics")

    def _propagate(self, x: Tensor, product: Product) -> Tensor:
        home = self.home
        layout = column_layout(home.bounds, x.shape[1])
        return cols_to_rows(self._product(self._columns(x, layout), product, self.topology), layout, home.group)

    @property
    def pairs(self) -> Pairs:
        return self.home.pairs

    def _relate(self, x: Tensor) -> Tensor:
        """Back come the rows of the pairs of this rank's vertices, which lie side by side."""
        home, width = self.home, x.shape[1]
        z_Mf = super()._relate(self._columns(x, column_layout(home.bounds, width)))
        return cols_to_rows(z_Mf, column_layout(home.pairs.bounds, width), home.group)

    def _columns(self, x: Tensor, layout: Layout) -> Tensor:
        """This rank's columns of all rows, from its rows; those of features are here."""
        if self.origin(x) == "rows":
            return rows_to_cols(x, layout, self.home.group)
        return self._constant(x, self.home.columns, self.topology.ids, self.home.column_range.start)


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

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs of vertex and relation, by the rank that answers for the vertex."""
        return self.topology.pairs_of(self.bounds, self.group.rank)

    def view(self, stage: int, view_key: int) -> GraphView:
        del stage
        return TensorView(self, view_key)

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
        del model, rank, placement, savings
        bounds = even_bounds(graph.num_vertices, size)
        pairs = (int(graph.num_relations_in[start:stop].sum()) for start, stop in pairwise(bounds))
        return GraphShape.of(graph)._replace(pairs=tuple(pairs))

    @classmethod
    def carry_out(
        cls, asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int
    ) -> list[Operation]:
        """Split, product, gather, by section 3.2's formulas."""
        if asked.kind == "total":
            return [all_reduce("statistics", asked.width, itemsize, size)] if size > 1 else []
        if asked.kind == "embed":
            return []
        rows, columns = even_bounds(shape.num_vertices, size), even_bounds(asked.width, size)
        n, f = rows[rank + 1] - rows[rank], columns[rank + 1] - columns[rank]
        product = Operation(kind="aggregate", edges=shape.num_edges * f * asked.steps)
        if size == 1:
            return [product]
        others = shape.num_vertices - n
        sent, received = n * (asked.width - f) * itemsize, others * f * itemsize
        gather = Operation(kind="collective", tag="gather", bytes_sent=received, bytes_received=sent)
        if asked.kind == "relate":
            pairs = shape.pairs or [stop - start for start, stop in pairwise(even_bounds(shape.num_edges, size))]
            back, away = (number * itemsize for number in (pairs[rank], sum(pairs) - pairs[rank]))
            gather = replace(gather, bytes_sent=away * f, bytes_received=back * (asked.width - f))
        if asked.origin != "rows":
            return [product, gather]
        if asked.kind == "attend":
            heads = [_num_heads_held(asked, start, stop) for start, stop in pairwise(columns)]
            sent += 2 * n * (sum(heads) - heads[rank]) * itemsize
            received += 2 * others * heads[rank] * itemsize
        split = Operation(kind="collective", tag="split", bytes_sent=sent, bytes_received=received)
        return [split, product, gather]


def attention_layout(rows: tuple[int, ...], width: int, num_heads: int) -> Layout:
    """Even columns of h, which may cut a head, and two logits per vertex for each head that a rank holds a part of.

    Columns are those of [h | logit_src | logit_dst]; both ranks that share a head get its logits, and the gradients of
    the two are summed.
    """
    head_width = width // num_heads
    columns = []
    for start, stop in pairwise(even_bounds(width, len(rows) - 1)):
        first = start // head_width
        last = -(-stop // head_width) if stop > start else first
        source, target = width, width + num_heads
        columns.append(((start, stop), (source + first, source + last), (target + first, target + last)))
    return Layout(rows=rows, columns=tuple(columns))


def _num_heads_held(asked: GraphOperation, start: int, stop: int) -> int:
    head_width = asked.width // asked.heads
    return len({column // head_width for column in range(start, stop)})
