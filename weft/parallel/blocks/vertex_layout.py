"""Layout of vertex parallelism: each rank has vertices with all their in-edges, and fetches or recomputes sources."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from weft.cost import Operation
from weft.nn import (
    SUM_BYTES,
    Aggregate,
    BlockSize,
    GraphOperation,
    Inputs,
    KernelMemory,
    ReceptiveField,
    Sum,
    ViewTraits,
    Workload,
    estimate_kernel_memory,
)
from weft.parallel.blocks.blocks import Block, Halos, PlacedRows, fetched_width, is_fetched, operations
from weft.parallel.blocks.caching_costs import caching_costs
from weft.parallel.blocks.embedding_rows import make_embedded_halo
from weft.parallel.blocks.make_blocks import MakeHalo, make_blocks, plain_halo
from weft.parallel.blocks.vertex_blocks import VertexBlocks
from weft.parallel.layout import Layout, StepInputs
from weft.partition import Dependencies


class VertexLayout(Layout):
    """The vertices of each rank with their in-edges, and the rows that it fetches for them.

    Args:
        blocks: Vertices that each rank computes and fetches, and sizes of its blocks.
    """

    def __init__(self, blocks: VertexBlocks) -> None:
        super().__init__(blocks.work, blocks.size, blocks.traits)
        self.blocks = blocks

    @classmethod
    def of_receptive_field(cls, work: Workload, traits: ViewTraits) -> VertexLayout:
        """Return the layout of a receptive field on a single rank: each aggregate has a block with its own rows.

        Args:
            work: The workload with the receptive field.
            traits: Properties of views on all rows.
        """
        assert work.receptive_field is not None
        traits = traits._replace(shrinks_rows=True)
        caching = caching_costs(work, work.outline(traits, training=True), ratio=0.0)
        return cls(VertexBlocks(work, 1, None, caching, traits))

    def restrict(self, field: ReceptiveField) -> VertexLayout:
        """Return the layout of the same ranks, with the same cached sources, on a receptive field."""
        return VertexLayout(self.blocks.restrict(self.work.restrict(field)))

    @property
    def part(self) -> Tensor:
        return self.blocks.part

    def release(self) -> None:
        self.blocks.release()

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
        inputs, sources, targets = (n * row for n in (hop.num_inputs, hop.block.num_sources, hop.block.num_targets))
        sent, received = (n * row * is_exchanged for n in (block.num_sent, block.num_received))
        if op.op.plain:
            # Low-precision rows are summed in float32: results and gradients exist twice until they are rounded.
            float32_size = max(itemsize, SUM_BYTES) // itemsize
            extra_results = float32_size if float32_size > 1 else 0
            # A sum adds up rows as they arrive; other aggregates copy all sources into one tensor.
            read = targets * float32_size if isinstance(op.op, Sum) else sources
            temporary = read + targets * extra_results
            # Covered sums add received gradients to those of the rows directly.
            gradients = 0 if self.blocks.is_covered(op, op.hops[0]) else inputs * float32_size
            back = max(2 * received + targets, received + sent + gradients + inputs * extra_results)
            return kernels.moved(forward=sent + received + temporary, backward=back) if is_exchanged else kernels
        if not is_exchanged:
            return kernels
        target_rows = hop.block.num_targets * op.logit_width * itemsize
        packed = len(op.op.source) > 1
        # Until the kernels have computed the gradients of all sources. Each later step saves those that it fetched.
        fetched = (hop.block.num_sources - hop.block.num_targets) * op.width * itemsize
        saved = sources + target_rows + (steps - 1) * fetched
        after_kernels = sources + received + (1 + packed) * sent + inputs
        back = max(sources, after_kernels - kernels.saved - kernels.backward - saved) - inputs
        return replace(kernels, saves_rows=0).moved(forward=(1 + packed) * sent + received, saved=saved, backward=back)


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
    def of(
        cls,
        layout: VertexLayout,
        placed: PlacedRows,
        make_inputs: Callable[[Tensor], Inputs],
        make_halo: MakeHalo = plain_halo,
    ) -> VertexStepInputs:
        """Create the step inputs of a layout; all ranks must call it.

        Args:
            layout: Layout of the steps.
            placed: The plan on this rank.
            make_inputs: Function that returns the rows of some vertices that the model begins with.
            make_halo: Function that creates a halo.
        """
        work, group, whole = layout.work, placed.group, placed.topology
        needed = layout.blocks.dependencies(group.rank)
        row_ids = whole.ids[needed.rows].to(group.device)
        embedded_halo = make_embedded_halo(work, needed, layout.part, group)
        all_blocks = make_blocks(
            placed, needed, work.outline(layout.traits, training=True), layout.blocks.covered, make_halo
        )
        blocks = [tuple(all_blocks[hop] for hop in hops) for hops in work.stage_hops(layout.traits)]
        return cls(
            input_rows=needed.rows,
            inputs=make_inputs(needed.rows),
            exchanges=[
                Halos(stage_blocks, whole, row_ids, needed.num_own, group, embedded_halo) for stage_blocks in blocks
            ],
            vertices=needed.owned,
            needed=needed,
            blocks=blocks,
        )
