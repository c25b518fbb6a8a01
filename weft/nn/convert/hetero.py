"""Conversion of models on heterogeneous graphs, whose forward takes the dicts of PyG's HeteroData.

While such a model is traced, x_dict and edge_index_dict contain proxies. The rows of a vertex type become rows of all
vertices: rows of the other types are computed too, like those of isolated vertices, but nothing reads them.
Convolutions over several relations that do not depend on each other run together: means and sums as one `ByRelation`
aggregate, all others as calls on one block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from weft.data import GraphShape, TypedShape
from weft.nn.aggregate.aggregate import Request, WholeLayer
from weft.nn.aggregate.typed_block import select_by_type
from weft.nn.convert.traced_steps import GraphStep, StepKind, TracedStep, TracedValue, values_in
from weft.nn.layers.phases import Boundary
from weft.nn.layers.pyg_conv import check_parts, checked_width, out_width_of, takes_pair
from weft.nn.layers.relation_convs import Columns, RelationConv, RelationConvs, RelationInput
from weft.nn.layers.typed_conv import CalledTypes, TypedConv, TypedLayer
from weft.nn.layers.typed_input import TypedInput
from weft.nn.view import View
from weft.utils.errors import InputError

INPUT = "rows_by_type"
"""Name of the `RowsByType` module in a converted model."""
Reduce = Literal["sum", "mean"]
"""Reduction over the in-neighbours by a relation."""


def takes_types(model: nn.Module) -> bool:
    """Return whether a model takes rows by vertex type: its forward uses edge_index_dict, or it is from `to_hetero`."""
    if isinstance(model, fx.GraphModule):
        return any(getattr(node.target, "__name__", "") == "get_dict" for node in model.graph.nodes)
    code = getattr(type(model).forward, "__code__", None)
    return code is not None and "edge_index_dict" in (*code.co_varnames, *code.co_names)


class RowsByType(TypedInput):
    """Input layer that returns rows [n, 1 + F]: the number of a vertex's type, and its features, padded to F columns.

    Args:
        typed: Types of the graph.
    """

    def __init__(self, typed: TypedShape) -> None:
        nn.Module.__init__(self)
        self.typed, self.out_width = typed, 1 + max(width for _, width in typed.featured)

    def forward(self, view: View) -> Tensor:
        typed = view.typed_rows
        none = typed.features[0][:0]
        by_type = [*typed.features, none.new_empty(typed.num_embedded, 0)]
        rows = torch.cat([self._padded(number, x) for number, x in enumerate(by_type)])
        return rows if typed.order is None else rows.index_select(0, typed.order)

    def _padded(self, number: int, x: Tensor) -> Tensor:
        """Return the rows of one type, padded with distinct positive numbers.

        Constant padding would give a row norm or a quotient zeros to divide by, and NaN gradients.
        """
        missing = self.out_width - 1 - x.shape[1]
        fill = torch.arange(1, missing + 1, dtype=x.dtype, device=x.device) / max(missing, 1)
        return torch.cat([x.new_full((len(x), 1), number), x, fill.expand(len(x), -1)], 1)


@dataclass(frozen=True)
class FirstRows(GraphStep):
    """Graph step that returns the rows of a model's `RowsByType`."""

    over_edges = False

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Tensor:
        del rows
        module = model.get_submodule(INPUT)
        rows_by_type: Tensor = module(view)
        return rows_by_type


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


class JoinedCall(NamedTuple):
    """A convolution of a `JoinedCalls`."""

    call: RelationCall
    """The call."""
    source: int
    """Position of the rows of its sources among the arguments of the step."""
    target: int
    """Position of the rows of its targets."""


@dataclass(frozen=True)
class JoinedCalls(GraphStep):
    """Graph step that calls convolutions over several relations on one block.

    Their results are side by side; types of targets share columns.
    """

    calls: tuple[JoinedCall, ...]
    """The convolutions."""
    types: tuple[int, ...]
    """Number of the vertex type of each argument."""
    num_types: int
    """Number of vertex types, one for all vertices without features."""

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del view
        vertex_type, *parts = rows
        x, columns = after_types(vertex_type, self.types, parts)
        layer = RelationConvs(
            [cast(RelationConv, model.get_submodule(call.path)) for call, _, _ in self.calls],
            [
                RelationInput(call.relation, *call.ends, columns[source], columns[target])
                for call, source, target in self.calls
            ],
            self.num_types,
        )
        return Boundary(request=Request(WholeLayer(layer), {"x": x, "own": x}))


@dataclass(frozen=True)
class CallByType(GraphStep):
    """Graph step that calls a convolution which takes the rows of all types; its results share columns."""

    path: str
    """Path of the convolution in the model."""
    width: int
    """Number of columns of its result."""
    types: CalledTypes
    """Types and relations of the call."""
    num_types: int
    """Number of vertex types, one for all vertices without features."""

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del view
        vertex_type, *parts = rows
        x, columns = after_types(vertex_type, self.types.numbers, parts)
        conv = cast(TypedConv, model.get_submodule(self.path))
        layer = TypedLayer(conv, self.types, columns, self.num_types)
        return Boundary(request=Request(WholeLayer(layer), {"x": x, "own": x}))


class RelationSlot(NamedTuple):
    """Columns of one relation in the input and output of a `JoinedRelations`."""

    relation: int
    """Number of the relation."""
    weight: str
    """Path of the linear layer, whose weight is [o, i]."""
    first_input: int
    """First of the relation's i consecutive input columns."""
    first_output: int
    """First of the relation's o consecutive output columns."""


@dataclass(frozen=True)
class JoinedRelations(GraphStep):
    """Graph step that aggregates and transforms several relations at once; their results are concatenated."""

    reduce: Reduce
    """Reduction over the in-neighbours."""
    slots: tuple[RelationSlot, ...]
    """Columns of each relation."""
    sources: tuple[int, ...]
    """Number of the vertex type of each argument."""
    num_relations: int
    """Number of relations of the graph."""

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary:
        del view
        vertex_type, *parts = rows
        x, _ = side_by_side(vertex_type, self.sources, parts)
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
        self.out_width = max(
            slot.first_output + len(linear.weight) for slot, linear in zip(step.slots, linears, strict=True)
        )

    def forward(self, view: View, x: Tensor) -> Tensor:
        parts = defaultdict[int, list[Tensor]](list)
        linears: Sequence[Any] = self.__dict__["linears"]
        for slot, linear in zip(self.step.slots, linears, strict=True):
            height, width = linear.weight.shape[1], linear.weight.shape[0]
            after = (x.shape[1] - slot.first_input - height, self.out_width - slot.first_output - width)
            parts[slot.relation].append(
                functional.pad(linear.weight.t(), (slot.first_output, after[1], slot.first_input, after[0]))
            )
        # A matrix for each relation, with the weights of its slots at their input rows and output columns, else zeros.
        none = x.new_zeros(x.shape[1], self.out_width)
        weight = torch.stack([sum(parts[r], start=none) for r in range(self.step.num_relations)])
        return view.relate(x, weight[:, None], reduce=self.step.reduce)


def after_types(vertex_type: Tensor, numbers: tuple[int, ...], parts: Sequence[Tensor]) -> tuple[Tensor, list[Columns]]:
    """Return rows [n, .] with the vertex's type in the first column, then all parts, and the columns of each part.

    Args:
        vertex_type: Number of each vertex's type, [n, 1].
        numbers: Number of the type of each part.
        parts: Rows of all vertices, [n, .].
    """
    rows = vertex_type._base
    if rows is not None and _begins_at(vertex_type, rows, 0) and all(_begins_at(part, rows, 1) for part in parts):
        return rows, [Columns(1, part.shape[1]) for part in parts]  # those of `RowsByType` are as needed, not copied
    joined, columns = side_by_side(vertex_type, numbers, parts)
    return torch.cat([vertex_type, joined], 1), [each._replace(first=each.first + 1) for each in columns]


def _begins_at(part: Tensor, rows: Tensor, column: int) -> bool:
    """Return whether a tensor is a view of the columns of rows from one of them on."""
    return (
        part._base is rows
        and len(part) == len(rows)
        and part.stride() == rows.stride()
        and part.storage_offset() == rows.storage_offset() + column
    )


def side_by_side(
    vertex_type: Tensor, numbers: tuple[int, ...], parts: Sequence[Tensor]
) -> tuple[Tensor, list[Columns]]:
    """Return rows [n, .] with all parts of a type side by side, and the columns of each part.

    Types share columns, since a vertex has one type.

    Args:
        vertex_type: Number of each vertex's type, [n, 1].
        numbers: Number of the type of each part.
        parts: Rows of all vertices, [n, .].
    """
    by_type, columns = defaultdict[int, list[Tensor]](list), list[Columns]()
    for number, part in zip(numbers, parts, strict=True):
        columns.append(Columns(sum(before.shape[1] for before in by_type[number]), part.shape[1]))
        by_type[number].append(part)
    joined = (torch.cat(type_parts, 1) for type_parts in by_type.values())
    return select_by_type(vertex_type, tuple(by_type), *joined), columns


def select_logits_by_type(vertex_type: Tensor, numbers: tuple[int, ...], *parts: Tensor) -> Tensor:
    """Return the result of `select_by_type` for logits, which must have the same width for all types.

    Args:
        vertex_type: Number of each vertex's type, [n, 1].
        numbers: Number of the type of each part.
        *parts: Rows of all vertices, [n, .].

    Raises:
        InputError: The widths differ.
    """
    widths = [part.shape[1] for part in parts]
    if len({*widths}) > 1:
        raise InputError(
            f"the model returns rows with {widths} columns by vertex type: return those of the labelled type only"
        )
    return select_by_type(vertex_type, numbers, *parts)


def columns_of(rows: Tensor, first: int, width: int) -> Tensor:
    """Return some columns of rows.

    Args:
        rows: [n, F].
        first: First column.
        width: Number of columns.
    """
    return rows[:, first : first + width]


def edges_of(*_: Any) -> Any:
    """Stand in for the edges of one relation among torch.fx nodes; never called."""
    raise NotImplementedError


class GraphTypes(NamedTuple):
    """Types of a graph, for tracing a model."""

    names: tuple[str, ...]
    """Names of the vertex types with features."""
    relations: tuple[str, ...]
    """Names of the relations, as "source|relation|target"."""
    typed: TypedShape
    """Sizes of the types."""

    @classmethod
    def of(cls, shape: GraphShape | None, model: str) -> GraphTypes:
        """Return the types of a graph.

        Args:
            shape: Shape of the graph.
            model: Name of the model, for an error.

        Raises:
            InputError: The graph has no typed vertices with features, or no relations.
        """
        if shape is None or not shape.featured_types or not shape.relations:
            raise InputError(
                f"{model} takes rows by vertex type, but the graph has no vertex types with features: give weft.train "
                "a graph from HeteroData, or pass weft.nn.convert shape=GraphShape.of(graph.by_type())"
            )
        return cls(shape.featured_types, shape.relations, shape.typed)

    @property
    def widths(self) -> dict[str, int]:
        """Number of features of each vertex type, by name."""
        return {name: width for name, (_, width) in zip(self.names, self.typed.featured, strict=True)}


TYPE, RELATION = "type", "relation"
"""Keys in the metadata of a node: the vertex type of its rows, and the relation of its edges."""


def type_of(value: Any) -> str | None:
    """Return the vertex type of the rows of a traced value; None if it has none."""
    return value.node.meta.get(TYPE) if isinstance(value, fx.Proxy) else None


def relation_of(value: Any) -> str:
    """Return the relation of a traced value that stands for its edges; an empty string if it has none."""
    return value.node.meta.get(RELATION, "") if isinstance(value, fx.Proxy) else ""


class RelationScope(Protocol):
    """Interface by which a rule records its steps."""

    def over_relation(self, weight: str, reduce: Reduce, x: Any) -> Any:
        """Record the aggregate and linear transform of the convolution's relation.

        Args:
            weight: Name of the linear layer in the convolution.
            reduce: Reduction over the in-neighbours.
            x: Proxy of the rows of the sources.

        Returns:
            A proxy of the result, without bias.
        """
        ...


def _sage(scope: RelationScope, conv: Any, x: Any, x_target: Any) -> Any:
    """Convert SAGEConv between two vertex types (Hamilton, Ying, Leskovec 2017, algorithm 1)."""
    if conv.project:
        x = torch.relu(conv.lin(x))
    y = plus_bias(scope.over_relation("lin_l", REDUCE[conv.aggr], x), conv.lin_l)
    y = y + conv.lin_r(x_target) if conv.root_weight else y
    return functional.normalize(y, p=2.0, dim=-1) if conv.normalize else y


def _graph(scope: RelationScope, conv: Any, x: Any, x_target: Any) -> Any:
    """Convert GraphConv between two vertex types (Morris et al. 2019, eq. 3)."""
    return plus_bias(scope.over_relation("lin_rel", REDUCE[conv.aggr], x), conv.lin_rel) + conv.lin_root(x_target)


def width_over_relation(conv: Any, *, same_rows: bool, same_type: bool) -> int:
    """Return the number of columns of the result of a convolution that runs on the edges of one relation.

    Args:
        conv: The convolution.
        same_rows: True if sources and targets have the same rows.
        same_type: True if they have the same vertex type.

    Raises:
        InputError: It cannot run between these rows, or on blocks of edges.
    """
    name = type(conv).__name__
    if getattr(conv, "add_self_loops", False) and not same_type:
        raise InputError(
            f"{name} with add_self_loops=True joins vertices of two types, by their numbers: use add_self_loops=False"
        )
    if not same_rows and not takes_pair(conv):
        raise InputError(f"{name} takes no pair (x_source, x_target): use it between vertices of one type")
    return checked_width(conv)


def width_by_type(conv: Any) -> int:
    """Return the number of columns of the result of a convolution that takes the rows of all types.

    Args:
        conv: The convolution.

    Raises:
        InputError: It cannot run on blocks of edges.
    """
    check_parts(conv)
    width = out_width_of(conv)
    if not width:
        raise InputError(f"{type(conv).__name__} has no attribute out_channels: add it")
    return width


def plus_bias(y: Any, linear: Any) -> Any:
    """Add the bias of a linear layer, if it has one.

    Args:
        y: Rows without the bias.
        linear: The linear layer.
    """
    return y if linear.bias is None else y + linear.bias


RULES: dict[str, Callable[..., Any]] = {"SAGEConv": _sage, "GraphConv": _graph}
"""Rule of each convolution, by the name of PyG's class. Arguments: the scope, the convolution, and proxies of the rows
of sources and targets."""
REDUCE: dict[str, Reduce] = {"mean": "mean", "sum": "sum", "add": "sum"}
"""Reduction by the name of PyG's aggregation."""


JOINABLE = (RelationAggregate, RelationCall)
"""Steps over one relation."""


def join_relations(steps: list[TracedStep], kinds: dict[str, StepKind], types: GraphTypes) -> list[TracedStep]:
    """Join relation aggregates that do not depend on each other, and return the resulting steps.

    Args:
        steps: Steps in order.
        kinds: Kind of each value, by name; joined steps are added.
        types: Types of the graph.
    """
    # The depth of a step is the number of steps over relations on the longest path to it. Those of equal depth do not
    # depend on each other, so they are joined: sums, means and calls separately. Sorted by depth, steps stay in order.
    depth: dict[str, int] = {}
    by_depth = defaultdict[int, list[TracedStep]](list)
    for step in steps:
        depth_before = max((depth.get(name, 0) for name in values_in(step.args, step.kwargs)), default=0)
        depth[step.name] = depth_before + isinstance(step.operation, JOINABLE)
        by_depth[depth_before].append(step)
    joined: list[TracedStep] = []
    for number in sorted(by_depth):
        joined += [step for step in by_depth[number] if not isinstance(step.operation, JOINABLE)]
        for reduce in ("mean", "sum"):
            same_reduce = [
                step
                for step in by_depth[number]
                if isinstance(step.operation, RelationAggregate) and step.operation.reduce == reduce
            ]
            if same_reduce:
                joined += _join(same_reduce, reduce, f"relations_{number}_{reduce}", kinds, len(types.relations))
        calls = [step for step in by_depth[number] if isinstance(step.operation, RelationCall)]
        if calls:
            joined += _join_calls(calls, f"calls_{number}", kinds, len(types.names) + 1)
    return joined


def _join_calls(steps: list[TracedStep], name: str, kinds: dict[str, StepKind], num_types: int) -> list[TracedStep]:
    """Return steps that call several convolutions on one block, instead of one step per convolution."""
    types, calls, parts = dict[str, int](), list[JoinedCall](), list[TracedStep]()
    output_widths = defaultdict[int, int](int)
    for step in steps:
        call, (source, target, vertex_type) = step.operation, step.args
        assert isinstance(call, RelationCall)
        types |= dict(zip((source.name, target.name), call.ends, strict=True))
        position = [*types].index
        calls.append(JoinedCall(call, position(source.name), position(target.name)))
        begin = output_widths[call.ends[1]]
        output_widths[call.ends[1]] += call.width
        parts.append(replace(step, operation=columns_of, args=(TracedValue(name), begin, call.width)))
    kinds[name] = "rows"
    args = (vertex_type, *(TracedValue(value) for value in types))
    operation = JoinedCalls(tuple(calls), tuple(types.values()), num_types)
    return [TracedStep(name=name, operation=operation, args=args, kwargs={}, line=steps[0].line), *parts]


def _join(
    steps: list[TracedStep], reduce: Reduce, name: str, kinds: dict[str, StepKind], num_relations: int
) -> list[TracedStep]:
    """Return steps that aggregate several relations at once, instead of one step per relation.

    The first step aggregates all relations in one matrix; each other step slices the columns with the output of one
    relation. Relations with the same input share its columns. Outputs of the same target type are concatenated;
    outputs of different target types share columns, because a row has only one type.
    """
    first_inputs: dict[tuple[int, str], int] = {}
    input_widths, output_widths, slots = defaultdict[int, int](int), defaultdict[str, int](int), list[RelationSlot]()
    parts: list[TracedStep] = []
    for step in steps:
        relation, (x, vertex_type) = step.operation, step.args
        assert isinstance(relation, RelationAggregate)
        source, (height, width) = (relation.source, x.name), relation.widths
        if source not in first_inputs:
            first_inputs[source] = input_widths[relation.source]
            input_widths[relation.source] += height
        begin = output_widths[relation.target]
        output_widths[relation.target] += width
        slots.append(RelationSlot(relation.relation, relation.weight, first_inputs[source], begin))
        parts.append(replace(step, operation=columns_of, args=(TracedValue(name), begin, width)))
    operation = JoinedRelations(reduce, tuple(slots), tuple(number for number, _ in first_inputs), num_relations)
    args = (vertex_type, *(TracedValue(input_name) for _, input_name in first_inputs))
    kinds[name] = "rows"
    return [TracedStep(name=name, operation=operation, args=args, kwargs={}, line=steps[0].line), *parts]
