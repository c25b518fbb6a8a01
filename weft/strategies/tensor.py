"""Tensor parallelism (NeutronTP, sections 3 and 4.1): rows for the network's maps, columns for the graph's products.

Every rank holds the whole topology, answers for N / P rows, and aggregates F / P columns of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.comm import Layout, RowSet, cols_to_rows, column_layout, even_bounds, rows_to_cols, sum_over_ranks
from weft.core.errors import InputError
from weft.core.savings import ALL_SAVINGS, Savings
from weft.cost import Operation, all_reduce
from weft.data import Adjacency, Graph
from weft.nn import GraphOperation, GraphView, Product, UnitCost
from weft.partition import WorkingSet, cut_to_fit
from weft.strategies.base import ANYWHERE, GraphShape, Placement, Strategy, dtype_of
from weft.strategies.chunks import Attend, ChunkedGraph, Chunking, Crossing, Multiply, working_set


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
        ends = (width // num_heads * head for head in range(first - width, last - width + 1))
        bounds = [min(max(end, start), stop) - start for end in ends]
        rows_out = column_layout(home.bounds, width)
        if home.chunked:
            needs = home.needs(width, num_heads)
            packed = torch.cat([h, logit_src, logit_dst], 1)
            work = Attend(tuple(bounds), slope)
            return home.chunked.product(packed, work, needs, rows_in=layout, rows_out=rows_out, steps=steps)
        packed = rows_to_cols(torch.cat([h, logit_src, logit_dst], 1), layout, home.group)
        heads = last - first
        h_Nf, logit_src, logit_dst = (part.contiguous() for part in packed.split([stop - start, heads, heads], 1))
        y_Nf = self._attention(h_Nf, logit_src, logit_dst, bounds, slope, steps, self.topology)
        return cols_to_rows(y_Nf, rows_out, home.group)

    def total(self, x: Tensor) -> Tensor:
        return sum_over_ranks(x.sum(0), self.home.group, tag="statistics")

    def _propagate(self, x: Tensor, product: Product) -> Tensor:
        home, width = self.home, x.shape[1]
        layout = column_layout(home.bounds, width)
        split = self.origin(x) == "rows"
        if not split:
            x = self._constant(x, home.columns, self.topology.ids, home.column_range.start)
        if home.chunked:
            needs = home.needs(width, weighted=product.weighted, maximum=product.reduce == "max")
            work, rows_in = Multiply(product._replace(steps=1)), layout if split else None
            return home.chunked.product(x, work, needs, rows_in=rows_in, rows_out=layout, steps=product.steps)
        x_Nf = rows_to_cols(x, layout, home.group) if split else x
        return cols_to_rows(self._product(x_Nf, product, self.topology), layout, home.group)


class TensorParallel(Strategy):
    """One program on P ranks, exact: the ranks' loads differ by at most one row and one column."""

    view_type = TensorView

    def place(self) -> slice | Tensor:
        group, placement, num_vertices = self.group, self.placement, self.graph.num_vertices
        self.bounds = even_bounds(num_vertices, group.size)
        columns = even_bounds(self.graph.num_features, group.size)
        self.column_range = range(columns[group.rank], columns[group.rank + 1])
        self.check_fits(self.graph, self.model, size=group.size, placement=placement, savings=self.savings)
        chunking = make_chunking(self.topology.adjacency, placement, self.savings)
        self.chunked: ChunkedGraph | None = None
        if chunking is None:
            return slice(self.bounds[group.rank], self.bounds[group.rank + 1])
        device = torch.device(placement.device) if placement.device else group.device
        self.chunked = ChunkedGraph(self.topology, chunking, group, device)
        if group.size == 1:
            return slice(0, num_vertices)
        return torch.arange(group.rank, num_vertices, group.size)

    def needs(self, width: int, heads: int = 0, *, weighted: bool = False, maximum: bool = False) -> WorkingSet:
        """What a product of a chunk has on the device."""
        return needs_of(self.topology.adjacency, self.group.size, self.dtype.itemsize, width, heads, weighted, maximum)

    @cached_property
    def columns(self) -> Tensor:
        """This rank's columns [N, f] of the features; read from the graph only if a model aggregates them."""
        assert self.graph.x is not None
        held = self.graph.x[:, self.column_range.start : self.column_range.stop]
        return held.to(self.group.device, self.dtype).contiguous()

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
        """How the graph is cut into chunks, too."""
        whole = super().shape(graph, model, rank=rank, size=size)
        return whole._replace(chunking=make_chunking(graph.in_edges, placement, savings))

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
        """What the largest product of a single vertex has on the device of one of `size` ranks."""
        asked, adjacency = cls.operations(model, GraphShape.of(graph), True, savings), graph.in_edges
        itemsize = dtype_of(model).itemsize
        needs = {needs_of(adjacency, size, itemsize, *kind_of(one)) for one in asked if one.is_product}
        return max((cut_to_fit(adjacency, one, 0)[1] for one in needs), default=0)

    @classmethod
    def carry_out(
        cls, asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int
    ) -> list[Operation]:
        """Split, product, gather, by section 3.2's formulas."""
        if asked.kind == "total":
            return [all_reduce("statistics", asked.width, itemsize, size)] if size > 1 else []
        columns = even_bounds(asked.width, size)
        widths = [stop - start for start, stop in pairwise(columns)]
        heads = held_heads(asked.width, asked.heads, size)
        packed = [width + 2 * held for width, held in zip(widths, heads, strict=True)]
        made = []
        for arriving, num_edges, leaving in cls.schedule(asked, shape, rank, size, itemsize):
            if arriving and asked.origin == "rows" and size > 1:
                made.append(_exchange("split", arriving, packed, rank, itemsize))
            again = shape.chunking is not None and shape.chunking.limit is not None and not asked.linear
            edges = num_edges * widths[rank] * asked.steps
            made.append(Operation(kind="aggregate", edges=edges, recomputed=again))
            if leaving and size > 1:
                made.append(_exchange("split", leaving, widths, rank, itemsize).mirrored())
        return made

    @staticmethod
    def schedule(
        asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int
    ) -> list[tuple[RowCounts | None, int, RowCounts | None]]:
        """Chunk by chunk, the rows that are split before it, its edges, and the rows that are gathered after it."""
        if shape.chunking is None:
            rows = even_bounds(shape.num_vertices, size)
            own = rows[rank + 1] - rows[rank]
            everything = RowCounts(own, shape.num_vertices - own)
            return [(everything, shape.num_edges, everything)]
        chunking = shape.chunking
        chunks = chunking.chunks(needs_of(chunking.adjacency, size, itemsize, *kind_of(asked)))
        crossing = Crossing.of(chunks, rank, size, pipeline=chunking.pipeline)
        edges = [chunk.block.num_edges for chunk in chunks]
        counts = (map(RowCounts.of, rows) for rows in (crossing.arrivals, crossing.departures))
        return list(zip(next(counts), edges, next(counts), strict=True))


def make_chunking(adjacency: Adjacency, placement: Placement, savings: Savings) -> Chunking | None:
    """The chunks that a person asked for, if any."""
    if placement.device_bytes is None and not placement.chunks:
        return None
    return Chunking(adjacency, limit=placement.device_bytes, count=placement.chunks, pipeline=savings.pipeline)


def needs_of(
    adjacency: Adjacency, size: int, itemsize: int, width: int, heads: int, weighted: bool, maximum: bool
) -> WorkingSet:
    """What a product of a chunk has on the device of the rank that holds the most columns."""
    return working_set(
        adjacency,
        width=-(-width // size),
        heads=max(held_heads(width, heads, size)),
        itemsize=itemsize,
        weighted=weighted and adjacency.weight is not None,
        maximum=maximum,
    )


def kind_of(asked: GraphOperation) -> tuple[int, int, bool, bool]:
    """Of a product, what `needs_of` asks for last."""
    return asked.width, asked.heads, asked.weighted, asked.reduce == "max"


class RowCounts(NamedTuple):
    """How many rows of a set a rank answers for, and how many the others."""

    own: int
    others: int

    @classmethod
    def of(cls, rows: RowSet | None) -> RowCounts | None:
        """Those of a set."""
        return None if rows is None else cls(len(rows.own), len(rows.ids) - len(rows.own))


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


def _exchange(tag: str, rows: RowCounts, widths: Sequence[int], rank: int, itemsize: int) -> Operation:
    """A split of so many rows into `widths` columns of each rank; its mirror is the gather."""
    sent, received = rows.own * (sum(widths) - widths[rank]), rows.others * widths[rank]
    return Operation(kind="collective", tag=tag, bytes_sent=sent * itemsize, bytes_received=received * itemsize)


def held_heads(width: int, num_heads: int, size: int) -> list[int]:
    """Of how many heads each rank holds a column of `width`."""
    if not num_heads:
        return [0] * size
    head_width = width // num_heads
    return [
        len({column // head_width for column in range(start, stop)})
        for start, stop in pairwise(even_bounds(width, size))
    ]
