"""Everything on one rank: what every other strategy must equal."""

from __future__ import annotations

from weft.cost import Operation
from weft.nn import GraphOperation, GraphView
from weft.strategies.base import GraphShape, Strategy


class Single(Strategy):
    """One rank holds every row, column and edge."""

    only_one_rank = True

    def place(self) -> slice:
        return slice(0, self.graph.num_vertices)

    def view(self, stage: int, view_key: int) -> GraphView:
        del stage
        return GraphView(self.topology, key=view_key, inputs=self.inputs, meter=self.group.meter)

    @classmethod
    def carry_out(
        cls, asked: GraphOperation, shape: GraphShape, rank: int, size: int, itemsize: int
    ) -> list[Operation]:
        del rank, size, itemsize
        edges = shape.num_edges * asked.width * asked.steps
        return [Operation(kind="aggregate", edges=edges)] if asked.is_aggregate else []
