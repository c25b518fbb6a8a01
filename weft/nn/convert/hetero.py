"""Conversion of models on heterogeneous graphs, whose forward takes the dicts of PyG's HeteroData.

While such a model is traced, x_dict and edge_index_dict contain proxies. Between convolutions, a rank has the rows of
each vertex type on their own, as in PyG. A convolution gets rows of all vertices, in which the types share columns.
Convolutions over several relations that do not depend on each other run together: means and sums as one `ByRelation`
aggregate, all others as calls on one block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import getitem
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx, nn
from torch.nn import functional

from weft.data import GraphShape, TypedShape
from weft.nn.aggregate.typed_block import Columns, Place
from weft.nn.convert.traced_steps import StepKind, TracedStep, TracedValue, values_in
from weft.nn.convert.typed_steps import (
    JoinedCall,
    JoinedCalls,
    JoinedRelations,
    Reduce,
    RelationAggregate,
    RelationCall,
    RelationSlot,
    SplitByType,
)
from weft.nn.layers.pyg_conv import check_parts, checked_trial, out_width_of, takes_pair
from weft.utils.errors import InputError


def takes_types(model: nn.Module) -> bool:
    """Return whether a model takes rows by vertex type: its forward uses edge_index_dict, or it is from `to_hetero`."""
    if isinstance(model, fx.GraphModule):
        return any(getattr(node.target, "__name__", "") == "get_dict" for node in model.graph.nodes)
    code = getattr(type(model).forward, "__code__", None)
    return code is not None and "edge_index_dict" in (*code.co_varnames, *code.co_names)


def edges_of(*_: Any) -> Any:
    """Stand in for the edges of one relation, or their features, among torch.fx nodes; never called."""
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
    def num_types(self) -> int:
        """Number of vertex types, one for all vertices without features."""
        return len(self.names) + 1

    @property
    def widths(self) -> dict[str, int]:
        """Number of features of each vertex type, by name."""
        return {name: width for name, (_, width) in zip(self.names, self.typed.featured, strict=True)}


TYPE, RELATION, VERTEX_TYPE = "type", "relation", "vertex_type"
"""Keys in the metadata of a node: the vertex type of its rows; the relation of its edges; True for the node with the
number of each vertex's type."""


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

    def call_over(self, relation: str, width: int, x: Any, x_target: Any) -> Any:
        """Record a call of the convolution over a relation, and return a proxy of its result.

        Args:
            relation: Name of the relation.
            width: Number of columns of the result.
            x: Proxy of the rows of the sources.
            x_target: Proxy of the rows of the targets.
        """
        ...

    def mean_of_type(self, x: Any) -> Any:
        """Record a mean over all vertices of a type, and return a proxy of it, repeated for each vertex.

        Args:
            x: Proxy of the rows of the type.
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


def is_han(conv: Any) -> bool:
    """Return whether a convolution is PyG's HANConv."""
    return type(conv).__name__ == "HANConv" and type(conv).__module__.startswith("torch_geometric.nn.conv")


def convert_han(
    scope: RelationScope, conv: Any, rows: dict[str, Any], relations: Iterable[tuple[str, str, str]]
) -> dict[str, Any]:
    """Convert HANConv (Wang et al. 2019).

    Args:
        scope: Records the steps.
        conv: The convolution.
        rows: Proxies of the rows by vertex type.
        relations: Relations of its edges.

    Returns:
        Proxies of the results by vertex type; None for types without in-edges.
    """
    transformed = {name: conv.proj[name](x) for name, x in rows.items()}
    results = dict[str, Any]()
    for name, x_target in transformed.items():
        parts = [
            scope.call_over("|".join((source, relation, target)), conv.out_channels, transformed[source], x_target)
            for source, relation, target in relations
            if target == name
        ]
        if len(parts) > 1:  # attention over the relations (eqs. 7-9), by the means of a score of each vertex
            scores = torch.cat([(conv.k_lin(part).tanh() * conv.q).sum(-1, keepdim=True) for part in parts], 1)
            weights = scope.mean_of_type(scores).softmax(1)
            first, *others = (weights[:, number : number + 1] * part for number, part in enumerate(parts))
            parts = [sum(others, start=first)]
        results[name] = parts[0] if parts else None
    return results


def width_over_relation(conv: Any, *, same_rows: bool, same_type: bool, reads_edge_attr: bool) -> int:
    """Return the number of columns of the result of a convolution that runs on the edges of one relation.

    Args:
        conv: The convolution.
        same_rows: True if sources and targets have the same rows.
        same_type: True if they have the same vertex type.
        reads_edge_attr: True if it is called with edge features.

    Raises:
        InputError: It cannot run between these rows, or on blocks of edges.
    """
    name = type(conv).__name__
    if getattr(conv, "add_self_loops", False) and not same_type:
        raise InputError(
            f"{name} with add_self_loops=True joins vertices of two types, by their numbers: use add_self_loops=False"
        )
    if not same_rows and not takes_pair(conv):
        raise InputError(
            f"{name} takes no pair (x_source, x_target): if it does, annotate x in its forward as "
            "Tensor | tuple[Tensor, Tensor]; else use it between vertices of one type"
        )
    return checked_trial(conv, reads_edge_attr=reads_edge_attr).out_width


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
                joined += _join(same_reduce, reduce, f"relations_{number}_{reduce}", kinds, types)
        calls = [step for step in by_depth[number] if isinstance(step.operation, RelationCall)]
        if calls:
            joined += _join_calls(calls, f"calls_{number}", kinds, types.num_types)
    return joined


def _join_calls(steps: list[TracedStep], name: str, kinds: dict[str, StepKind], num_types: int) -> list[TracedStep]:
    """Return steps that call several convolutions on one block, instead of one step per convolution."""
    types, calls, places = dict[str, int](), list[JoinedCall](), PlacesByType()
    for step in steps:
        call, (source, target, vertex_type) = step.operation, step.args
        assert isinstance(call, RelationCall)
        types |= dict(zip((source.name, target.name), call.ends, strict=True))
        position = [*types].index
        calls.append(JoinedCall(call, position(source.name), position(target.name)))
        places.add(call.ends[1], call.width)
    args = (vertex_type, *(TracedValue(value) for value in types))
    operation = JoinedCalls(calls=tuple(calls), types=tuple(types.values()), num_types=num_types)
    joined = TracedStep(name=name, operation=operation, args=args, kwargs={}, line=steps[0].line)
    return [joined, *_split_after(joined, steps, places, num_types, kinds)]


class PlacesByType(list[Place]):
    """Places in a tensor, with those of a vertex type side by side."""

    def add(self, of_type: int, width: int) -> Place:
        """Add a place after those of its type, and return it.

        Args:
            of_type: Number of the vertex type.
            width: Number of columns.
        """
        before = sum(place.columns.width for place in self if place.of_type == of_type)
        self.append(Place(of_type, Columns(before, width)))
        return self[-1]


def _split_after(
    joined: TracedStep, steps: list[TracedStep], places: PlacesByType, num_types: int, kinds: dict[str, StepKind]
) -> list[TracedStep]:
    """Return steps that split the result of a joined step into those of the steps that it replaces.

    Args:
        joined: The joined step, whose first argument is the number of each vertex's type.
        steps: The steps that it replaces.
        places: Places of their results.
        num_types: Number of vertex types.
        kinds: Kind of each value, by name; new values are added.
    """
    name = f"{joined.name}_by_type"
    kinds[joined.name] = kinds[name] = "rows"
    operation = SplitByType(tuple(places), num_types)
    split = replace(joined, name=name, operation=operation, args=(joined.args[0], TracedValue(joined.name)))
    parts = [
        replace(step, operation=getitem, args=(TracedValue(name), number), kwargs={})
        for number, step in enumerate(steps)
    ]
    return [split, *parts]


def _join(
    steps: list[TracedStep], reduce: Reduce, name: str, kinds: dict[str, StepKind], types: GraphTypes
) -> list[TracedStep]:
    """Return steps that aggregate several relations at once, instead of one step per relation.

    The first step aggregates all relations in one matrix, and the others take the output of each relation out of it.
    Relations with the same input share its columns. Outputs of the same target type are concatenated; outputs of
    different target types share columns, because a row has only one type.
    """
    inputs: dict[tuple[int, str], Place] = {}
    input_places, places, slots = PlacesByType(), PlacesByType(), list[RelationSlot]()
    for step in steps:
        relation, (x, vertex_type) = step.operation, step.args
        assert isinstance(relation, RelationAggregate)
        source, (height, width) = (relation.source, x.name), relation.widths
        if source not in inputs:
            inputs[source] = input_places.add(relation.source, height)
        output = places.add(types.names.index(relation.target), width)
        slots.append(RelationSlot(relation.relation, relation.weight, inputs[source].columns, output.columns))
    numbers = tuple(number for number, _ in inputs)
    operation = JoinedRelations(reduce, tuple(slots), numbers, types.num_types)
    args = (vertex_type, *(TracedValue(input_name) for _, input_name in inputs))
    joined = TracedStep(name=name, operation=operation, args=args, kwargs={}, line=steps[0].line)
    return [joined, *_split_after(joined, steps, places, types.num_types, kinds)]
