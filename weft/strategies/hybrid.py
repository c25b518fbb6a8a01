"""Vertex parallelism (NeutronStar, sections 2.2 and 3): a rank has vertices with all edges into them.

A remote source is fetched at every layer (`communicated`, algorithm 3), or computed again from constant features
(`cached`, algorithm 2), or whichever costs less (`hybrid`, algorithm 4). The three are one program, whose `Caching`
differs. How often a vertex is computed changes no number: dropout is keyed by vertex, sums over vertices count it once.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weft.comm import Halo, Parts, Route, make_route, split_product, sum_over_ranks
from weft.core.savings import ALL_SAVINGS, Savings
from weft.cost import Operation, all_reduce
from weft.data import Graph
from weft.kernels import Scale
from weft.nn import GraphOperation, GraphView, Product, Topology, UnitCost, even_heads
from weft.partition import Dependencies, Hop, make_dependencies, range_parts
from weft.strategies.base import ANYWHERE, GraphShape, HopShape, Placement, Strategy, dtype_of
from weft.strategies.costs import FREE, fetched_width, is_fetched, level_costs
from weft.strategies.probe import probe


class Block(Topology):
    """A hop's in-edges on this rank, with scalings by the degrees that vertices have in the whole graph."""

    def __init__(self, hop: Hop, home: VertexParallel, halo: Halo | None) -> None:
        self.device = home.group.device
        super().__init__(hop.block.cast(home.dtype).to(self.device))
        self.hop, self.home, self.halo = hop, home, halo
        self.sources = torch.cat([home.dependencies.rows[: hop.num_inputs], hop.fetched])  # on the host
        self.targets = self.sources[: self.adjacency.num_targets]
        self._parts: dict[Product, Parts] = {}
        self._places: dict[Block, Tensor] = {}

    @cached_property
    def ids(self) -> Tensor:
        """What the sources were called first."""
        return self.home.topology.ids[self.sources].to(self.device)

    @cached_property
    def loop(self) -> Tensor:
        return self.home.topology.loop[self.targets].to(self.device)

    @cached_property
    def features(self) -> Tensor:
        """The sources' features, for who needs them in every epoch."""
        return self.home.features(self.sources)

    @cached_property
    def edge_features(self) -> Tensor | None:
        features = self.home.topology.edge_features_at(self.hop.edge_ids)
        return None if features is None else features.to(self.device)

    def parts(self, product: Product, dtype: torch.dtype) -> Parts:
        """The product in parts: over the inputs, and over what each rank sends."""
        if product not in self._parts:
            group, savings = self.home.group, self.home.savings
            ring = [(group.rank - step) % group.size for step in range(1, group.size)]
            self._parts[product] = split_product(
                self.adjacency,
                self.hop.num_inputs,
                self.hop.received,
                self.scale(product, dtype),
                weighted=product.weighted,
                by_rank=ring if savings.ring else (),
            )
        return self._parts[product]

    def all_sources(self, x: Tensor) -> Tensor:
        """The rows of all sources, from those of the inputs."""
        return x if self.halo is None else torch.cat([x, self.halo.fetch(x)])

    def places_in(self, other: Block) -> Tensor:
        """Where each of the sources stands among another block's, which has them all: int64."""
        if other not in self._places:
            place = torch.empty(self.home.graph.num_vertices, dtype=torch.int64)
            place[other.sources] = torch.arange(len(other.sources))
            self._places[other] = place[self.sources].to(self.device)
        return self._places[other]

    def _scale(self, product: Product, dtype: torch.dtype) -> Scale:
        scale = self.home.topology.scale(product, dtype)
        taken = zip(scale, (self.sources, self.targets, self.targets), strict=True)
        return Scale(*(None if vector is None else vector[vertices].to(self.device) for vector, vertices in taken))


class BlockView(GraphView):
    """Products over the blocks of one stage; what a block's sources lack is fetched."""

    unit_cost = UnitCost(inputs=1, dropped=1, rows=4)
    nested = True

    def __init__(self, home: VertexParallel, blocks: tuple[Block, ...], view_key: int) -> None:
        super().__init__(
            blocks[0] if blocks else home.topology, key=view_key, inputs=home.inputs, meter=home.group.meter
        )
        self.home, self.blocks = home, blocks

    @property
    def num_vertices(self) -> int:
        return self.home.graph.num_vertices

    @property
    def row_ids(self) -> Tensor:
        return self.home.row_ids

    def targets(self, x: Tensor) -> Tensor:
        num_targets = len(self.blocks[-1].targets) if self.blocks else len(x)
        return x if len(x) == num_targets else x[:num_targets]

    def attend(self, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, slope: float, steps: int = 1) -> Tensor:
        bounds = even_heads(h, logit_src)
        first = self.blocks[0]
        packed = first.all_sources(torch.cat([h, logit_src], 1))
        h, logits = (part.contiguous() for part in packed.split([h.shape[1], logit_src.shape[1]], 1))
        for step, block in enumerate(self.blocks[:steps]):
            h = block.all_sources(h) if step else h
            logit_src = logits if block is first else logits.index_select(0, block.places_in(first))
            h = self._attention(h, logit_src, logit_dst[: len(block.targets)], bounds, slope, 1, block)
        return h

    def block(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        (block,) = self.blocks
        return self._sources(x, block, once=False), block.edge_index, len(block.targets)

    def total(self, x: Tensor) -> Tensor:
        return sum_over_ranks(x[: self.home.dependencies.num_own].sum(0), self.home.group, tag="statistics")

    def _propagate(self, x: Tensor, product: Product) -> Tensor:
        one, once = product._replace(steps=1), self.origin(x) == "inputs" and self.inputs.savings.reuse
        for block in self.blocks[: product.steps]:
            if block.halo is None or product.reduce == "max" or self.origin(x) != "rows":
                x = self._product(self._sources(x, block, once=once), one, block)
            else:
                x = block.halo.product(x, block.parts(one, x.dtype))
                self._count(x, block, 1)
        return x

    def _sources(self, x: Tensor, block: Block, *, once: bool) -> Tensor:
        """The rows of all sources of a block, from those of its inputs; `once`: constant ones need not be kept."""
        if self.origin(x) == "rows":
            return block.all_sources(x)
        return self._constant(x, self.home.features(block.sources) if once else block.features, block.ids)


class SameRowsView(BlockView):
    """Blocks without cached vertices: a stage has the same rows before and after its products."""

    nested = False


class VertexParallel(Strategy):
    """One program on P ranks, exact, that caches a share of the remote sources and fetches the others."""

    view_type: ClassVar[type[BlockView]] = BlockView
    takes_parts = True
    ratio: ClassVar[float | None] = None
    """The share of remote sources that is cached; None: as the person says, or by cost."""

    def place(self) -> Tensor:
        group = self.group
        start = time.perf_counter()
        if self.ratio is None and self.placement.cache_ratio is None and self.placement.factors is None:
            self.placement = replace(self.placement, factors=probe(self.model, self.graph, group, self.savings))
        self.probe_seconds = time.perf_counter() - start
        self.dependencies = needed = self.plan(
            self.graph, self.model, rank=group.rank, size=group.size, placement=self.placement, savings=self.savings
        )
        self.blocks = self._make_blocks()
        self.row_ids = self.topology.ids[needed.rows].to(group.device)
        return needed.own

    @property
    def input_rows(self) -> Tensor:
        return self.dependencies.rows

    def facts(self) -> dict[str, Any]:
        needed = self.dependencies
        return {
            "vertices": needed.num_own,
            "cached": [hop.num_inputs - needed.num_own for hop in needed.hops],
            "fetched": [len(hop.fetched) for hop in needed.hops],
            "cached_bytes": needed.cached_bytes,
            "limited": needed.limited,
            "probe_seconds": self.probe_seconds,
            "choice_seconds": needed.choice_seconds,
        }

    @cached_property
    def topology(self) -> Topology:
        """The whole graph's, on the host: blocks take degrees from it."""
        return Topology(self.graph.in_edges.cast(self.dtype), self.graph.ids, self.graph.edge_features, self.dtype)

    def view(self, stage: int, view_key: int) -> GraphView:
        return self.view_type(self, self.blocks[stage], view_key)

    def _make_blocks(self) -> list[tuple[Block, ...]]:
        """The blocks of each stage's products; hops that have the same rows on every rank share one."""
        group, hops = self.group, self.dependencies.hops
        fetched = [len(hop.fetched) for hop in hops]
        repeated = [int(number > 0 and hop is hops[number - 1]) for number, hop in enumerate(hops)]
        counts = torch.tensor([fetched, repeated], dtype=torch.int64, device=group.device)
        exchanged, shared = group.all_reduce(counts, tag="route").tolist()
        blocks: list[Block] = []
        for number, hop in enumerate(hops):
            if shared[number] == group.size:
                blocks.append(blocks[-1])
            else:
                halo = self.make_halo(self._route(hop)) if exchanged[number] else None
                blocks.append(Block(hop, self, halo))
        operations = self.operations(self.model, GraphShape.of(self.graph), True, self.savings)
        spans = [[asked.hops for asked in operations if asked.stage == stage] for stage in self.stages]
        return [tuple(blocks[hop] for hop in sorted(set().union(*span))) for span in spans]

    def _route(self, hop: Hop) -> Route:
        return make_route(hop.fetched, hop.received, self.dependencies.own, hop.num_inputs, self.group)

    def make_halo(self, route: Route) -> Halo:
        """The halo of one product."""
        return Halo(route, self.group, ring=self.savings.ring, overlap=self.savings.overlap)

    @classmethod
    def plan(
        cls,
        graph: Graph,
        model: nn.Module,
        *,
        rank: int,
        size: int,
        placement: Placement = ANYWHERE,
        savings: Savings = ALL_SAVINGS,
    ) -> Dependencies:
        """What `rank` of `size` computes and fetches: the same wherever it is asked, if the factors are given."""
        part = range_parts(graph.in_edges, size) if placement.part is None else placement.part
        caching = level_costs(
            cls.operations(model, GraphShape.of(graph), True, savings, count_flops=placement.factors is not None),
            placement.factors or FREE,
            itemsize=dtype_of(model).itemsize,
            num_features=graph.num_features,
            savings=savings,
            ratio=placement.cache_ratio if cls.ratio is None else cls.ratio,
            max_bytes=placement.cache_bytes,
        )
        return make_dependencies(graph.in_edges, part, rank, size, caching)

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
        """Plans every rank's part, since what a rank sends is what the others lack."""
        plans = [
            cls.plan(graph, model, rank=one, size=size, placement=placement, savings=savings) for one in range(size)
        ]
        hops = [
            HopShape(
                num_edges=each[rank].block.num_edges,
                num_sent=sum(hop.received[rank] for hop in each),
                num_received=len(each[rank].fetched),
                exchanged=any(len(hop.fetched) for hop in each),
            )
            for each in zip(*(plan.hops for plan in plans), strict=True)
        ]
        return GraphShape.of(graph)._replace(hops=tuple(hops))

    @classmethod
    def carry_out(
        cls, asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int
    ) -> list[Operation]:
        """For every hop a halo, where rows are not constant and some are lacking, and a product."""
        del rank
        if asked.kind == "total":
            return [all_reduce("statistics", asked.width, itemsize, size)] if size > 1 else []
        made = []
        for number in asked.hops:
            hop = shape.hops[number] if shape.hops else HopShape(shape.num_edges)
            if hop.exchanged and is_fetched(asked, number):
                row = fetched_width(asked, number) * itemsize
                sent, received = hop.num_sent * row, hop.num_received * row
                made.append(Operation(kind="collective", tag="halo", bytes_sent=sent, bytes_received=received))
            if asked.is_product:
                made.append(Operation(kind="aggregate", edges=hop.num_edges * asked.width))
        return made


class Communicated(VertexParallel):
    """Every remote source is fetched at every layer."""

    view_type = SameRowsView
    ratio = 0.0


class Cached(VertexParallel):
    """Every remote source is computed again on each rank that needs it: nothing but weights' gradients crosses."""

    ratio = 1.0


class Hybrid(VertexParallel):
    """Each remote source is had as it costs less."""
