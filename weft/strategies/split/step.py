"""What a step on a mini-batch does on each rank, by what has been drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from weft.cost import Operation, Trace, all_reduce
from weft.nn import SPREAD, GraphOperation, Levels, Workload
from weft.partition import Dependencies
from weft.strategies.split.sampler import SampledHop, level_counts
from weft.strategies.vertex.blocks import BlockStats, operations
from weft.strategies.vertex.plan import VertexPlan


class BatchPlan(VertexPlan):
    """One step on a mini-batch that is drawn already, of which everything on all ranks is known."""

    name = "batch"
    optimisations = ()
    traits = SPREAD._replace(shrinks_rows=True)
    ratio = 0.0
    _drawn: Sequence[Dependencies]
    draws: bool
    """Whether the step draws, or has been drawn once for all."""

    @classmethod
    def of(cls, work: Workload, size: int, drawn: Sequence[Dependencies], *, draws: bool) -> BatchPlan:
        """drawn: the batch on each rank."""
        plan = cls(work, size)
        plan._drawn, plan.draws = drawn, draws
        return plan

    def dependencies(self, rank: int) -> Dependencies:
        return self._drawn[rank]

    @cached_property
    def covered(self) -> frozenset[int]:
        """None: a batch's halos are of sources, since a matching for every step is not made."""
        return frozenset()

    def block(self, rank: int, op: GraphOperation, number: int) -> BlockStats:
        hop = self._drawn[rank].hops[number]
        return replace(super().block(rank, op, number), exchanged=isinstance(hop, SampledHop) and hop.crosses)

    def levels(self, rank: int) -> Levels:
        levels, types = super().levels(rank), self.work.graph.edge_type
        if types is None:
            return levels
        ends = [(hop.block.edges()[1], types[hop.edge_ids.long()]) for hop in self._drawn[rank].hops]
        pairs = [(targets * len(self.work.graph.relations) + relation).unique() for targets, relation in ends]
        return replace(levels, relation_rows=tuple(len(one) for one in pairs))

    def embedded(self, rank: int) -> BlockStats:
        del rank
        return BlockStats(num_edges=0)

    def lower(self, op: GraphOperation, rank: int) -> list[Operation]:
        if op.op == "embed":
            return []
        blocks = {number: self.block(rank, op, number) for number in op.hops}
        return operations(op, blocks, self.work.itemsize, constants=True)

    def trace(self, rank: int = 0, *, training: bool) -> Trace:
        """Drawing's own exchanges as well: who asks whom for what, hop by hop from the last, and the rows of all."""
        made, drawn = list[Operation](), self._drawn[rank]
        if self.size > 1 and self.draws:
            for hop in reversed(drawn.hops):
                assert isinstance(hop, SampledHop)
                if hop.crosses:
                    asking = 8 * (self.size - 1)
                    made += [
                        Operation(kind="collective", tag="sampling", bytes_sent=asking, bytes_received=asking),
                        Operation(
                            kind="collective",
                            tag="sampling",
                            bytes_sent=8 * len(hop.fetched),
                            bytes_received=8 * len(hop.asked.vertices),
                        ),
                    ]
            made.append(all_reduce("sampling", len(level_counts(drawn)), 8, self.size))
        return Trace(operations=(*made, *super().trace(rank, training=training).operations))
