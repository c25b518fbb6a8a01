"""Everything on one rank: what every other strategy must equal."""

from __future__ import annotations

from torch import nn

from weft.core.errors import InputError
from weft.core.savings import ALL_SAVINGS, Savings
from weft.cost import Operation, Trace
from weft.nn import GraphView
from weft.strategies.base import GraphShape, Strategy


class Single(Strategy):
    """One rank holds every row, column and edge."""

    def place(self) -> range:
        check_size(self.group.size)
        return range(self.graph.num_vertices)

    def view(self, view_key: int) -> GraphView:
        return GraphView(self.topology, key=view_key, inputs=self.inputs, meter=self.group.meter)

    @classmethod
    def trace(
        cls,
        model: nn.Module,
        shape: GraphShape,
        *,
        rank: int = 0,
        size: int = 1,
        training: bool,
        savings: Savings = ALL_SAVINGS,
    ) -> Trace:
        assert rank < size
        check_size(size)
        forward, backward = [], []
        for operation in cls.operations(model, shape, training, savings):
            product = Operation(kind="aggregate", edges=shape.num_edges * operation.width * operation.steps)
            if operation.is_product:
                forward.append(product)
                backward += [product] if operation.backward else []
        return Trace(operations=(*forward, *reversed(backward)))


def check_size(size: int) -> None:
    """InputError for more ranks than one."""
    if size > 1:
        raise InputError(f"strategy single runs on one rank: give --workers 1, or --strategy tensor for {size}")
