"""What a step on a mini-batch does on each rank, by what has been drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.cost import Operation, Trace, all_reduce
from weft.nn import SPREAD, GraphOperation, LayerSizes, Workload
from weft.runtime.kernel_call import KernelCall
from weft.strategies.split.feature_cache import feature_bytes
from weft.strategies.split.sampler import SampledBatch
from weft.strategies.vertex.blocks import BlockStats, operations
from weft.strategies.vertex.plan import VertexPlan


class BatchPlan(VertexPlan):
    """One step on a mini-batch that is drawn already, of which everything on all ranks is known.

    drawn: the batch on each rank. draws: whether the step draws, or has been drawn once for all. prefetched: whether a
    thread draws.
    """

    name = "batch"
    optimisations = ()  # no cover: a matching for every step is not made
    traits = SPREAD._replace(shrinks_rows=True)
    ratio = 0.0
    whole_graph = (True,)

    def __init__(
        self, work: Workload, drawn: Sequence[SampledBatch], *, includes_sampling: bool, prefetched: bool = False
    ) -> None:
        super().__init__(work, len(drawn))
        self.rank_batches, self.includes_sampling, self.prefetched = drawn, includes_sampling, prefetched

    def dependencies(self, rank: int) -> SampledBatch:
        return self.rank_batches[rank]

    def block(self, rank: int, op: GraphOperation, number: int) -> BlockStats:
        exchanged = self.rank_batches[rank].hops[number].route is not None
        return replace(super().block(rank, op, number), exchanged=exchanged)

    def layer_sizes(self, rank: int) -> LayerSizes:
        levels, types = super().layer_sizes(rank), self.work.graph.edge_type
        if types is None:
            return levels
        ends = [(hop.block.edges()[1], types[hop.edge_ids.long()]) for hop in self.rank_batches[rank].hops]
        pairs = [(targets * len(self.work.graph.relations) + relation).unique() for targets, relation in ends]
        return replace(levels, relation_rows=tuple(len(one) for one in pairs))

    def embedding_exchange(self, rank: int) -> BlockStats:
        del rank
        return BlockStats(num_edges=0)

    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        if op.op == "embed":
            return []
        blocks = {number: self.block(rank, op, number) for number in op.hops}
        return operations(op, blocks, self.work.itemsize, constants=True)

    def trace(self, rank: int = 0, *, training: bool) -> Trace:
        """And how the batch is made: what is drawn and read, and who asks whom for what, hop by hop from the last."""
        step = super().trace(rank, training=training)
        if not self.includes_sampling:
            return step
        drawn = self.rank_batches[rank]
        made = [Operation(kind="dense", calls=self._drawing(drawn))]
        if self.size > 1:
            for route in drawn.routes:
                asking, wanted, asked = (8 * count for count in (self.size - 1, sum(route.received), sum(route.sent)))
                made += [
                    Operation(kind="collective", tag="sampling", bytes_sent=asking, bytes_received=asking),
                    Operation(kind="collective", tag="sampling", bytes_sent=wanted, bytes_received=asked),
                ]
            made.append(all_reduce("sampling", len(drawn.level_counts), 8, self.size))
        made = [replace(one, prefetched=self.prefetched) for one in made]
        return Trace(operations=(*made, *step.operations))

    def _drawing(self, drawn: SampledBatch) -> tuple[KernelCall, ...]:
        """The kernels that draw a batch, and the pass that reads its features."""
        calls = [KernelCall("draw", (hop.block.num_edges, hop.block.num_targets)) for hop in drawn.hops]
        read = int(feature_bytes(self.work.graph, self.work.itemsize)[drawn.rows].sum())
        return *calls, KernelCall("pass", (2 * read,))
