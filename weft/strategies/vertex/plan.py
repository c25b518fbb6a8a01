"""Vertex parallelism (NeutronStar, sections 2.2 and 3): a rank has vertices with all edges into them.

A remote source is fetched at every layer (`communicated`, algorithm 3), or computed again from constant features
(`cached`, algorithm 2), or whichever costs less (`hybrid`, algorithm 4). The three are one program, whose `Caching`
differs. How often a vertex is computed changes no number: dropout is keyed by vertex, sums over vertices count it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from weft.comm import Group, Halo, Route
from weft.core.errors import InputError
from weft.cost import Operation
from weft.nn import (
    SPREAD,
    Aggregate,
    BlockSize,
    Footprint,
    GraphOperation,
    Sum,
    Topology,
    embeddings,
    is_embedded,
    kernel_footprint,
)
from weft.partition import Caching, Dependencies, make_dependencies, range_parts
from weft.strategies.base import Options, whole_topology
from weft.strategies.resident import ResidentPlaced, ResidentPlan
from weft.strategies.vertex.blocks import BlockStats, Halos, operations
from weft.strategies.vertex.costs import NOMINAL, fetched_width, is_fetched, is_sum, level_costs
from weft.strategies.vertex.embedded import make_embedded_halo, recomputed_by_owner
from weft.strategies.vertex.setup import make_blocks

MAX_LEVELS = 100  # a level is a byte


@dataclass(frozen=True, kw_only=True)
class VertexOptions(Options):
    """What can be said of where vertices live."""

    partition: Tensor | None = field(default=None, repr=False, compare=False)
    """int32 [N], the rank of every vertex; None: contiguous ranges."""


@dataclass(frozen=True, kw_only=True)
class HybridOptions(VertexOptions):
    """And of which remote sources are cached."""

    cache_ratio: float | None = None
    """The share of remote sources to cache at each layer; None: where it costs less."""
    cache_memory: int | None = None
    """Bytes that a rank's cached vertices may take; None: no limit."""


class VertexPlan(ResidentPlan):
    """One program on P ranks, exact, that caches a share of the remote sources and fetches the others."""

    options_type: ClassVar[type[Options]] = VertexOptions
    optimisations: ClassVar[tuple[str, ...]] = ("ring", "overlap", "cover")
    traits = SPREAD._replace(shrinks_rows=True)
    ratio: ClassVar[float | None] = None
    """The share of remote sources that is cached; None: as the person says, or by cost."""
    options: VertexOptions

    def decide(self, decisions: Any) -> None:
        del decisions
        self._dependencies: dict[int, Dependencies] = {}
        self.caching = self.make_caching()
        if len(self.caching.costs) > MAX_LEVELS and self.caching.ratio != 0:
            many = f"the model has {len(self.caching.costs)} aggregates, and caching knows {MAX_LEVELS}"
            raise InputError(f"{many}: use --strategy communicated")

    def make_caching(self) -> Caching:
        """How the remote sources are to be had."""
        work, options = self.work, self.options
        chosen = options if isinstance(options, HybridOptions) else HybridOptions()
        return level_costs(
            work,
            work.outline(self.traits, training=True),
            self.machine or NOMINAL,
            ratio=chosen.cache_ratio if self.ratio is None else self.ratio,
            max_bytes=chosen.cache_memory,
        )

    @cached_property
    def part(self) -> Tensor:
        """The rank of every vertex, int32 [N]."""
        given = self.options.partition
        return range_parts(self.work.graph.in_edges, self.size) if given is None else given

    def dependencies(self, rank: int) -> Dependencies:
        """What a rank computes and fetches."""
        if rank not in self._dependencies:
            self._dependencies[rank] = self._dependencies_by(self.caching_of(rank), rank)
        return self._dependencies[rank]

    def caching_of(self, rank: int) -> Caching:
        """The costs of a rank, to which a fetched row of a sum is the share of one that its least halo sends."""
        caching, covered = self.caching, sorted(self.covered)
        if caching.ratio is not None or not covered:
            return caching
        (hop,) = self._dependencies_by(replace(caching, costs=caching.costs[:1], ratio=0.0), rank).hops
        costs = caching.costs.clone()
        costs[covered, 2] *= sum(hop.cover.received) / max(len(hop.fetched), 1)
        return replace(caching, costs=costs)

    def _dependencies_by(self, caching: Caching, rank: int) -> Dependencies:
        return make_dependencies(self.work.graph.in_edges, self.part, rank, self.size, caching)

    @property
    def everyone(self) -> list[Dependencies]:
        """Those of all ranks, since what a rank sends is what the others lack."""
        return [self.dependencies(rank) for rank in range(self.size)]

    def forget(self) -> None:
        """Lets go of dependencies, which grow with the graph and can be made again."""
        self._dependencies.clear()

    @cached_property
    def covered(self) -> frozenset[int]:
        """The aggregates that are sums over fetched rows, of which the fewest are fetched."""
        if "cover" not in self.optimisations or not self.work.optimisations.cover:
            return frozenset()
        asked = self.work.outline(self.traits, training=True)
        return frozenset(number for op in asked for number in op.hops if is_sum(op, number))

    def is_covered(self, op: GraphOperation, number: int) -> bool:
        """Whether an aggregate takes partial results of others at one of its hops."""
        return number in self.covered and is_sum(op, number)

    def block(self, rank: int, op: GraphOperation, number: int) -> BlockStats:
        """A rank's block of one hop, as an aggregate has it."""
        hops = [needed.hops[number] for needed in self.everyone]
        exchanged = any(len(hop.fetched) for hop in hops)
        if self.is_covered(op, number):
            covers = [hop.cover for hop in hops]
            return BlockStats(
                num_edges=covers[rank].block.num_edges + sum(cover.summed[rank] for cover in covers),
                num_sent=sum(cover.received[rank] for cover in covers),
                num_received=sum(covers[rank].received),
                exchanged=exchanged,
            )
        return BlockStats(
            num_edges=hops[rank].block.num_edges,
            num_sent=sum(hop.received[rank] for hop in hops),
            num_received=len(hops[rank].fetched),
            exchanged=exchanged,
        )

    def embedded(self, rank: int) -> BlockStats:
        """The rows of embeddings that a rank sends and receives, from what all ranks compute."""
        if not embeddings(self.work.model):
            return BlockStats(num_edges=0)
        embedded = is_embedded(self.work.graph)
        recomputed = [
            recomputed_by_owner(embedded, self.part, one.rows, one.num_own, self.size)[1] for one in self.everyone
        ]
        return BlockStats(
            num_edges=0,
            num_sent=int(sum(counts[rank] for counts in recomputed)),
            num_received=int(recomputed[rank].sum()),
            exchanged=any(bool(counts.any()) for counts in recomputed),
        )

    def level_rows(self, rank: int) -> Sequence[Tensor]:
        needed = self.dependencies(rank)
        return [*(needed.rows[: hop.num_inputs] for hop in needed.hops), needed.own]

    def level_blocks(self, rank: int) -> Sequence[BlockSize]:
        return [BlockSize.of(hop.block) for hop in self.dependencies(rank).hops]

    def lower(self, op: GraphOperation, rank: int) -> list[Operation]:
        itemsize = self.work.itemsize
        if op.op == "embed":
            embedded = self.embedded(rank)
            return [embedded.fetch(op.width * itemsize)] if embedded.exchanged else []
        return operations(op, {number: self.block(rank, op, number) for number in op.hops}, itemsize)

    def footprint(self, op: GraphOperation, rank: int) -> Footprint:
        """That of the kernels on the rank's block; rows on their way; of an attention, those of all sources at once."""
        assert isinstance(op.op, Aggregate)
        itemsize, hops = self.work.itemsize, self.dependencies(rank).hops
        hop, block = hops[op.hops[0]], self.block(rank, op, op.hops[0])
        steps = len(op.hops)
        made = kernel_footprint(
            op.op,
            num_targets=hop.block.num_targets,
            num_edges=hop.block.num_edges,
            width=op.width,
            itemsize=itemsize,
            steps=steps,
        )
        row, crosses = fetched_width(op, op.hops[0]) * itemsize, block.exchanged and is_fetched(op, op.hops[0])
        own, sources, targets = (n * row for n in (hop.num_inputs, hop.block.num_sources, hop.block.num_targets))
        sent, received = (n * row * crosses for n in (block.num_sent, block.num_received))
        if op.op.plain:
            added = targets if isinstance(op.op, Sum) else sources  # what those that came make, or all side by side
            given_back = 0 if self.is_covered(op, op.hops[0]) else own  # sums add to the rows' own gradients at once
            back = max(2 * received + targets, received + sent + given_back)
            return made.moved(forward=sent + received + added, backward=back) if crosses else made
        right = hop.block.num_targets * op.logit_width * itemsize
        several = len(op.op.source) > 1
        packed = (sources if crosses else own) if several else sent + received
        back = max((1 + several) * sources, (sources + sent + 2 * own) * crosses) - own
        return replace(made, saves_rows=0).moved(forward=packed, saved=sources + right, backward=back)

    def place(self, group: Group, *, seed: int = 0) -> PlacedVertices:
        return PlacedVertices(self, group, seed=seed)

    def make_halo(self, route: Route, group: Group, name: str) -> Halo:
        """The halo of one block."""
        optimisations = self.work.optimisations
        return Halo(route, group, name=name, ring=optimisations.ring, overlap=optimisations.overlap)


class PlacedVertices(ResidentPlaced):
    """A rank's vertices, the blocks of their in-edges, and the halos that bring what these lack."""

    plan: VertexPlan

    def __init__(self, plan: VertexPlan, group: Group, *, seed: int) -> None:
        self.dependencies = needed = plan.dependencies(group.rank)
        super().__init__(plan, group, needed.own, seed=seed, input_rows=needed.rows)
        row_ids = self.topology.ids[needed.rows].to(group.device)
        embedded = make_embedded_halo(plan.work, needed, plan.part, group)
        asked = plan.work.outline(plan.traits, training=True)
        blocks = make_blocks(self, needed, asked, plan.covered, plan.make_halo)
        self.fetching = [
            any(number in op.hops and is_fetched(op, number) for op in asked) for number in range(len(blocks))
        ]
        self.blocks = [tuple(blocks[hop] for hop in hops) for hops in plan.work.stage_hops(plan.traits)]
        self.halos = [Halos(blocks, self.topology, row_ids, needed.num_own, group, embedded) for blocks in self.blocks]

    @cached_property
    def topology(self) -> Topology:
        """The whole graph's, on the host: blocks take degrees from it."""
        return whole_topology(self.work, "cpu")

    def describe(self) -> dict[str, Any]:
        needed, summary = self.dependencies, dict[str, str]()
        if needed.limited:
            most = max(hop.num_inputs for hop in needed.hops) - needed.num_own
            summary = {"summary": f"--cache-memory ends the caching at {most:,} vertices, the others are fetched"}
        return summary | {
            "vertices": needed.num_own,
            "cached": [hop.num_inputs - needed.num_own for hop in needed.hops],
            "fetched": [
                sum(hop.cover.received if number in self.plan.covered else hop.received) * self.fetching[number]
                for number, hop in enumerate(needed.hops)
            ],
            "cached_bytes": needed.cached_bytes,
            "limited": needed.limited,
            "choice_seconds": needed.choice_seconds,
        }

    def exchange(self, stage: int) -> Halos:
        return self.halos[stage]


class CommunicatedPlan(VertexPlan):
    """Every remote source is fetched at every layer."""

    name = "communicated"
    traits = SPREAD
    ratio = 0.0


class CachedPlan(VertexPlan):
    """Every remote source is computed again on each rank that needs it: nothing but weights' gradients crosses."""

    name = "cached"
    ratio = 1.0


class HybridPlan(VertexPlan):
    """Each remote source is had as it costs less."""

    name = "hybrid"
    options_type = HybridOptions
    flags = ("probe", "measure")
