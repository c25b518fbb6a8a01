"""Everything on one rank: what every other strategy must equal."""

from __future__ import annotations

from weft.comm import Group
from weft.cost import Operation
from weft.nn import GraphOperation, GraphView
from weft.strategies.base import Placed, Plan


class SinglePlan(Plan):
    """One rank holds every row, column and edge."""

    name = "single"
    max_ranks = 1

    def lower(self, op: GraphOperation, rank: int) -> list[Operation]:
        del rank
        edges = self.work.stats.num_edges * op.width * op.steps
        return [Operation(kind="aggregate", edges=edges)] if op.is_aggregate else []

    def place(self, group: Group, *, seed: int = 0) -> PlacedSingle:
        return PlacedSingle(self, group, slice(0, self.work.stats.num_vertices), seed=seed)


class PlacedSingle(Placed):
    """The whole graph on this rank."""

    def view(self, stage: int, view_key: int) -> GraphView:
        del stage
        return GraphView(self.topology, key=view_key, inputs=self.inputs, meter=self.group.meter)
