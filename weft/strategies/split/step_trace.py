"""Trace of a step on a mini-batch, from the batch that was sampled for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from weft.cost import Operation, Trace, all_reduce
from weft.nn import GraphOperation, LayerSizes, Workload
from weft.parallel.blocks.blocks import Block, BlockStats, operations
from weft.parallel.blocks.caching_costs import caching_costs
from weft.parallel.blocks.embedding_rows import EmbeddedHalo
from weft.parallel.blocks.meta_blocks import MetaRank
from weft.parallel.blocks.vertex_blocks import VertexBlocks
from weft.parallel.blocks.vertex_layout import VertexLayout
from weft.runtime.kernel_call import KernelCall
from weft.strategies.base import RECOMPUTING
from weft.strategies.split.batch_blocks import BatchHalos
from weft.strategies.split.feature_cache import feature_bytes
from weft.strategies.split.sampler import SampledBatch


class SampledBlocks(VertexBlocks):
    """Blocks of a batch that is already sampled.

    Args:
        whole: Blocks of the whole graph.
        batches: Part of the batch of each rank.
    """

    def __init__(self, whole: VertexBlocks, batches: Sequence[SampledBatch]) -> None:
        super().__init__(whole.work, whole.size, None, whole.caching, whole.traits)
        self.batches = batches

    def dependencies(self, rank: int) -> SampledBatch:
        return self.batches[rank]

    def sizes(self, rank: int, op: GraphOperation, number: int) -> BlockStats:
        exchanged = self.batches[rank].hops[number].route is not None
        return replace(super().sizes(rank, op, number), exchanged=exchanged)

    def embedding_exchange(self, rank: int) -> BlockStats:
        del rank
        return BlockStats(num_edges=0)


class BatchLayout(VertexLayout):
    """Layout of one step on a mini-batch that is already sampled.

    Args:
        work: The workload.
        batches: Part of the batch of each rank.
        includes_sampling: True if the step samples; False if the batch was sampled once for all steps.
        prefetched: True if a background thread samples.
    """

    def __init__(
        self, work: Workload, batches: Sequence[SampledBatch], *, includes_sampling: bool, prefetched: bool = False
    ) -> None:
        caching = caching_costs(work, work.outline(RECOMPUTING, training=True), ratio=0.0)
        # Without covers, which would need a matching for every step.
        super().__init__(SampledBlocks(VertexBlocks(work, len(batches), None, caching, RECOMPUTING), batches))
        self.rank_batches, self.includes_sampling, self.prefetched = batches, includes_sampling, prefetched

    def layer_sizes(self, rank: int) -> LayerSizes:
        sizes, types = super().layer_sizes(rank), self.work.graph.edge_type
        if types is None:
            return sizes
        count, hops = len(self.work.graph.relations), self.rank_batches[rank].hops
        relations = [(hop.block.edges()[1] * count + types[hop.edge_ids.long()]).unique() % count for hop in hops]
        relation_rows = (tuple(torch.bincount(relation, minlength=count).tolist()) for relation in relations)
        return replace(sizes, relation_rows=tuple(relation_rows))

    def meta_embedded(self, placed: MetaRank) -> None:
        del placed  # a batch selects rows itself

    def meta_halos(self, blocks: tuple[Block, ...], placed: MetaRank, embedded: EmbeddedHalo | None) -> BatchHalos:
        del embedded
        sizes = self.layer_sizes(placed.group.rank)
        ids = torch.empty(sizes.rows[0], dtype=torch.int64, device="meta")
        ends = sizes.rows[0], sizes.rows[-1]
        return BatchHalos(blocks, placed.topology, ids, ends, placed.group, ids.new_empty(sizes.num_embedded))

    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        if op.op == "embed":
            return []
        blocks = {number: self.blocks.sizes(rank, op, number) for number in op.hops}
        return operations(op, blocks, self.work.itemsize, constants=True)

    def trace(self, rank: int, *, training: bool) -> Trace:
        """Return the operations of the step, preceded by those that sample the batch and read its features.

        Args:
            rank: The rank.
            training: True for a training step.
        """
        step = super().trace(rank, training=training)
        if not self.includes_sampling:
            return step
        batch = self.rank_batches[rank]
        sampling = [Operation(kind="dense", calls=self._sampling_calls(batch))]
        # Hop by hop from the last: how many vertices each rank requests from each other, then their ids.
        if self.size > 1:
            for route in batch.routes:
                count_bytes, request_bytes, requested_bytes = (
                    8 * count for count in (self.size - 1, sum(route.received), sum(route.sent))
                )
                sampling += [
                    Operation(kind="collective", tag="sampling", bytes_sent=count_bytes, bytes_received=count_bytes),
                    Operation(
                        kind="collective", tag="sampling", bytes_sent=request_bytes, bytes_received=requested_bytes
                    ),
                ]
            sampling.append(all_reduce("sampling", len(batch.level_counts), 8, self.size))
        sampling = [replace(operation, prefetched=self.prefetched) for operation in sampling]
        return Trace(operations=(*sampling, *step.operations))

    def _sampling_calls(self, batch: SampledBatch) -> tuple[KernelCall, ...]:
        """Return the kernels that sample a batch, and the pass that reads its features."""
        calls = [KernelCall("draw", (hop.block.num_edges, hop.block.num_targets)) for hop in batch.hops]
        read = int(feature_bytes(self.work.graph, self.work.itemsize)[batch.rows].sum())
        return *calls, KernelCall("pass", (2 * read,))
