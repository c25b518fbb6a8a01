"""The strategy `single`: everything on one rank. All exact strategies compute the same numbers."""

from __future__ import annotations

from weft.cost import Operation
from weft.nn import ONE_DEVICE, Aggregate, GraphOperation, KernelMemory, ReceptiveField, estimate_kernel_memory
from weft.parallel.blocks.vertex_layout import VertexLayout, VertexStepInputs
from weft.parallel.exchange import Identity
from weft.parallel.layout import Layout
from weft.parallel.operations import AggregateSize, aggregate
from weft.strategies.resident import ResidentPlaced, ResidentPlan


class WholeLayout(Layout):
    """Every row, column and edge on one rank."""

    def restrict(self, field: ReceptiveField) -> VertexLayout:
        return VertexLayout.of_receptive_field(self.work.restrict(field), self.traits)

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


class PlacedSingle(ResidentPlaced):
    """The whole graph on this rank."""

    capturable = True

    def exchange(self, stage: int) -> Identity:
        del stage
        return Identity(self.topology, self.topology.ids, self.graph.num_vertices, self.group)

    def make_step_inputs(self, layout: Layout) -> VertexStepInputs:
        assert isinstance(layout, VertexLayout)
        return VertexStepInputs.of(layout, self, self.make_inputs)


class SinglePlan(ResidentPlan):
    """One rank that stores every row, column and edge."""

    name = "single"
    traits = ONE_DEVICE
    max_ranks = 1
    optimisations = ("reach", "capture")
    placed_type = PlacedSingle

    def make_layout(self) -> WholeLayout:
        return WholeLayout(self.work, self.size, self.traits)
