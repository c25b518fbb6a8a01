"""Vertex parallelism (NeutronStar, sections 2.2 and 3): a rank has vertices with all edges into them.

A remote source is fetched at every layer (`communicated`, algorithm 3), or computed again from constant features
(`cached`, algorithm 2), or whichever costs less (`hybrid`, algorithm 4). The three are one program, whose `Caching`
differs. How often a vertex is computed changes no number: dropout is keyed by vertex, sums over vertices count it once.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from weft.comm import Group, Halo, Route
from weft.cost import Operation
from weft.data import Adjacency
from weft.nn import (
    SPREAD,
    SUM_BYTES,
    Aggregate,
    BlockSize,
    GraphOperation,
    KernelMemory,
    Sum,
    Topology,
    embeddings,
    estimate_kernel_memory,
    is_embedded,
)
from weft.partition import Caching, Choice, Dependencies, ReceptiveField, make_dependencies, range_parts
from weft.strategies.base import Options, whole_topology
from weft.strategies.resident import ResidentPlaced, ResidentPlan, StepInputs
from weft.strategies.step_pruning import pruned_traits
from weft.strategies.vertex.blocks import Block, BlockStats, Halos, operations
from weft.strategies.vertex.costs import NOMINAL, caching_costs, fetched_width, is_fetched, is_sum
from weft.strategies.vertex.embedding_rows import make_embedded_halo, recomputed_by_owner
from weft.strategies.vertex.setup import make_blocks
from weft.utils.errors import InputError

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
    optimisations: ClassVar[tuple[str, ...]] = ("reach", "ring", "overlap", "cover")
    traits = SPREAD._replace(shrinks_rows=True)
    ratio: ClassVar[float | None] = None
    """The share of remote sources that is cached; None: as the person says, or by cost."""
    reach: ReceptiveField | None = None
    """What its steps read; None: the whole graph."""
    options: VertexOptions

    def solve(self, state: Any) -> None:
        del state
        self._dependencies: dict[int, Dependencies] = {}
        self._choices: dict[int, Choice] = {}
        self.caching = self.make_caching()
        if len(self.caching.costs) > MAX_LEVELS and self.caching.ratio != 0:
            many = f"the model has {len(self.caching.costs)} aggregates, and caching knows {MAX_LEVELS}"
            raise InputError(f"{many}: use --strategy communicated")

    def make_caching(self) -> Caching:
        """How the remote sources are to be had."""
        work, options = self.work, self.options
        chosen = options if isinstance(options, HybridOptions) else HybridOptions()
        return caching_costs(
            work,
            work.outline(self.traits, training=True),
            self.machine or NOMINAL,
            ratio=chosen.cache_ratio if self.ratio is None else self.ratio,
            max_bytes=chosen.cache_memory,
        )

    @cached_property
    def part(self) -> Tensor:
        given = self.options.partition
        return range_parts(self.work.graph.in_edges, self.size) if given is None else given

    def dependencies(self, rank: int) -> Dependencies:
        """What a rank computes and fetches."""
        if rank not in self._dependencies:
            if rank not in self._choices:
                edges, caching = self.work.graph.in_edges, self.caching_of(rank)
                self._choices[rank] = Choice.of(edges, self.part, rank, caching)
            known = {"choice": self._choices[rank], "reach": self.reach.levels if self.reach else None}
            self._dependencies[rank] = self._dependencies_by(self.caching, rank, **known)
        return self._dependencies[rank]

    def restrict_to(self, reach: ReceptiveField) -> VertexPlan:
        plan = copy.copy(self)
        plan.reach, plan.traits, plan._dependencies = reach, pruned_traits(self.traits), {}
        return plan

    def make_step_inputs(self, placed: ResidentPlaced) -> VertexStepInputs:
        return VertexStepInputs.of(self, placed)

    def caching_of(self, rank: int) -> Caching:
        """The costs of a rank, to which a fetched row of a sum is the share of one that its least halo sends."""
        caching, covered = self.caching, sorted(self.covered)
        if caching.ratio is not None or not covered:
            return caching
        (hop,) = self._dependencies_by(replace(caching, costs=caching.costs[:1], ratio=0.0), rank).hops
        costs = caching.costs.clone()
        costs[covered, 2] *= sum(hop.cover.received) / max(len(hop.fetched), 1)
        return replace(caching, costs=costs)

    def _dependencies_by(self, caching: Caching, rank: int, **known: Any) -> Dependencies:
        return make_dependencies(self.work.graph.in_edges, self.part, rank, self.size, caching, **known)

    @property
    def all_dependencies(self) -> list[Dependencies]:
        """Those of all ranks, since what a rank sends is what the others lack."""
        return [self.dependencies(rank) for rank in range(self.size)]

    def release(self) -> None:
        """Lets go of dependencies, which grow with the graph and can be made again."""
        super().release()
        self._dependencies.clear()
        self._choices.clear()

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
        hops = [needed.hops[number] for needed in self.all_dependencies]
        exchanged = any(len(hop.fetched) for hop in hops)
        overlap = self.work.optimisations.overlap
        if self.is_covered(op, number):
            covers = [hop.cover for hop in hops]
            return BlockStats(
                num_edges=covers[rank].block.num_edges + sum(cover.summed[rank] for cover in covers),
                num_local_edges=num_own_edges(covers[rank].block, hops[rank].num_inputs) if overlap else 0,
                num_targets=covers[rank].block.num_targets,
                num_sources=covers[rank].block.num_sources,
                fresh_share=covers[rank].block.fresh_share,
                num_sent=sum(cover.received[rank] for cover in covers),
                num_received=sum(covers[rank].received),
                exchanged=exchanged,
            )
        return BlockStats(
            num_edges=hops[rank].block.num_edges,
            num_local_edges=num_own_edges(hops[rank].block, hops[rank].num_inputs) if overlap else 0,
            num_targets=hops[rank].block.num_targets,
            num_sources=hops[rank].block.num_sources,
            fresh_share=hops[rank].block.fresh_share,
            num_sent=sum(hop.received[rank] for hop in hops),
            num_received=len(hops[rank].fetched),
            exchanged=exchanged,
        )

    def embedding_exchange(self, rank: int) -> BlockStats:
        """The rows of embeddings that a rank sends and receives, from what all ranks compute."""
        if not embeddings(self.work.model):
            return BlockStats(num_edges=0)
        embedded = is_embedded(self.work.graph)
        recomputed = [
            recomputed_by_owner(embedded, self.part, one.rows, owner, self.size)[1]
            for owner, one in enumerate(self.all_dependencies)
        ]
        return BlockStats(
            num_edges=0,
            num_sent=int(sum(counts[rank] for counts in recomputed)),
            num_received=int(recomputed[rank].sum()),
            exchanged=any(bool(counts.any()) for counts in recomputed),
        )

    def own_rows(self, rank: int) -> Tensor:
        return (self.part == rank).nonzero().view(-1)

    def layer_rows(self, rank: int) -> Sequence[Tensor]:
        needed = self.dependencies(rank)
        return [*(needed.rows[: hop.num_inputs] for hop in needed.hops), needed.own]

    def layer_blocks(self, rank: int) -> Sequence[BlockSize]:
        return [BlockSize.of(hop.block) for hop in self.dependencies(rank).hops]

    def resident_edges(self, rank: int) -> Sequence[tuple[int, Collection[int]]]:
        """Those of its blocks, and again those of sums over rows that come, which are by where these come from."""
        hops = self.dependencies(rank).hops
        blocks: dict[int, tuple[int, set[int]]] = {id(hop.block): (hop.block.num_edges, set()) for hop in hops}
        slices: dict[int, tuple[int, set[int]]] = {}
        for op in self.work.outline(self.traits, training=True):
            for number in op.hops:
                block = self.block(rank, op, number)
                if is_sum(op, number) and block.exchanged:
                    slices.setdefault(id(hops[number]), (block.num_edges, set()))[1].add(number)
                else:
                    blocks[id(hops[number].block)][1].add(number)
        return [*blocks.values(), *slices.values()]

    def feature_copy_bytes(self, op: GraphOperation, rank: int) -> int:
        """Those of all sources, where the rank answers for some of them alone."""
        if not op.hops or op.origin == "rows":
            return 0
        hop = self.dependencies(rank).hops[op.hop]
        return hop.block.num_sources * op.width * self.work.itemsize if len(hop.fetched) else 0

    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        itemsize = self.work.itemsize
        if op.op == "embed":
            embedded = self.embedding_exchange(rank)
            return [embedded.fetch(op.width * itemsize)] if embedded.exchanged else []
        return operations(op, {number: self.block(rank, op, number) for number in op.hops}, itemsize)

    def kernel_memory(self, op: GraphOperation, rank: int) -> KernelMemory:
        """That of the kernels on the rank's block; rows on their way; of an attention, those of all sources at once."""
        assert isinstance(op.op, Aggregate)
        itemsize, hops = self.work.itemsize, self.dependencies(rank).hops
        hop, block = hops[op.hops[0]], self.block(rank, op, op.hops[0])
        steps = len(op.hops)
        made = estimate_kernel_memory(
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
            wide = max(itemsize, SUM_BYTES) // itemsize
            rounded = wide if wide > 1 else 0  # results and gradients, as they are summed before they are rounded
            made_of = targets * wide if isinstance(op.op, Sum) else sources  # by those that came, or all side by side
            added = made_of + targets * rounded
            given_back = 0 if self.is_covered(op, op.hops[0]) else own * wide  # sums add to the rows' gradients at once
            back = max(2 * received + targets, received + sent + given_back + own * rounded)
            return made.moved(forward=sent + received + added, backward=back) if crosses else made
        if not crosses:
            return made
        right = hop.block.num_targets * op.logit_width * itemsize
        several = len(op.op.source) > 1
        saved = sources + right  # until the kernels have made gradients of all sources, which go on by themselves
        behind = sources + received + (1 + several) * sent + own
        back = max(sources, behind - made.saved - made.backward - saved) - own
        return replace(made, saves_rows=0).moved(forward=(1 + several) * sent + received, saved=saved, backward=back)

    def place(self, group: Group, *, seed: int = 0) -> PlacedVertices:
        return PlacedVertices(self, group, seed=seed)

    def make_halo(self, route: Route, group: Group, name: str) -> Halo:
        """The halo of one block."""
        optimisations = self.work.optimisations
        return Halo(route, group, name=name, ring=optimisations.ring, overlap=optimisations.overlap)


@dataclass(frozen=True, kw_only=True, eq=False)
class VertexStepInputs(StepInputs):
    """A rank's vertices in a step, the blocks of their in-edges, and the halos that bring what these lack."""

    needed: Dependencies
    blocks: Sequence[tuple[Block, ...]]
    """Of each of the model's stages."""
    exchanges: Sequence[Halos]

    @classmethod
    def of(cls, plan: VertexPlan, placed: ResidentPlaced) -> VertexStepInputs:
        """That of a plan of a step; all ranks call it."""
        group, needed, whole = placed.group, plan.dependencies(placed.group.rank), placed.topology
        asked = plan.work.outline(plan.traits, training=True)
        row_ids = whole.ids[needed.rows].to(group.device)
        embedded = make_embedded_halo(plan.work, needed, plan.part, group)
        made = make_blocks(placed, needed, asked, plan.covered, plan.make_halo)
        blocks = [tuple(made[hop] for hop in hops) for hops in plan.work.stage_hops(plan.traits)]
        return cls(
            input_rows=needed.rows,
            inputs=placed.make_inputs(needed.rows),
            exchanges=[Halos(some, whole, row_ids, needed.num_own, group, embedded) for some in blocks],
            vertices=needed.own,
            needed=needed,
            blocks=blocks,
        )


class PlacedVertices(ResidentPlaced):
    """A rank's vertices, and its shares of them."""

    plan: VertexPlan

    def __init__(self, plan: VertexPlan, group: Group, *, seed: int) -> None:
        super().__init__(plan, group, plan.own_rows(group.rank), seed=seed)
        if plan in plan.step_plans.values():
            self.whole  # noqa: B018  # before the first step

    @cached_property
    def topology(self) -> Topology:
        """The whole graph's, on the host: blocks take degrees from it."""
        return whole_topology(self.work, "cpu")

    @cached_property
    def whole(self) -> VertexStepInputs:
        with self.group.meter.during("setup"):
            return self.plan.make_step_inputs(self)

    def describe(self) -> dict[str, Any]:
        plan = next(iter(self.plan.step_plans.values()))
        assert isinstance(plan, VertexPlan)
        assert isinstance(self.rows, Tensor)
        needed, known = plan.dependencies(self.group.rank), super().describe()
        again = plan.part[needed.rows] != self.group.rank
        cached = [int(again[: hop.num_inputs].sum()) for hop in needed.hops]
        asked = plan.work.outline(plan.traits, training=True)
        fetching = [any(number in op.hops and is_fetched(op, number) for op in asked) for number in range(len(cached))]
        if needed.limited:
            known["summary"] = f"--cache-memory ends the caching at {max(cached):,} vertices, the others are fetched"
        return known | {
            "vertices": len(self.plan.own_rows(self.group.rank)),
            "cached": cached,
            "fetched": [
                sum(hop.cover.received if number in plan.covered else hop.received) * fetching[number]
                for number, hop in enumerate(needed.hops)
            ],
            "cached_bytes": needed.cached_bytes,
            "limited": needed.limited,
            "choice_seconds": needed.choice_seconds,
        }

    def exchange(self, stage: int) -> Halos:
        return self.whole.exchanges[stage]


def num_own_edges(block: Adjacency, num_inputs: int) -> int:
    """The edges of a block whose sources are its inputs."""
    return int((block.indices < num_inputs).sum())


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
