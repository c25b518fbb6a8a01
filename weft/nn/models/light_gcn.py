"""LightGCN: propagation of trained rows, for recommendation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weft.data import TypedShape
from weft.nn.aggregate.aggregate import Request
from weft.nn.aggregate.reduce import Sum
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel
from weft.nn.layers.typed_input import TypedInput
from weft.nn.view import View


class LightGCN(PhasedModel):
    """LightGCN: the mean of x, S x, ..., S^L x with S = D^-1/2 A D^-1/2, where x has a trained row for each vertex.

    There are no linear transforms between the layers; vertex types with features begin with a transform of these.
    Source: He et al. 2020, eqs. 3 and 4.

    Args:
        typed: Types of the graph (`Graph.typed`).
        width: Number of columns of the rows.
        layers: Number of layers L.
    """

    def __init__(self, typed: TypedShape, width: int, layers: int = 2) -> None:
        super().__init__()
        self.input, self.num_stages = TypedInput(typed, width), layers

    def begin(self, views: Sequence[View], x: Tensor) -> Boundary:
        del x
        rows: Tensor = self.input(views[0])
        return self._layer(0, rows, rows)

    def resume(self, views: Sequence[View], state: BoundaryState) -> Boundary | Tensor:
        del views
        layer: int = state.context + 1
        total = state.rows["total"] + state.result
        if layer == self.num_stages:
            return total / (layer + 1)
        return self._layer(layer, state.result, total)

    def _layer(self, layer: int, rows: Tensor, total: Tensor) -> Boundary:
        """Return the boundary of a layer.

        Args:
            layer: Number of the layer.
            rows: Rows that are propagated.
            total: Sum of the rows of all layers so far.
        """
        request = Request(Sum(norm="symmetric", weighted=True), {"x": rows})
        return Boundary(request=request, stage=layer, rows={"total": total}, context=layer)
