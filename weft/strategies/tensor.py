"""Tensor parallelism (NeutronTP, sections 3 and 4.1): rows for the network's maps, columns for the graph's products.

Every rank holds the whole topology, answers for N / P rows, and aggregates F / P columns of all rows.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from weft.comm import Layout, cols_to_rows, column_layout, even_bounds, rows_to_cols, sum_over_ranks
from weft.core.savings import ALL_SAVINGS, Savings
from weft.cost import Operation, Trace, all_reduce
from weft.kernels import keyed_dropout
from weft.nn import GraphOperation, GraphView, Product, UnitCost
from weft.strategies.base import GraphShape, Strategy, dtype_of


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
        self._mask = (0, 0.0)

    def attend(self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1) -> Tensor:
        home, num_heads, width = self.home, logit_src.shape[1], h.shape[1]
        layout = attention_layout(home.bounds, width, num_heads)
        (start, stop), (first, last), _ = layout.columns[home.group.rank]
        packed = rows_to_cols(torch.cat([h, logit_src, logit_dst], 1), layout, home.group)
        heads = last - first
        h_Nf, logit_src, logit_dst = (part.contiguous() for part in packed.split([stop - start, heads, heads], 1))
        ends = (width // num_heads * head for head in range(first - width, last - width + 1))
        bounds = [min(max(end, start), stop) - start for end in ends]
        y_Nf = self._attention(h_Nf, logit_src, logit_dst, bounds, slope, steps)
        return cols_to_rows(y_Nf, column_layout(home.bounds, width), home.group)

    def total(self, x: Tensor) -> Tensor:
        return sum_over_ranks(x.sum(0), self.home.group, tag="statistics")

    def _propagate(self, x: Tensor, product: Product) -> Tensor:
        home = self.home
        layout = column_layout(home.bounds, x.shape[1])
        x_Nf = rows_to_cols(x, layout, home.group) if self.origin(x) == "rows" else self._input_columns(x)
        return cols_to_rows(self._product(x_Nf, product), layout, home.group)

    def _input_columns(self, x: Tensor) -> Tensor:
        """The columns of the features, under the dropout that made x of them, without a byte on the network."""
        if self.origin(x) == "inputs":
            return self.home.columns
        key, p = self._mask
        return keyed_dropout(
            self.home.columns, self.topology.ids, key=key, p=p, first_column=self.home.column_range.start
        )

    def _drop(self, x: Tensor, key: int, p: float, relu: bool) -> Tensor:
        if self.origin(x) == "inputs":
            self._mask = key, p
        rows = self.home.rows
        return keyed_dropout(x, self.topology.ids[rows.start : rows.stop], key=key, p=p, relu=relu)


class TensorParallel(Strategy):
    """One program on P ranks, exact: the ranks' loads differ by at most one row and one column."""

    view_type = TensorView

    def place(self) -> range:
        group = self.group
        self.bounds = even_bounds(self.graph.num_vertices, group.size)
        columns = even_bounds(self.graph.num_features, group.size)
        self.column_range = range(columns[group.rank], columns[group.rank + 1])
        return range(self.bounds[group.rank], self.bounds[group.rank + 1])

    @cached_property
    def columns(self) -> Tensor:
        """This rank's columns [N, f] of the features; read from the graph only if a model aggregates them."""
        assert self.graph.x is not None
        held = self.graph.x[:, self.column_range.start : self.column_range.stop]
        return held.to(self.group.device, self.dtype).contiguous()

    def view(self, view_key: int) -> GraphView:
        return TensorView(self, view_key)

    @classmethod
    def trace(
        cls,
        model: nn.Module,
        shape: GraphShape,
        *,
        rank: int,
        size: int,
        training: bool,
        savings: Savings = ALL_SAVINGS,
    ) -> Trace:
        itemsize = dtype_of(model).itemsize
        forward: list[Operation] = []
        backward: list[Operation] = []
        for operation in cls.operations(model, shape, training, savings):
            made = _operations(operation, shape, rank, size, itemsize)
            forward += made
            if operation.backward:
                backward = [_mirror(step) for step in reversed(made)] + backward
        if training and size > 1:
            numbers = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            backward.append(all_reduce("gradients", numbers, itemsize, size))
        return Trace(operations=(*forward, *backward))


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


def _operations(operation: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int) -> list[Operation]:
    """What one graph operation does forward on a rank: split, product, gather, by section 3.2's formulas."""
    if operation.kind == "total":
        return [all_reduce("statistics", operation.width, itemsize, size)] if size > 1 else []
    rows, columns = even_bounds(shape.num_vertices, size), even_bounds(operation.width, size)
    n, f = rows[rank + 1] - rows[rank], columns[rank + 1] - columns[rank]
    product = Operation(kind="aggregate", edges=shape.num_edges * f * operation.steps)
    if size == 1:
        return [product]
    others = shape.num_vertices - n
    sent, received = n * (operation.width - f) * itemsize, others * f * itemsize
    gather = Operation(kind="collective", tag="gather", bytes_sent=received, bytes_received=sent)
    if operation.origin != "rows":
        return [product, gather]
    if operation.kind == "attend":
        heads = [_num_heads_held(operation, start, stop) for start, stop in pairwise(columns)]
        sent += 2 * n * (sum(heads) - heads[rank]) * itemsize
        received += 2 * others * heads[rank] * itemsize
    split = Operation(kind="collective", tag="split", bytes_sent=sent, bytes_received=received)
    return [split, product, gather]


def _num_heads_held(operation: GraphOperation, start: int, stop: int) -> int:
    head_width = operation.width // operation.heads
    return len({column // head_width for column in range(start, stop)})


def _mirror(operation: Operation) -> Operation:
    """The adjoint: a split where there was a gather, the transposed product, the same sum."""
    tag = {"split": "gather", "gather": "split"}.get(operation.tag, operation.tag)
    return Operation(
        kind=operation.kind,
        tag=tag,
        edges=operation.edges,
        bytes_sent=operation.bytes_received,
        bytes_received=operation.bytes_sent,
    )
