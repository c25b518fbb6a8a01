"""Plans of vertex parallelism (NeutronStar, sections 2.2 and 3): a rank has vertices with all edges into them.

Remote source rows are fetched at every layer (`communicated`, algorithm 3), recomputed from constant features
(`cached`, algorithm 2), or whichever costs less (`hybrid`, algorithm 4). The three differ only in their `Caching`.
Recomputing a vertex on several ranks changes no number: dropout is keyed by vertex, and sums over vertices count each
once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from weft.comm import Group, Halo, Route
from weft.cost import Operation
from weft.nn import (
    SPREAD,
    SUM_BYTES,
    Aggregate,
    BlockSize,
    GraphOperation,
    KernelMemory,
    ReceptiveField,
    Sum,
    Topology,
    estimate_kernel_memory,
)
from weft.parallel.blocks.blocks import Block, Halos, fetched_width, is_fetched, operations
from weft.parallel.blocks.caching_costs import NOMINAL, caching_costs
from weft.parallel.blocks.embedding_rows import make_embedded_halo
from weft.parallel.blocks.make_blocks import make_blocks
from weft.parallel.blocks.vertex_blocks import VertexBlocks
from weft.partition import Caching, Dependencies
from weft.strategies.base import RECOMPUTING, HybridOptions, Options, VertexOptions, whole_topology
from weft.strategies.resident import ResidentPlaced, ResidentPlan, StepInputs


class VertexPlan(ResidentPlan):
    """Plan of vertex parallelism, exact, that caches a share of the remote sources and fetches the others."""

    options_type: ClassVar[type[Options]] = VertexOptions
    optimisations: ClassVar[tuple[str, ...]] = ("reach", "ring", "overlap", "cover")
    traits = RECOMPUTING
    ratio: ClassVar[float | None] = None
    """Share of remote sources that is cached; None: as the options say, or by cost."""
    options: VertexOptions

    def solve(self, state: Any) -> None:
        del state
        self.blocks = self.vertex_blocks()
        """Vertices that each rank computes and fetches, and sizes of its blocks."""

    def vertex_blocks(self) -> VertexBlocks:
        """Return the blocks of the partition that the options have."""
        covers, partition = "cover" in self.optimisations, self.options.partition
        return VertexBlocks(self.work, self.size, partition, self.make_caching(), self.traits, covers=covers)

    def make_caching(self) -> Caching:
        """Return the costs and limits that decide which remote sources are cached."""
        work, options = self.work, self.options
        caching_options = options if isinstance(options, HybridOptions) else HybridOptions()
        return caching_costs(
            work,
            work.outline(self.traits, training=True),
            self.machine or NOMINAL,
            ratio=caching_options.cache_ratio if self.ratio is None else self.ratio,
            max_bytes=caching_options.cache_memory,
        )

    @property
    def part(self) -> Tensor:
        return self.blocks.part

    def release(self) -> None:
        super().release()
        self.blocks.release()

    def restrict_to(self, field: ReceptiveField) -> VertexPlan:
        plan = type(self)(self.work.restrict(field), self.size, self.options, self.machine)
        plan.blocks = self.blocks.restrict(plan.work)
        return plan

    def make_step_inputs(self, placed: ResidentPlaced) -> VertexStepInputs:
        return VertexStepInputs.of(self, placed)

    def own_rows(self, rank: int) -> Tensor:
        return (self.part == rank).nonzero().view(-1)

    def layer_rows(self, rank: int) -> Sequence[Tensor]:
        return self.blocks.layer_rows(rank)

    def layer_blocks(self, rank: int) -> Sequence[BlockSize]:
        return self.blocks.layer_blocks(rank)

    def resident_edges(self, rank: int) -> Sequence[tuple[int, Collection[int]]]:
        return self.blocks.resident_edges(rank)

    def feature_copy_bytes(self, op: GraphOperation, rank: int) -> int:
        """Return the bytes of the features of all sources, which are copied if some are not the rank's own.

        Args:
            op: The aggregate.
            rank: The rank.
        """
        if not op.hops or op.origin == "rows":
            return 0
        hop = self.blocks.dependencies(rank).hops[op.hop]
        return hop.block.num_sources * op.width * self.work.itemsize if len(hop.fetched) else 0

    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        itemsize = self.work.itemsize
        if op.op == "embed":
            embedded = self.blocks.embedding_exchange(rank)
            return [embedded.fetch(op.width * itemsize)] if embedded.exchanged else []
        return operations(op, {number: self.blocks.sizes(rank, op, number) for number in op.hops}, itemsize)

    def kernel_memory(self, op: GraphOperation, rank: int) -> KernelMemory:
        """Return the memory of an aggregate's kernels and of its exchange on a rank.

        An aggregate with attention needs the rows of all sources at once; a sum adds up rows as they arrive.

        Args:
            op: The aggregate.
            rank: The rank.
        """
        assert isinstance(op.op, Aggregate)
        itemsize, hops = self.work.itemsize, self.blocks.dependencies(rank).hops
        hop, block = hops[op.hops[0]], self.blocks.sizes(rank, op, op.hops[0])
        steps = len(op.hops)
        kernels = estimate_kernel_memory(
            op.op,
            num_targets=hop.block.num_targets,
            num_edges=hop.block.num_edges,
            width=op.width,
            itemsize=itemsize,
            steps=steps,
        )
        row, is_exchanged = fetched_width(op, op.hops[0]) * itemsize, block.exchanged and is_fetched(op, op.hops[0])
        own_rows, sources, targets = (n * row for n in (hop.num_inputs, hop.block.num_sources, hop.block.num_targets))
        sent, received = (n * row * is_exchanged for n in (block.num_sent, block.num_received))
        if op.op.plain:
            # Low-precision rows are summed in float32: results and gradients exist twice until they are rounded.
            float32_size = max(itemsize, SUM_BYTES) // itemsize
            extra_results = float32_size if float32_size > 1 else 0
            # A sum adds up rows as they arrive; other aggregates copy all sources into one tensor.
            inputs = targets * float32_size if isinstance(op.op, Sum) else sources
            temporary = inputs + targets * extra_results
            # Covered sums add received gradients to those of the rows directly.
            gradients = 0 if self.blocks.is_covered(op, op.hops[0]) else own_rows * float32_size
            back = max(2 * received + targets, received + sent + gradients + own_rows * extra_results)
            return kernels.moved(forward=sent + received + temporary, backward=back) if is_exchanged else kernels
        if not is_exchanged:
            return kernels
        target_rows = hop.block.num_targets * op.logit_width * itemsize
        packed = len(op.op.source) > 1
        saved = sources + target_rows  # until the kernels have computed the gradients of all sources
        after_kernels = sources + received + (1 + packed) * sent + own_rows
        back = max(sources, after_kernels - kernels.saved - kernels.backward - saved) - own_rows
        return replace(kernels, saves_rows=0).moved(forward=(1 + packed) * sent + received, saved=saved, backward=back)

    def place(self, group: Group, *, seed: int = 0) -> PlacedVertices:
        return PlacedVertices(self, group, seed=seed)

    def make_halo(self, route: Route, group: Group, name: str) -> Halo:
        """Create the halo of one block.

        Args:
            route: Rows that ranks exchange.
            group: The ranks.
            name: Name of the exchange.
        """
        optimisations = self.work.optimisations
        return Halo(route, group, name=name, ring=optimisations.ring, overlap=optimisations.overlap)


@dataclass(frozen=True, kw_only=True, eq=False)
class VertexStepInputs(StepInputs):
    """Vertices of a rank in a step, the blocks of their in-edges, and the halos that bring missing rows."""

    needed: Dependencies
    """Vertices that the rank computes and fetches, and its edges."""
    blocks: Sequence[tuple[Block, ...]]
    """Blocks of each stage of the model."""
    exchanges: Sequence[Halos]
    """Exchange of each stage of the model."""

    @classmethod
    def of(cls, plan: VertexPlan, placed: ResidentPlaced) -> VertexStepInputs:
        """Create the step inputs of a plan; all ranks must call it.

        Args:
            plan: Plan of the steps.
            placed: The plan on this rank.
        """
        group, needed, whole = placed.group, plan.blocks.dependencies(placed.group.rank), placed.topology
        operations = plan.work.outline(plan.traits, training=True)
        row_ids = whole.ids[needed.rows].to(group.device)
        embedded_halo = make_embedded_halo(plan.work, needed, plan.part, group)
        all_blocks = make_blocks(placed, needed, operations, plan.blocks.covered, plan.make_halo)
        blocks = [tuple(all_blocks[hop] for hop in hops) for hops in plan.work.stage_hops(plan.traits)]
        return cls(
            input_rows=needed.rows,
            inputs=placed.make_inputs(needed.rows),
            exchanges=[
                Halos(stage_blocks, whole, row_ids, needed.num_own, group, embedded_halo) for stage_blocks in blocks
            ],
            vertices=needed.owned,
            needed=needed,
            blocks=blocks,
        )


class PlacedVertices(ResidentPlaced):
    """A plan of vertex parallelism on its rank.

    Args:
        plan: The plan.
        group: The ranks.
        seed: Seed of dropout.
    """

    plan: VertexPlan

    def __init__(self, plan: VertexPlan, group: Group, *, seed: int) -> None:
        super().__init__(plan, group, plan.own_rows(group.rank), seed=seed)
        if plan in plan.step_plans.values():
            self.whole  # noqa: B018  # before the first step

    @cached_property
    def topology(self) -> Topology:
        """Topology of the whole graph, on the host; blocks take degrees from it."""
        return whole_topology(self.work, "cpu")

    @cached_property
    def whole(self) -> VertexStepInputs:
        with self.group.meter.during("setup"):
            return self.plan.make_step_inputs(self)

    def describe(self) -> dict[str, Any]:
        plan = next(iter(self.plan.step_plans.values()))
        assert isinstance(plan, VertexPlan)
        assert isinstance(self.rows, Tensor)
        needed, facts = plan.blocks.dependencies(self.group.rank), super().describe()
        recomputed = plan.part[needed.rows] != self.group.rank
        cached = [int(recomputed[: hop.num_inputs].sum()) for hop in needed.hops]
        operations = plan.work.outline(plan.traits, training=True)
        fetching = [
            any(number in op.hops and is_fetched(op, number) for op in operations) for number in range(len(cached))
        ]
        if needed.limited:
            facts["summary"] = f"--cache-memory limits caching to {max(cached):,} vertices; the others are fetched"
        return facts | {
            "vertices": len(self.plan.own_rows(self.group.rank)),
            "cached": cached,
            "fetched": [
                sum(hop.cover.received if number in plan.blocks.covered else hop.received) * fetching[number]
                for number, hop in enumerate(needed.hops)
            ],
            "cached_bytes": needed.cached_bytes,
            "limited": needed.limited,
            "choice_seconds": needed.choice_seconds,
        }

    def exchange(self, stage: int) -> Halos:
        return self.whole.exchanges[stage]


class CommunicatedPlan(VertexPlan):
    """Plan of `communicated`: every remote source is fetched at every layer."""

    name = "communicated"
    traits = SPREAD
    ratio = 0.0


class CachedPlan(VertexPlan):
    """Plan of `cached`: every remote source is recomputed, so that only gradients of weights cross the network."""

    name = "cached"
    ratio = 1.0


class HybridPlan(VertexPlan):
    """Plan of `hybrid`: each remote source is cached or fetched, whichever costs less."""

    name = "hybrid"
    options_type = HybridOptions
    flags = ("machine", "measure")
