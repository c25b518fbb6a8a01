"""Layout of vertex parallelism: each rank has vertices with all their in-edges, and fetches or recomputes sources."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from weft.comm import Group, Halo, Route
from weft.cost import Operation
from weft.nn import (
    BlockSize,
    GraphOperation,
    Inputs,
    ReceptiveField,
    TypedBlockSize,
    ViewTraits,
    Workload,
)
from weft.parallel.blocks.blocks import Block, Halos, PlacedRows, operations
from weft.parallel.blocks.caching_costs import caching_costs
from weft.parallel.blocks.embedding_rows import EmbeddedHalo, make_embedded_halo
from weft.parallel.blocks.make_blocks import make_blocks
from weft.parallel.blocks.meta_blocks import MetaRank, meta_blocks, meta_embedded_halo
from weft.parallel.blocks.vertex_blocks import VertexBlocks
from weft.parallel.layout import Layout, StepInputs
from weft.partition import Dependencies
from weft.runtime.native import Allocate


class VertexLayout(Layout):
    """The vertices of each rank with their in-edges, and the rows that it fetches for them.

    Args:
        blocks: Vertices that each rank computes and fetches, and sizes of its blocks.
    """

    def __init__(self, blocks: VertexBlocks) -> None:
        super().__init__(blocks.work, blocks.size, blocks.traits)
        self.blocks = blocks

    @classmethod
    def of_receptive_field(cls, work: Workload, traits: ViewTraits, allocate: Allocate | None = None) -> Self:
        """Return the layout of a receptive field on a single rank: each aggregate has a block with its own rows.

        Args:
            work: The workload with the receptive field.
            traits: Properties of views on all rows.
            allocate: Allocates the sources of edges, see `make_dependencies`.
        """
        assert work.receptive_field is not None
        traits = traits._replace(shrinks_rows=True)
        caching = caching_costs(work, work.outline(traits, training=True), ratio=0.0)
        return cls(VertexBlocks(work, 1, None, caching, traits, allocate=allocate))

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

    def typed_blocks(self, rank: int) -> Sequence[TypedBlockSize]:
        return self.blocks.typed_blocks(rank)

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

    def make_halo(self, route: Route, group: Group, name: str) -> Halo:
        """Return the halo of a block.

        Args:
            route: Rows that ranks exchange.
            group: The ranks.
            name: Name of the exchange.
        """
        optimisations = self.work.optimisations
        return Halo(route, group, name=name, ring=optimisations.ring, overlap=optimisations.overlap)

    def meta_exchanges(self, rank: int, *, training: bool) -> Sequence[Halos]:
        del training
        work, placed = self.work, MetaRank(self.work, Group(rank, self.size, device="meta"))
        operations = work.outline(self.traits, training=True)
        relation_rows = self.layer_sizes(rank).relation_rows
        blocks = meta_blocks(placed, self.blocks, operations, relation_rows, self.make_halo)
        stages = [tuple(blocks[hop] for hop in hops) for hops in work.stage_hops(self.traits)]
        embedded = self.meta_embedded(placed)
        return [self.meta_halos(stage, placed, embedded) for stage in stages]

    def meta_embedded(self, placed: MetaRank) -> EmbeddedHalo | None:
        """Return the exchange of embedding rows on the meta device; None if a rank has all that it needs."""
        return meta_embedded_halo(placed, self.blocks)

    def meta_halos(self, blocks: tuple[Block, ...], placed: MetaRank, embedded: EmbeddedHalo | None) -> Halos:
        """Return the exchange of a stage on the meta device.

        Args:
            blocks: Block of each step.
            placed: The rank.
            embedded: Exchange of embedding rows.
        """
        needed = self.blocks.dependencies(placed.group.rank)
        row_ids = torch.empty(len(needed.rows), dtype=torch.int64, device="meta")
        return Halos(blocks, placed.topology, row_ids, needed.num_own, placed.group, embedded)


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
    ) -> VertexStepInputs:
        """Create the step inputs of a layout; all ranks must call it.

        Args:
            layout: Layout of the steps.
            placed: The plan on this rank.
            make_inputs: Function that returns the rows of some vertices that the model begins with.
        """
        work, group, whole = layout.work, placed.group, placed.topology
        needed = layout.blocks.dependencies(group.rank)
        row_ids = whole.ids_of(needed.rows).to(group.device)
        embedded_halo = make_embedded_halo(work, needed, layout.part, group)
        operations = work.outline(layout.traits, training=True)
        all_blocks = make_blocks(placed, needed, operations, layout.blocks.covered, layout.make_halo)
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
