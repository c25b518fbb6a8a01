"""Plans of vertex parallelism (NeutronStar, sections 2.2 and 3): each rank has vertices with all their in-edges.

Remote source rows are fetched at every layer (`communicated`, algorithm 3), recomputed from constant features
(`cached`, algorithm 2), or whichever costs less (`hybrid`, algorithm 4). The three differ only in their `Caching`.
Recomputing a vertex on several ranks changes no number: dropout is keyed by vertex, and sums over vertices count each
once.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from weft.comm import Group
from weft.nn import SPREAD, Topology
from weft.parallel.blocks.blocks import Halos, is_fetched
from weft.parallel.blocks.caching_costs import NOMINAL, caching_costs
from weft.parallel.blocks.vertex_blocks import VertexBlocks
from weft.parallel.blocks.vertex_layout import VertexLayout, VertexStepInputs
from weft.parallel.layout import Layout
from weft.strategies.base import RECOMPUTING, HybridOptions, VertexOptions, whole_topology
from weft.strategies.resident import ResidentPlaced, ResidentPlan

VERTEX_OPTIMISATIONS = ("reach", "ring", "overlap", "cover")
"""Optimisations of exact vertex parallelism."""


def make_vertex_blocks(plan: ResidentPlan, *, ratio: float | None, max_bytes: int | None = None) -> VertexBlocks:
    """Return the blocks of vertex parallelism by the partition in a plan's options, which are `VertexOptions`.

    Args:
        plan: The plan.
        ratio: Share of remote sources that is cached; None: wherever it costs less.
        max_bytes: Limit of a rank's cached vertices in bytes; None: no limit.
    """
    assert isinstance(plan.options, VertexOptions)
    work, traits = plan.work, plan.traits
    outline = work.outline(traits, training=True)
    caching = caching_costs(work, outline, plan.machine or NOMINAL, ratio=ratio, max_bytes=max_bytes)
    covers = "cover" in plan.optimisations
    return VertexBlocks(work, plan.size, plan.options.partition, caching, traits, covers=covers)


class PlacedVertices(ResidentPlaced):
    """A plan of vertex parallelism on its rank."""

    def __init__(self, plan: ResidentPlan, group: Group, *, seed: int) -> None:
        super().__init__(plan, group, seed=seed)
        if plan.layout in plan.layouts.values():
            self.whole  # noqa: B018  # all ranks create halos together, so here instead of in the first step

    @cached_property
    def topology(self) -> Topology:
        """Topology of the whole graph, on the host; blocks take degrees from it."""
        return whole_topology(self.work, "cpu")

    @cached_property
    def whole(self) -> VertexStepInputs:
        with self.group.meter.during("setup"):
            return self.make_step_inputs(self.plan.layout)

    def make_step_inputs(self, layout: Layout) -> VertexStepInputs:
        assert isinstance(layout, VertexLayout)
        return VertexStepInputs.of(layout, self, self.make_inputs)

    def describe(self) -> dict[str, Any]:
        layouts = self.plan.layouts
        layout = layouts.get(True, layouts[False])  # mini-batches have no training step on the whole graph
        assert isinstance(layout, VertexLayout)
        assert isinstance(self.rows, Tensor)
        needed, facts = layout.blocks.dependencies(self.group.rank), super().describe()
        recomputed = layout.part[needed.rows] != self.group.rank
        cached = [int(recomputed[: hop.num_inputs].sum()) for hop in needed.hops]
        operations = layout.work.outline(layout.traits, training=True)
        fetching = [
            any(number in op.hops and is_fetched(op, number) for op in operations) for number in range(len(cached))
        ]
        if needed.limited:
            facts["summary"] = f"--cache-memory limits caching to {max(cached):,} vertices; the others are fetched"
        return facts | {
            "vertices": len(self.rows),
            "cached": cached,
            "fetched": [
                sum(hop.cover.received if number in layout.blocks.covered else hop.received) * fetching[number]
                for number, hop in enumerate(needed.hops)
            ],
            "cached_bytes": needed.cached_bytes,
            "limited": needed.limited,
            "choice_seconds": needed.choice_seconds,
        }

    def exchange(self, stage: int) -> Halos:
        return self.whole.exchanges[stage]


class CommunicatedPlan(ResidentPlan):
    """Plan of `communicated`: every remote source is fetched at every layer."""

    name = "communicated"
    options_type = VertexOptions
    optimisations = VERTEX_OPTIMISATIONS
    traits = SPREAD
    placed_type = PlacedVertices

    def make_layout(self) -> VertexLayout:
        return VertexLayout(make_vertex_blocks(self, ratio=0.0))


class CachedPlan(ResidentPlan):
    """Plan of `cached`: every remote source is recomputed, so that only gradients of weights cross the network."""

    name = "cached"
    options_type = VertexOptions
    optimisations = VERTEX_OPTIMISATIONS
    traits = RECOMPUTING
    placed_type = PlacedVertices

    def make_layout(self) -> VertexLayout:
        return VertexLayout(make_vertex_blocks(self, ratio=1.0))


class HybridPlan(ResidentPlan):
    """Plan of `hybrid`: each remote source is cached or fetched, whichever costs less."""

    name = "hybrid"
    options_type = HybridOptions
    flags = ("machine", "measure")
    optimisations = VERTEX_OPTIMISATIONS
    traits = RECOMPUTING
    placed_type = PlacedVertices
    options: HybridOptions

    def make_layout(self) -> VertexLayout:
        options = self.options
        return VertexLayout(make_vertex_blocks(self, ratio=options.ratio, max_bytes=options.cache_bytes))
