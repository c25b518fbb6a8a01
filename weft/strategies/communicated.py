"""Communicated dependencies (NeutronStar, section 2.2, algorithm 3): rows that a rank lacks are fetched at every layer.

Every rank answers for a range of vertices and aggregates over their in-edges. The features are constant, so those of
the halo are here from the start.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from weft.comm import Route, fetch_halo, sum_over_ranks
from weft.cost import Operation, all_reduce
from weft.data import Graph
from weft.kernels import Scale
from weft.nn import GraphOperation, GraphView, Product, Topology, UnitCost, even_heads
from weft.partition import make_halo, range_bounds
from weft.strategies.base import GraphShape, HaloShape, Strategy


class Block(Topology):
    """A rank's in-edges, with scalings by the degrees that vertices have in the whole graph."""

    def __init__(self, whole: Topology, rows: range, home: Communicated) -> None:
        block = home.halo.block.cast(home.dtype).to(home.group.device)
        super().__init__(block, whole.ids[rows.start : rows.stop])
        self._whole, self._rows = whole, slice(rows.start, rows.stop)
        self.remote = home.halo.remote.to(home.group.device)

    @cached_property
    def loop(self) -> Tensor:
        return self._whole.loop[self._rows]

    @cached_property
    def source_ids(self) -> Tensor:
        """What the sources were called first: own vertices, then remote ones."""
        return torch.cat([self.ids, self._whole.ids[self.remote]])

    @cached_property
    def edge_ids(self) -> Tensor:
        """The positions of the block's edges among the whole graph's: int64 [E], on the CPU."""
        indptr = self._whole.adjacency.indptr
        return torch.arange(int(indptr[self._rows.start]), int(indptr[self._rows.stop]))

    @cached_property
    def edge_features(self) -> Tensor | None:
        return self._whole.edge_features_at(self.edge_ids)

    def _scale(self, product: Product, dtype: torch.dtype) -> Scale:
        scale = self._whole.scale(product, dtype)
        source = None if scale.source is None else torch.cat([scale.source[self._rows], scale.source[self.remote]])
        own = (None if vector is None else vector[self._rows].contiguous() for vector in (scale.target, scale.loop))
        return Scale(source, *own)


class CommunicatedView(GraphView):
    """Own rows and the halo's side by side, then the product over the rank's block."""

    unit_cost = UnitCost(inputs=1, dropped=1, rows=4)
    sparse_first = False  # the aggregate of constant features needs no halo

    def __init__(self, home: Communicated, view_key: int) -> None:
        super().__init__(home.block, key=view_key, inputs=home.inputs, meter=home.group.meter)
        self.home = home

    @property
    def num_vertices(self) -> int:
        return self.home.graph.num_vertices

    def attend(self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1) -> Tensor:
        bounds = even_heads(h, logit_src)
        packed = self._sources(torch.cat([h, logit_src], 1))
        sources, logit_src = (part.contiguous() for part in packed.split([h.shape[1], logit_src.shape[1]], 1))
        for step in range(steps):
            if step:
                sources = self._sources(h)
            h = self._attention(sources, logit_src, logit_dst, bounds, slope, 1)
        return h

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        return self._sources(x), self.topology.edge_index, len(x)

    def total(self, x: Tensor) -> Tensor:
        return sum_over_ranks(x.sum(0), self.home.group, tag="statistics")

    def _propagate(self, x: Tensor, product: Product) -> Tensor:
        for _ in range(product.steps):
            x = self._product(self._sources(x), product._replace(steps=1))
        return x

    def _sources(self, x: Tensor) -> Tensor:
        """The rows [n + h, F] of the block's sources, from the own ones [n, F]."""
        home = self.home
        if self.origin(x) != "rows":
            return self._constant(x, home.source_features, home.block.source_ids)
        if home.group.size == 1:
            return x
        return torch.cat([x, fetch_halo(x, home.route, home.group)])


class Communicated(Strategy):
    """One program on P ranks, exact, whose layers fetch what crosses the cut."""

    view_type = CommunicatedView

    def place(self) -> range:
        group, adjacency = self.group, self.graph.in_edges
        bounds = range_bounds(adjacency, group.size)
        self.halo = halo = make_halo(adjacency, bounds, group.rank)
        rows = range(bounds[group.rank], bounds[group.rank + 1])
        self.route = Route(rows=halo.rows.to(group.device), sent=halo.sent, received=halo.received, num_rows=len(rows))
        return rows

    @cached_property
    def block(self) -> Block:
        return Block(self.topology, self.rows, self)

    @cached_property
    def source_features(self) -> Tensor:
        """The features [n + h, F] of the block's sources; read only if a model aggregates them."""
        assert self.graph.x is not None
        assert self.inputs.rows is not None
        remote = self.graph.x[self.halo.remote].to(self.group.device, self.dtype)
        return torch.cat([self.inputs.rows, remote])

    def view(self, view_key: int) -> GraphView:
        return CommunicatedView(self, view_key)

    @classmethod
    def shape(cls, graph: Graph, *, rank: int, size: int) -> GraphShape:
        halo = make_halo(graph.in_edges, range_bounds(graph.in_edges, size), rank)
        numbers = HaloShape(halo.block.num_edges, len(halo.rows), len(halo.remote))
        return GraphShape.of(graph)._replace(halo=numbers)

    @classmethod
    def carry_out(
        cls, asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int
    ) -> list[Operation]:
        """For every step a halo, where rows are not constant, and a product."""
        del rank
        if asked.kind == "total":
            return [all_reduce("statistics", asked.width, itemsize, size)] if size > 1 else []
        halo = shape.halo or HaloShape(shape.num_edges, 0, 0)
        made = []
        for step in range(asked.steps):
            width = asked.width + (asked.heads if step == 0 else 0)  # with the sources' logits, once
            if size > 1 and (step or asked.origin == "rows"):
                sent, received = halo.num_sent * width * itemsize, halo.num_received * width * itemsize
                made.append(Operation(kind="collective", tag="halo", bytes_sent=sent, bytes_received=received))
            if asked.is_product:
                made.append(Operation(kind="aggregate", edges=halo.num_edges * asked.width))
        return made
