"""Plans of vertex parallelism (NeutronStar, sections 2.2 and 3): a rank has vertices with all edges into them.

Remote source rows are fetched at every layer (`communicated`, algorithm 3), recomputed from constant features
(`cached`, algorithm 2), or whichever costs less (`hybrid`, algorithm 4). The three differ only in their `Caching`.
Recomputing a vertex on several ranks changes no number: dropout is keyed by vertex, and sums over vertices count each
once.
"""

from __future__ import annotations

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
    ReceptiveField,
    Sum,
    Topology,
    embeddings,
    estimate_kernel_memory,
    is_embedded,
)
from weft.parallel.blocks.blocks import Block, BlockStats, Halos, fetched_width, is_fetched, is_sum, operations
from weft.parallel.blocks.embedding_rows import make_embedded_halo, recomputed_by_owner
from weft.parallel.blocks.make_blocks import make_blocks
from weft.partition import Caching, Choice, Dependencies, make_dependencies, range_parts
from weft.strategies.base import Options, whole_topology
from weft.strategies.resident import ResidentPlaced, ResidentPlan, StepInputs
from weft.strategies.vertex.costs import NOMINAL, caching_costs
from weft.utils.errors import InputError

MAX_LEVELS = 100
"""Limit of aggregates with caching, since a vertex's layer boundary is stored in an int8."""


@dataclass(frozen=True, kw_only=True)
class VertexOptions(Options):
    """Options of vertex parallelism."""

    partition: Tensor | None = field(default=None, repr=False, compare=False)
    """Rank of every vertex, int32 [N]; None: contiguous ranges."""


@dataclass(frozen=True, kw_only=True)
class HybridOptions(VertexOptions):
    """Options of `hybrid`: which remote sources are cached."""

    cache_ratio: float | None = None
    """Share of remote sources to cache at each layer; None: wherever it costs less."""
    cache_memory: int | None = None
    """Limit of a rank's cached vertices in bytes; None: no limit."""


class VertexPlan(ResidentPlan):
    """Plan of vertex parallelism, exact, that caches a share of the remote sources and fetches the others."""

    options_type: ClassVar[type[Options]] = VertexOptions
    optimisations: ClassVar[tuple[str, ...]] = ("reach", "ring", "overlap", "cover")
    traits = SPREAD._replace(shrinks_rows=True, alternative="--strategy communicated")
    ratio: ClassVar[float | None] = None
    """Share of remote sources that is cached; None: as the options say, or by cost."""
    options: VertexOptions

    def solve(self, state: Any) -> None:
        del state
        self._dependencies: dict[int, Dependencies] = {}
        self._choices: dict[int, Choice] = {}
        self.caching = self.make_caching()
        if len(self.caching.costs) > MAX_LEVELS and self.caching.ratio != 0:
            many = f"the model has {len(self.caching.costs)} aggregates, but caching supports at most {MAX_LEVELS}"
            raise InputError(f"{many}: use --strategy communicated")

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

    @cached_property
    def part(self) -> Tensor:
        partition = self.options.partition
        return range_parts(self.work.graph.in_edges, self.size) if partition is None else partition

    def dependencies(self, rank: int) -> Dependencies:
        """Return the vertices that a rank computes itself and those that it fetches, for each layer."""
        if rank not in self._dependencies:
            if rank not in self._choices:
                edges, caching = self.work.graph.in_edges, self.caching_of(rank)
                self._choices[rank] = Choice.of(edges, self.part, rank, caching)
            field = self.work.receptive_field
            last_read = None if field is None else field.last_boundary
            self._dependencies[rank] = self._dependencies_by(
                self.caching, rank, choice=self._choices[rank], last_read=last_read
            )
        return self._dependencies[rank]

    def restrict_to(self, field: ReceptiveField) -> VertexPlan:
        plan = type(self)(
            self.work.restrict(field), self.size, replace(self.options, partition=self.part), self.machine
        )
        plan.caching, plan._choices = self.caching, self._choices  # of the whole graph
        return plan

    def make_step_inputs(self, placed: ResidentPlaced) -> VertexStepInputs:
        return VertexStepInputs.of(self, placed)

    def caching_of(self, rank: int) -> Caching:
        """Return the costs of a rank.

        Fetching a row for a sum costs less if partial sums replace source rows: by the ratio of the rows that are sent.
        """
        caching, covered = self.caching, sorted(self.covered)
        if caching.ratio is not None or not covered:
            return caching
        (hop,) = self._dependencies_by(replace(caching, costs=caching.costs[:1], ratio=0.0), rank).hops
        costs = caching.costs.clone()
        costs[covered, 2] *= sum(hop.cover.received) / max(len(hop.fetched), 1)
        return replace(caching, costs=costs)

    def _dependencies_by(self, caching: Caching, rank: int, **options: Any) -> Dependencies:
        return make_dependencies(self.work.graph.in_edges, self.part, rank, self.size, caching, **options)

    @property
    def all_dependencies(self) -> list[Dependencies]:
        """Dependencies of all ranks, from which follows what each rank sends."""
        return [self.dependencies(rank) for rank in range(self.size)]

    def release(self) -> None:
        """Release the dependencies, which grow with the graph and can be computed again."""
        super().release()
        self._dependencies.clear()
        self._choices.clear()

    @cached_property
    def covered(self) -> frozenset[int]:
        """Numbers of the aggregates that are sums over fetched rows and fetch the fewest rows that can replace them."""
        if "cover" not in self.optimisations or not self.work.optimisations.cover:
            return frozenset()
        operations = self.work.outline(self.traits, training=True)
        return frozenset(number for op in operations for number in op.hops if is_sum(op, number))

    def is_covered(self, op: GraphOperation, number: int) -> bool:
        """Return whether a step of an aggregate receives partial sums of other ranks.

        Args:
            op: The aggregate.
            number: Number of the aggregate over edges.
        """
        return number in self.covered and is_sum(op, number)

    def block(self, rank: int, op: GraphOperation, number: int) -> BlockStats:
        """Return the sizes of a rank's block.

        Args:
            rank: The rank.
            op: The aggregate.
            number: Number of the aggregate over edges.
        """
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
        """Return the number of embedding rows that a rank sends and receives."""
        if not embeddings(self.work.model):
            return BlockStats(num_edges=0)
        embedded = is_embedded(self.work.graph)
        recomputed = [
            recomputed_by_owner(embedded, self.part, needed.rows, owner, self.size)[1]
            for owner, needed in enumerate(self.all_dependencies)
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
        return [*(needed.rows[: hop.num_inputs] for hop in needed.hops), needed.owned]

    def layer_blocks(self, rank: int) -> Sequence[BlockSize]:
        return [BlockSize.of(hop.block) for hop in self.dependencies(rank).hops]

    def resident_edges(self, rank: int) -> Sequence[tuple[int, Collection[int]]]:
        """Return the number of edges of each block of a rank, and the numbers of the aggregates over it.

        Sums over fetched rows have their edges a second time, sorted by the rank that sends the sources.
        """
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
        """Return the bytes of the features of all sources, which are copied if some are not the rank's own.

        Args:
            op: The aggregate.
            rank: The rank.
        """
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
        """Return the memory of an aggregate's kernels and of its exchange on a rank.

        An aggregate with attention needs the rows of all sources at once; a sum adds up rows as they arrive.

        Args:
            op: The aggregate.
            rank: The rank.
        """
        assert isinstance(op.op, Aggregate)
        itemsize, hops = self.work.itemsize, self.dependencies(rank).hops
        hop, block = hops[op.hops[0]], self.block(rank, op, op.hops[0])
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
            gradients = 0 if self.is_covered(op, op.hops[0]) else own_rows * float32_size
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
        group, needed, whole = placed.group, plan.dependencies(placed.group.rank), placed.topology
        operations = plan.work.outline(plan.traits, training=True)
        row_ids = whole.ids[needed.rows].to(group.device)
        embedded_halo = make_embedded_halo(plan.work, needed, plan.part, group)
        all_blocks = make_blocks(placed, needed, operations, plan.covered, plan.make_halo)
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
        needed, facts = plan.dependencies(self.group.rank), super().describe()
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
    """Return the number of edges of a block whose sources are its inputs.

    Args:
        block: The edges.
        num_inputs: Number of input rows.
    """
    return int((block.indices < num_inputs).sum())


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
