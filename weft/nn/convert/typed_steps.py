"""Graph steps of converted models on heterogeneous graphs.

Between convolutions, a rank has the rows of each vertex type on their own. A convolution gets rows of all vertices, in
which the types share columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from weft.data import TypedShape
from weft.nn.aggregate.aggregate import Request, Total, WholeLayer
from weft.nn.aggregate.relations import ColumnTransform
from weft.nn.aggregate.typed_block import Columns, Place, side_by_side
from weft.nn.convert.traced_steps import GraphStep
from weft.nn.layers.norm import BatchNorm
from weft.nn.layers.phases import Boundary, BoundaryState
from weft.nn.layers.relation_convs import RelationConv, RelationConvs, RelationInput
from weft.nn.layers.typed_conv import CalledTypes, TypedConv, TypedLayer
from weft.nn.layers.typed_input import TypedInput
from weft.nn.view import View
from weft.utils.errors import InputError

INPUT = "rows_by_type"
"""Name of the `RowsByType` module in a converted model."""
Reduce = Literal["sum", "mean"]
"""Reduction over the in-neighbours by a relation."""


class RowsByType(TypedInput):
    """Input layer that returns the number of each vertex's type [n, 1], and the features of each type.

    Args:
        typed: Types of the graph.
    """

    def __init__(self, typed: TypedShape) -> None:
        nn.Module.__init__(self)
        self.typed = typed

    def forward(self, view: View) -> Any:
        typed = view.typed_rows
        counts = (*map(len, typed.features), typed.num_embedded)
        vertex_type = torch.cat([typed.features[0].new_full((count, 1), each) for each, count in enumerate(counts)])
        if typed.order is not None:
            vertex_type = vertex_type.index_select(0, typed.order)
        return vertex_type, *typed.features


@dataclass(frozen=True)
class FirstRows(GraphStep):
    """Step that returns the number of each vertex's type and the features of each type."""

    over_edges = False

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Any:
        del rows
        return model.get_submodule(INPUT)(view)


@dataclass(frozen=True)
class SplitByType(GraphStep):
    """Step that returns the parts of a result over all vertices."""

    places: tuple[Place, ...]
    """Place of each part."""
    num_types: int
    """Number of vertex types, one for all vertices without features."""
    over_edges = False

    def begin(self, model: nn.Module, view: View, *rows: Any) -> Any:
        del model
        vertex_type, x = rows
        if not isinstance(x, Tensor):  # a step that has all sources does not join the parts
            return x
        return view.type_order(vertex_type, self.num_types).split(x, self.places)


@dataclass(frozen=True)
class LogitsByType(GraphStep):
    """Step that returns the logits of all vertices, from those of some vertex types; the others are zero."""

    types: tuple[int, ...]
    """Number of the vertex type of each argument."""
    num_types: int
    """Number of vertex types, one for all vertices without features."""
    over_edges = False

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Tensor:
        del model
        vertex_type, *parts = rows
        widths = [part.shape[1] for part in parts]
        if len({*widths}) > 1:
            raise InputError(
                f"the model returns rows with {widths} columns by vertex type: return those of the labelled type only"
            )
        order = view.type_order(vertex_type, self.num_types)
        return order.join(parts, side_by_side(self.types, parts))


def total_of_type(view: View, vertex_type: Tensor, x: Tensor, of_type: int, num_types: int) -> Request:
    """Return a request for the total of the rows of a vertex type, with their number in a last column.

    Args:
        view: The graph.
        vertex_type: Number of each vertex's type, [n, 1].
        x: Rows of the type, [n_t, F].
        of_type: Number of the type.
        num_types: Number of vertex types.
    """
    parts = [x, x.new_ones(len(x), 1)]
    places = side_by_side([of_type] * 2, parts)
    return Request(Total(), {"x": view.type_order(vertex_type, num_types).join(parts, places)})


@dataclass(frozen=True)
class MeanOfType(GraphStep):
    """Step that returns the mean over all vertices of a type, for each of their rows."""

    of_type: int
    """Number of the vertex type."""
    num_types: int
    """Number of vertex types, one for all vertices without features."""
    over_edges = False

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del model
        vertex_type, x = rows
        request = total_of_type(view, vertex_type, x, self.of_type, self.num_types)
        return Boundary(request=request, rows={"vertex_type": vertex_type})

    def resume(self, model: nn.Module, view: View, state: BoundaryState) -> Tensor:
        del model
        mean = state.result[:-1] / state.result[-1].clamp(min=1).detach()
        return mean.expand(view.type_order(state.rows["vertex_type"], self.num_types).counts[self.of_type], -1)


@dataclass(frozen=True)
class NormByType(GraphStep):
    """Step that applies a batch norm over all vertices of a type."""

    path: str
    """Path of the batch norm in the model."""
    of_type: int
    """Number of the vertex type."""
    num_types: int
    """Number of vertex types, one for all vertices without features."""
    over_edges, has_effect = False, True  # running statistics

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary | Tensor:
        (vertex_type, x), norm = rows, cast(BatchNorm, model.get_submodule(self.path))
        if not norm.training:
            return norm.normalize(x, norm.running_mean, norm.running_var)
        request = total_of_type(view, vertex_type, x, self.of_type, self.num_types)
        return Boundary(request=request, rows={**request.rows, "vertex_type": vertex_type})

    def resume(self, model: nn.Module, view: View, state: BoundaryState) -> Boundary | Tensor:
        norm, joined = cast(BatchNorm, model.get_submodule(self.path)), state.rows["x"]
        if "mean" in state.shared:
            order = view.type_order(state.rows["vertex_type"], self.num_types)
            (x,) = order.split(joined, [Place(self.of_type, Columns(0, joined.shape[1] - 1))])
            return norm.normalize(x, state.shared["mean"], state.result / state.shared["count"])
        count = state.result[-1].clamp(min=1).detach()
        mean = state.result[:-1] / count
        on_result = partial(norm.update_running_stats, mean.detach(), count)
        squares = Request(Total(), {"x": (joined[:, :-1] - mean).square() * joined[:, -1:].detach()})
        return Boundary(request=squares, rows=state.rows, shared={"mean": mean, "count": count}, on_result=on_result)


@dataclass(frozen=True, kw_only=True)
class RelationAggregate(GraphStep):
    """Aggregate and linear transform of one relation, before `join_relations` joins it with others."""

    relation: int
    """Number of the relation."""
    target: str
    """Vertex type of the relation's targets."""
    source: int
    """Number of the vertex type of the relation's sources."""
    reduce: Reduce
    """Reduction over the in-neighbours."""
    weight: str
    """Path of the linear layer in the model."""
    widths: tuple[int, int]
    """Number of input and output columns of the linear layer."""


@dataclass(frozen=True, kw_only=True)
class RelationCall(GraphStep):
    """Call of a convolution over one relation, before `join_relations` joins it with others."""

    relation: int
    """Number of the relation."""
    ends: tuple[int, int]
    """Numbers of the vertex types of the relation's sources and targets."""
    path: str
    """Path of the convolution in the model."""
    width: int
    """Number of columns of its result."""
    reads_edge_attr: bool = False
    """True if it is called with edge features."""


class JoinedCall(NamedTuple):
    """A convolution of a `JoinedCalls`."""

    call: RelationCall
    """The call."""
    source: int
    """Position of the rows of its sources among the arguments of the step."""
    target: int
    """Position of the rows of its targets."""


@dataclass(frozen=True, kw_only=True)
class BlockStep(GraphStep):
    """Base class of graph steps that call convolutions of PyG on a block, with rows of each vertex type.

    On a rank that has all sources, neither their rows nor the results are joined to rows of all vertices.
    """

    types: tuple[int, ...]
    """Number of the vertex type of each argument."""
    num_types: int
    """Number of vertex types, one for all vertices without features."""

    def make_layer(self, model: nn.Module, places: Sequence[Place]) -> RelationConvs | TypedLayer:
        """Return the layer that calls the convolutions.

        Args:
            model: The converted model, which has the parameters.
            places: Place of each argument in the rows of the layer.
        """
        raise NotImplementedError

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Any:
        vertex_type, *parts = rows
        order = view.type_order(vertex_type, self.num_types)
        numbers = [vertex_type.new_full((count, 1), number) for number, count in enumerate(order.counts)]
        places = side_by_side([*range(self.num_types), *self.types], [*numbers, *parts])
        layer = self.make_layer(model, places[self.num_types :])
        if view.has_all_sources:
            _, _, num_targets = view.block(vertex_type)
            return layer.on_block(view, view.typed_block(vertex_type, num_targets, self.num_types), parts)
        x = order.join([*numbers, *parts], places)
        return Boundary(request=Request(WholeLayer(layer), {"x": x, "own": x}))


@dataclass(frozen=True, kw_only=True)
class JoinedCalls(BlockStep):
    """Graph step that calls convolutions over several relations on one block.

    Their results are side by side; types of targets share columns.
    """

    calls: tuple[JoinedCall, ...]
    """The convolutions."""

    def make_layer(self, model: nn.Module, places: Sequence[Place]) -> RelationConvs:
        convs = [cast(RelationConv, model.get_submodule(call.path)) for call, _, _ in self.calls]
        inputs = [RelationInput(call.relation, source, target) for call, source, target in self.calls]
        return RelationConvs(convs, inputs, places, self.num_types)


@dataclass(frozen=True, kw_only=True)
class CallByType(BlockStep):
    """Graph step that calls a convolution which takes the rows of all types; its results share columns."""

    path: str
    """Path of the convolution in the model."""
    width: int
    """Number of columns of its result."""
    called: CalledTypes
    """Types and relations of the call."""

    def make_layer(self, model: nn.Module, places: Sequence[Place]) -> TypedLayer:
        return TypedLayer(cast(TypedConv, model.get_submodule(self.path)), self.called, places, self.num_types)


class RelationSlot(NamedTuple):
    """Columns of one relation in the input and output of a `JoinedRelations`."""

    relation: int
    """Number of the relation."""
    weight: str
    """Path of the linear layer, whose weight is [o, i]."""
    inputs: Columns
    """Input columns of the relation, i."""
    outputs: Columns
    """Output columns of the relation, o, disjoint for slots of one relation."""


@dataclass(frozen=True)
class JoinedRelations(GraphStep):
    """Graph step that aggregates and transforms several relations at once; their results are concatenated."""

    reduce: Reduce
    """Reduction over the in-neighbours."""
    slots: tuple[RelationSlot, ...]
    """Columns of each relation."""
    sources: tuple[int, ...]
    """Number of the vertex type of each argument."""
    num_types: int
    """Number of vertex types, one for all vertices without features."""

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        vertex_type, *parts = rows
        x = view.type_order(vertex_type, self.num_types).join(parts, side_by_side(self.sources, parts))
        layer = JoinedRelationLayer(self, [model.get_submodule(slot.weight) for slot in self.slots])
        return Boundary(request=Request(WholeLayer(layer), {"x": x, "own": x}))


class JoinedRelationLayer(nn.Module):
    """Layer of a `JoinedRelations`, which uses the weights of other modules without owning them.

    Args:
        step: The graph step.
        linears: Linear layer of each slot.
    """

    def __init__(self, step: JoinedRelations, linears: Sequence[Any]) -> None:
        super().__init__()
        self.step = step
        self.__dict__["linears"] = linears

    def forward(self, view: View, x: Tensor) -> Tensor:
        linears: Sequence[Any] = self.__dict__["linears"]
        transforms = [
            ColumnTransform(slot.relation, slot.inputs, slot.outputs, linear.weight.t())
            for slot, linear in zip(self.step.slots, linears, strict=True)
        ]
        return view.relate(x, transforms, reduce=self.step.reduce)
