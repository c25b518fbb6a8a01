"""Vertex parallelism (NeutronStar, sections 2.2 and 3): a rank has vertices with all edges into them.

A remote source is fetched at every layer (`communicated`, algorithm 3), or computed again from constant features
(`cached`, algorithm 2), or whichever costs less (`hybrid`, algorithm 4). The three are one program, whose `Caching`
differs. How often a vertex is computed changes no number: dropout is keyed by vertex, sums over vertices count it once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weft.comm import Halo, Route, make_route
from weft.core.errors import InputError
from weft.core.savings import ALL_SAVINGS, Savings
from weft.cost import Operation, all_reduce
from weft.data import Graph
from weft.nn import GraphOperation, GraphView, Topology, Total, embeddings, is_embedded
from weft.partition import Dependencies, Hop, make_dependencies, range_parts
from weft.strategies.base import ANYWHERE, GraphShape, HopShape, Placement, Strategy, dtype_of
from weft.strategies.vertex.blocks import Block, BlockView, SameRowsView
from weft.strategies.vertex.costs import NOMINAL, fetched_width, is_fetched, level_costs
from weft.strategies.vertex.embedded import EmbeddedHalo, again_by_owner
from weft.strategies.vertex.probe import probe

MAX_LEVELS = 100  # a level is a byte


class VertexParallel(Strategy):
    """One program on P ranks, exact, that caches a share of the remote sources and fetches the others."""

    view_type: ClassVar[type[BlockView]] = BlockView
    takes_parts = True
    ratio: ClassVar[float | None] = None
    """The share of remote sources that is cached; None: as the person says, or by cost."""

    def place(self) -> Tensor:
        group = self.group
        start = time.perf_counter()
        if self.takes_factors and self.placement.cache_ratio is None and self.placement.factors is None:
            self.placement = replace(self.placement, factors=probe(self.model, self.graph, group, self.savings))
        self.probe_seconds = time.perf_counter() - start
        self.dependencies = needed = self.plan(
            self.graph, self.model, rank=group.rank, size=group.size, placement=self.placement, savings=self.savings
        )
        self.blocks = self._make_blocks()
        self.embedded_halo = self._make_embedded_halo()
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
            "fetched": [len(hop.fetched) * fetching for hop, fetching in zip(needed.hops, self.fetching, strict=True)],
            "cached_bytes": needed.cached_bytes,
            "limited": needed.limited,
            "probe_seconds": self.probe_seconds,
            "choice_seconds": needed.choice_seconds,
        }

    @cached_property
    def topology(self) -> Topology:
        """The whole graph's, on the host: blocks take degrees from it."""
        graph = self.graph
        in_edges = graph.in_edges.cast(self.dtype)
        return Topology(in_edges, graph.ids, graph.edge_features, self.dtype, graph.edge_type, len(graph.relations))

    def view(self, stage: int, view_key: int) -> GraphView:
        return self.view_type(self, self.dependencies, self.blocks[stage], self.row_ids, view_key, self.embedded_halo)

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
                blocks.append(Block(hop, self.dependencies.rows, self, self._halo(hop) if exchanged[number] else None))
        operations = self.operations(self.model, GraphShape.of(self.graph), True, self.savings)
        self.fetching = [
            any(number in one.hops and is_fetched(one, number) for one in operations) for number in range(len(hops))
        ]
        spans = [[asked.hops for asked in operations if asked.stage == stage] for stage in self.stages]
        return [tuple(blocks[hop] for hop in sorted(set().union(*span))) for span in spans]

    def _make_embedded_halo(self) -> EmbeddedHalo | None:
        """None where no rank lacks any embedded row."""
        needed, group = self.dependencies, self.group
        if not embeddings(self.model):
            return None
        part = part_of(self.graph, group.size, self.placement)
        again, counts = again_by_owner(self.graph, part, needed.rows, needed.num_own, group.size)
        if not group.all_reduce(counts.sum().to(group.device), tag="route"):
            return None
        own = needed.own[is_embedded(self.graph)[needed.own]]
        return EmbeddedHalo(again, counts, own, part, group)

    def _halo(self, hop: Hop) -> Halo:
        own = self.dependencies.own
        return self.make_halo(make_route(hop.fetched, hop.received, own, hop.num_inputs, self.group))

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
        part = part_of(graph, size, placement)
        shape = GraphShape.of(graph)
        if cls.takes_factors:
            shape = shape._replace(pairs=(int(graph.num_relations_in.sum()),))
        caching = level_costs(
            cls.operations(model, shape, True, savings, count_flops=cls.takes_factors),
            placement.factors or NOMINAL,
            itemsize=dtype_of(model).itemsize,
            num_features=graph.num_features or graph.typed.mean_width,
            savings=savings,
            ratio=placement.cache_ratio if cls.ratio is None else cls.ratio,
            max_bytes=placement.cache_bytes if cls.takes_factors else None,
        )
        if len(caching.costs) > MAX_LEVELS and caching.ratio != 0:
            many = f"the model has {len(caching.costs)} products, and caching knows {MAX_LEVELS}"
            raise InputError(f"{many}: use --strategy communicated")
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
        embedded = embedded_shape(graph, plans, rank, part_of(graph, size, placement))
        return GraphShape.of(graph)._replace(hops=tuple(hops), embedded=embedded)

    @classmethod
    def carry_out(
        cls, asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int
    ) -> list[Operation]:
        """For every hop a halo, where rows are not constant and some are lacking, and a product."""
        del rank
        if isinstance(asked.op, Total):
            return [all_reduce("statistics", asked.width, itemsize, size)] if size > 1 else []
        made = []
        if asked.op == "embed" and shape.embedded.exchanged:
            row = asked.width * itemsize
            sent, received = shape.embedded.num_sent * row, shape.embedded.num_received * row
            made.append(Operation(kind="collective", tag="halo", bytes_sent=sent, bytes_received=received))
        for number in asked.hops:
            hop = shape.hops[number] if shape.hops else HopShape(shape.num_edges)
            if hop.exchanged and is_fetched(asked, number):
                row = fetched_width(asked, number) * itemsize
                sent, received = hop.num_sent * row, hop.num_received * row
                made.append(Operation(kind="collective", tag="halo", bytes_sent=sent, bytes_received=received))
            if asked.is_aggregate:
                made.append(Operation(kind="aggregate", edges=hop.num_edges * asked.width))
        return made


def embedded_shape(graph: Graph, plans: Sequence[Dependencies], rank: int, part: Tensor) -> HopShape:
    """The rows of embeddings that a rank sends and receives, from the plans of all ranks."""
    again = [again_by_owner(graph, part, plan.rows, plan.num_own, len(plans))[1] for plan in plans]
    return HopShape(
        num_edges=0,
        num_sent=int(sum(counts[rank] for counts in again)),
        num_received=int(again[rank].sum()),
        exchanged=any(bool(counts.any()) for counts in again),
    )


def part_of(graph: Graph, size: int, placement: Placement) -> Tensor:
    """The part of every vertex, int32 [N]."""
    return range_parts(graph.in_edges, size) if placement.part is None else placement.part


class Communicated(VertexParallel):
    """Every remote source is fetched at every layer."""

    view_type = SameRowsView
    ratio = 0.0


class Cached(VertexParallel):
    """Every remote source is computed again on each rank that needs it: nothing but weights' gradients crosses."""

    ratio = 1.0


class Hybrid(VertexParallel):
    """Each remote source is had as it costs less."""

    takes_factors = True
