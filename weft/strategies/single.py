"""The strategy `single`: everything on one rank. All exact strategies compute the same numbers."""

from __future__ import annotations

from weft.comm import Group
from weft.cost import Operation
from weft.nn import ONE_DEVICE, Aggregate, GraphOperation, KernelMemory, ReceptiveField, estimate_kernel_memory
from weft.parallel.exchange import Identity
from weft.parallel.operations import AggregateSize, aggregate
from weft.strategies.resident import ResidentPlaced, ResidentPlan
from weft.strategies.vertex.plan import VertexPlan


class SinglePlan(ResidentPlan):
    """One rank that stores every row, column and edge."""

    name = "single"
    traits = ONE_DEVICE
    max_ranks = 1
    optimisations = ("reach", "capture")

    def restrict_to(self, field: ReceptiveField) -> VertexPlan:
        return OneRankPlan(self.work.restrict(field))

    def kernel_memory(self, op: GraphOperation, rank: int) -> KernelMemory:
        del rank
        stats = self.work.stats
        sizes = {"num_targets": stats.num_vertices, "num_edges": stats.num_edges, "itemsize": self.work.itemsize}
        assert isinstance(op.op, Aggregate)
        return estimate_kernel_memory(op.op, width=op.width, steps=op.steps, **sizes)

    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        del rank
        if not op.is_aggregate:
            return []
        stats = self.work.stats
        return [aggregate(op, stats.num_edges, AggregateSize.whole(stats), steps=op.steps)]

    def place(self, group: Group, *, seed: int = 0) -> PlacedSingle:
        return PlacedSingle(self, group, self.own_rows(group.rank), seed=seed)


class OneRankPlan(VertexPlan):
    """Vertex parallelism on one rank: a block for each aggregate, so that each may have other rows."""

    name = "single"
    traits = ONE_DEVICE
    ratio = 0.0


class PlacedSingle(ResidentPlaced):
    """The whole graph on this rank."""

    capturable = True

    def exchange(self, stage: int) -> Identity:
        del stage
        return Identity(self.topology, self.topology.ids, self.graph.num_vertices, self.group)
