"""The strategy `single`: everything on one rank. All exact strategies compute the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm import Group
from weft.cost import Operation
from weft.nn import ONE_DEVICE, GraphOperation, MetaTopology, ReceptiveField
from weft.parallel.blocks.vertex_layout import VertexLayout, VertexStepInputs
from weft.parallel.exchange import Identity
from weft.parallel.layout import Layout
from weft.parallel.operations import AggregateSize, aggregate
from weft.strategies.resident import ResidentPlaced, ResidentPlan


class WholeLayout(Layout):
    """Every row, column and edge on one rank."""

    def restrict(self, field: ReceptiveField) -> VertexLayout:
        return VertexLayout.of_receptive_field(self.work.restrict(field), self.traits)

    def meta_exchanges(self, rank: int, *, training: bool) -> Sequence[Identity]:
        del training
        group, stats = Group(rank, self.size, device="meta"), self.work.stats
        num_vertices, relation_rows = stats.num_vertices, (stats.num_relation_rows,)
        whole = MetaTopology(self.work, num_vertices, num_vertices, stats.num_edges, relation_rows=relation_rows)
        return [Identity(whole, whole.ids, num_vertices, group)] * self.work.num_stages

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
