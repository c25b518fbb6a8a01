"""Tracing of a model's forward: it runs on torch.fx proxies, and its convolutions become steps over the graph."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.nn.aggregate.typed_block import Columns, Place
from weft.nn.convert import hetero, typed_steps
from weft.nn.convert.fx_calls import CONSTANT, LAYER, ROOT, make_program, run_step
from weft.nn.convert.native_layers import RULES, GlobalNorm, WithView, pyg_conv_layer
from weft.nn.convert.source_location import first_line, line_of, line_of_error
from weft.nn.convert.traced_steps import GraphStep, TracedProgram
from weft.nn.layers.typed_conv import CalledTypes
from weft.utils.errors import InputError

EDGES = {
    "edge_index": ("edge_index", "adj_t", "adj"),
    "edge_weight": ("edge_weight",),
    "edge_attr": ("edge_attr",),
    "edge_type": ("edge_type",),
}
"""Names that a model's forward may use for each tensor of the edges."""
COUPLING = ("GraphNorm", "InstanceNorm", "PairNorm", "MeanSubtractionNorm", "GraphSizeNorm", "DiffGroupNorm")
"""Names of PyG's norms that normalize a row by the rows of other vertices."""


def trace(model: nn.Module, edge_arguments: frozenset[str], types: hetero.GraphTypes | None = None) -> TracedProgram:
    """Return the program of a model's forward pass, in its current mode (training or evaluation).

    Args:
        model: The model.
        edge_arguments: Optional arguments of forward that the graph has.
        types: Types of the graph, for a model on a heterogeneous graph.

    Raises:
        InputError: The model cannot be converted; the message names the line.
    """
    root: Root = Root(model, edge_arguments) if types is None else RootByType(model, edge_arguments, types)
    try:
        with torch.enable_grad(), _attributes_restored(model):
            graph = Tracer(types).trace(root)
        program = make_program(graph, root, training=model.training, types=types)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{line_of_error(error)}: weft.nn.convert cannot trace it ({first_line(error)})") from error
    return replace(program, output_types=root.output_types) if isinstance(root, RootByType) else program


@contextmanager
def _attributes_restored(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules that a forward pass on proxies has changed."""
    before = [(part.__dict__, dict(part.__dict__), part._buffers, dict(part._buffers)) for part in model.modules()]
    try:
        yield
    finally:
        for attributes, old_attributes, buffers, old_buffers in before:
            attributes.clear()
            attributes.update(old_attributes)
            buffers.clear()
            buffers.update(old_buffers)


def parameters_of(model: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of a model's forward."""
    names = getattr(getattr(model, "signature", None), "param_dict", None)  # of PyG's Sequential
    if names:
        return [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    return list(inspect.signature(model.forward).parameters.values())


class Root(nn.Module):
    """Module that is traced: it calls the model, and its own arguments have fixed names.

    Args:
        model: The model.
        edge_arguments: Optional arguments of the model's forward that the graph has.
        make_data: Function that returns the argument of a model that takes `data`, from its attributes.
    """

    def __init__(
        self, model: nn.Module, edge_arguments: frozenset[str], make_data: Callable[..., Any] = SimpleNamespace
    ) -> None:
        super().__init__()
        self.model, self.edge_arguments, self.make_data = model, edge_arguments, make_data

    def forward(self, x: Any, edge_index: Any, edge_weight: Any, edge_attr: Any, edge_type: Any) -> Any:
        edges = dict(zip(EDGES, (edge_index, edge_weight, edge_attr, edge_type), strict=True))
        by_argument = {name: edges[edge_name] for edge_name, names in EDGES.items() for name in names}
        first, *others = parameters_of(self.model)
        kwargs = {}
        names = {parameter.name for parameter in others}
        if "edge_attr" in names - self.edge_arguments and "edge_weight" in self.edge_arguments - names:
            raise InputError(
                f"{type(self.model).__name__}.forward takes edge_attr, but the graph has edge weights instead: take "
                "edge_weight, or give the graph edge_features"
            )
        for parameter in others:
            optional = parameter.default is not parameter.empty or parameter.kind in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            )
            if parameter.name in EDGES["edge_index"] or (
                parameter.name in by_argument and (not optional or parameter.name in self.edge_arguments)
            ):
                kwargs[parameter.name] = by_argument[parameter.name]
            elif not optional:
                raise InputError(
                    f"{type(self.model).__name__}.forward needs {parameter.name}, but weft only passes x, edge_index, "
                    "edge_weight, edge_attr and edge_type: give it a default"
                )
        return self.model(self.make_data(x=x, **edges) if first.name == "data" else x, **kwargs)


def call_pyg(model: nn.Module, edge_arguments: frozenset[str], x: Tensor, *edges: Tensor | None) -> Tensor:
    """Call a PyG model, and return its result.

    Args:
        model: The model, which takes x and tensors of the edges, or `data` with these.
        edge_arguments: Optional arguments of its forward that the graph has.
        x: Rows [n, F].
        *edges: edge_index, edge_weight, edge_attr and edge_type; None: the graph has none.
    """
    from torch_geometric.data import Data  # PyG is an optional dependency

    result: Tensor = Root(model, edge_arguments, Data)(x, *edges)
    return result


class RootByType(Root):
    """Module that is traced for a model on a heterogeneous graph, which takes rows and edges in dicts.

    Args:
        model: The model.
        edge_arguments: Values of the edges that the graph has.
        types: Types of the graph.
    """

    def __init__(self, model: nn.Module, edge_arguments: frozenset[str], types: hetero.GraphTypes) -> None:
        super().__init__(model, edge_arguments)
        self.types = types

    def forward(self, x: Any, edge_index: Any, edge_weight: Any, edge_attr: Any, edge_type: Any) -> Any:
        del edge_weight, edge_type
        tracer = x.tracer
        first = tracer.over_graph(typed_steps.FirstRows(), x)
        tracer.vertex_type = first[0]
        tracer.vertex_type.node.meta[hetero.VERTEX_TYPE] = True
        x_dict = tracer.rows_by_type(first, self.types.names, 1)
        dicts = {"edge_index": edge_index} | ({"edge_attr": edge_attr} if "edge_attr" in self.edge_arguments else {})
        by_relation = {
            f"{key}_dict": {tuple(name.split("|")): tracer.edges_by(value, name) for name in self.types.relations}
            for key, value in dicts.items()
        }
        args, kwargs = self._arguments(x_dict, by_relation)
        result = self.model(*args, **kwargs)
        outputs = result if isinstance(result, dict) else {hetero.type_of(result): result}
        outputs = {name: value for name, value in outputs.items() if value is not None}
        if not outputs or any(name is None or hetero.type_of(value) != name for name, value in outputs.items()):
            raise InputError("the model must return the rows of a vertex type, or a dict of rows by vertex type")
        self.output_types = tuple(outputs)
        numbers = tuple(self.types.names.index(name) for name in outputs)
        logits = typed_steps.LogitsByType(numbers, self.types.num_types)
        return tracer.over_graph(logits, tracer.vertex_type, *outputs.values())

    def _arguments(self, x_dict: Any, edges: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the model: positional ones, and others by name.

        Args:
            x_dict: Proxies of the rows by vertex type.
            edges: Proxies of the edges and of their values, in dicts by relation, by the dict's name.
        """
        first, *others = parameters_of(self.model)
        if first.name == "data":
            return [SimpleNamespace(x_dict=x_dict, **edges)], {}
        passed = {parameter.name: edges[parameter.name] for parameter in others[1:] if parameter.name in edges}
        required = [
            parameter
            for parameter in others
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if parameter.name not in passed
        ]
        if [parameter.name for parameter in required] not in (["edge_index_dict"], ["edge_index"]):
            listed = ", ".join(parameter.name for parameter in required) or "no edges"
            raise InputError(
                f"{type(self.model).__name__}.forward needs {listed} after {first.name}, but weft only passes x_dict, "
                "edge_index_dict, and edge_attr_dict if the graph has edge features: give all others a default"
            )
        return [x_dict, edges["edge_index_dict"]], passed


class ValuesAndIndices(NamedTuple):
    """Result of a maximum or minimum along a dimension: a tuple, since models may test for one."""

    values: Any
    """Proxy of the maxima or minima."""
    indices: Any
    """Proxy of the positions of the maxima or minima."""


class Tracer(fx.Tracer):
    """Tracer that turns convolutions into graph steps; modules of PyTorch stay single calls.

    A convolution with a rule in `native_layers.RULES` uses weft's aggregates, all others run on blocks of edges.

    Args:
        types: Types of the graph, for a model on a heterogeneous graph.
    """

    proxy_buffer_attributes = True

    def __init__(self, types: hetero.GraphTypes | None = None) -> None:
        super().__init__()
        self.path, self.types = "", types
        self.vertex_type: Any = None
        """Proxy of the number of each row's vertex type, for a model on a heterogeneous graph."""
        self.relation = ""
        """Relation of the convolution that a rule is converting."""
        self._paused = False
        """True while modules run on tensors."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, Root):
            return False
        dense = type(m).__module__.startswith("torch_geometric.nn.dense.linear") and type(m).__name__ == "Linear"
        return dense or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if self._paused:
            return forward(*args, **kwargs)
        if _is_message_passing(m):
            if self.types is not None and "edge_index_dict" in inspect.signature(m.forward).parameters:
                return self._convolve_types(m, args, kwargs)
            if self.types is not None:
                return self._convolve_relation(m, args, kwargs)
            y = self._convolve(m, args, kwargs)
            y.node.meta[LAYER] = True
            return y
        class_name = type(m).__name__
        if class_name in COUPLING or (class_name == "LayerNorm" and getattr(m, "mode", "node") == "graph"):
            raise InputError(
                f"{line_of(sys._getframe(1))}: {class_name} normalizes a row by the rows of other vertices, of which a "
                "rank stores only some: use BatchNorm, or LayerNorm(mode='node')"
            )
        if isinstance(m, _BatchNorm) and self.types is not None:
            number = self.types.names.index(hetero.type_of(args[0]))
            norm = typed_steps.NormByType(self._path(m), number, self.types.num_types)
            return self.over_graph(norm, self.vertex_type, *args)
        if isinstance(m, _BatchNorm):
            return self.over_graph(GlobalNorm(self._path(m)), *args)
        return super().call_module(m, forward, args, kwargs)

    def over_graph(self, step: GraphStep, *rows: Any) -> Any:
        """Record a graph step, and return a proxy of its result.

        Args:
            step: The step.
            *rows: Its arguments.
        """
        return self.create_proxy("call_function", run_step, (step, *rows), {}, name=type(step).__name__.lower())

    def rows_by_type(self, parts: Any, names: Sequence[str], first: int = 0) -> dict[str, Any]:
        """Return proxies of the rows of vertex types, by name.

        Args:
            parts: Proxy of a tuple.
            names: Names of the types of consecutive entries.
            first: Position of the first of these.
        """
        proxies = {name: parts[number] for number, name in enumerate(names, first)}
        for name, proxy in proxies.items():
            proxy.node.meta[hetero.TYPE] = name
        return proxies

    def edges_by(self, values: Any, relation: str) -> Any:
        """Return a proxy of the edges of a relation, or of their features.

        Args:
            values: Proxy of those of all edges.
            relation: Name of the relation.
        """
        proxy = self.create_proxy("call_function", hetero.edges_of, (values,), {})
        proxy.node.meta[hetero.RELATION] = relation
        return proxy

    def over_relation(self, weight: str, reduce: typed_steps.Reduce, x: Any) -> Any:
        """Record the aggregate and linear transform of the convolution's relation (see `RelationScope`).

        Args:
            weight: Name of the linear layer in the convolution.
            reduce: Reduction over the in-neighbours.
            x: Proxy of the rows of the sources.
        """
        assert self.types is not None
        source, _, target = self.relation.split("|")
        path = f"{self.path}.{weight}"
        width, height = self.root.get_submodule(ROOT + path)._parameters["weight"].shape  # type: ignore[union-attr]
        step = typed_steps.RelationAggregate(
            relation=self.types.relations.index(self.relation),
            target=target,
            source=self.types.names.index(source),
            reduce=reduce,
            weight=path,
            widths=(height, width),
        )
        proxy = self.over_graph(step, x, self.vertex_type)
        proxy.node.meta[hetero.TYPE] = target
        return proxy

    def call_over(self, relation: str, width: int, x: Any, x_target: Any, *, reads_edge_attr: bool = False) -> Any:
        """Record a call of the convolution over a relation, and return a proxy of its result.

        Args:
            relation: Name of the relation.
            width: Number of columns of the result.
            x: Proxy of the rows of the sources.
            x_target: Proxy of the rows of the targets.
            reads_edge_attr: True if the convolution gets edge features.
        """
        assert self.types is not None
        source, _, target = relation.split("|")
        call = typed_steps.RelationCall(
            relation=self.types.relations.index(relation),
            ends=(self.types.names.index(source), self.types.names.index(target)),
            path=self.path,
            width=width,
            reads_edge_attr=reads_edge_attr,
        )
        proxy = self.over_graph(call, x, x_target, self.vertex_type)
        proxy.node.meta[hetero.TYPE] = target
        return proxy

    def mean_of_type(self, x: Any) -> Any:
        """Record a mean over all vertices of a type, and return a proxy of it, repeated for each vertex.

        Args:
            x: Proxy of the rows of the type.
        """
        assert self.types is not None
        number = self.types.names.index(hetero.type_of(x))
        return self.over_graph(typed_steps.MeanOfType(number, self.types.num_types), self.vertex_type, x)

    def create_arg(self, a: Any) -> Any:
        return a if isinstance(a, GraphStep) else super().create_arg(a)

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: Any, *more: Any, **rest: Any) -> Any:
        proxy: Any = super().create_proxy(kind, target, args, kwargs, *more, **rest)
        if target in (torch.max, torch.min) and isinstance(kwargs.get("dim", args[1] if args[1:] else None), int):
            return ValuesAndIndices(proxy[0], proxy[1])
        return proxy

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["line"] = line_of(sys._getframe(1))
        node.meta[CONSTANT] = not torch.is_grad_enabled()
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise InputError(
                f"{node.meta['line']}: torch.autocast cannot be converted: remove it; dtype='bfloat16' makes weft "
                "store rows in 16 bits"
            )
        types = {source.meta[hetero.TYPE] for source in node.all_input_nodes if hetero.TYPE in source.meta}
        joining = typed_steps.RelationCall | typed_steps.CallByType | typed_steps.LogitsByType
        joins = node.target is run_step and isinstance(node.args[0], joining)
        if len(types) > 1 and node.op != "output" and not joins:
            raise InputError(
                f"{node.meta['line']}: rows of {' and '.join(sorted(types))} are combined, but these belong to "
                "different vertices: only convolutions can combine them"
            )
        if len(types) == 1 and not joins:
            (node.meta[hetero.TYPE],) = types
        return node

    def _path(self, module: nn.Module) -> str:
        return self.path_of_module(module).removeprefix(ROOT)

    def _convolve_relation(self, conv: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Convert a convolution over the edges of one relation."""
        name, location = type(conv).__name__, line_of(sys._getframe(1))
        signature = inspect.signature(conv.forward)
        bound = signature.bind(*args, **kwargs).arguments
        arguments = {key: value for key, value in bound.items() if value is not signature.parameters[key].default}
        x, edges = arguments.pop("x", None), arguments.pop("edge_index", None)
        relation = hetero.relation_of(edges)
        if not relation:
            raise InputError(
                f"{location}: {name} gets edges that are not in edge_index_dict: pass it one of its entries"
            )
        source, _, target = relation.split("|")
        x, x_target = x if isinstance(x, tuple | list) else (x, x)
        if (hetero.type_of(x), hetero.type_of(x_target)) != (source, target):
            raise InputError(
                f"{location}: {name} over {relation} must get rows of {source} and of {target}, as in x_dict: give "
                "vertices without features some, in the graph"
            )
        features = arguments.pop("edge_attr", None)
        if features is not None and (hetero.relation_of(features) != relation or not _is_edge_attr(features)):
            raise InputError(
                f"{location}: {name} over {relation} gets an edge_attr that is not the graph's: transform edge "
                "features in the convolution, or before training"
            )
        if arguments:
            raise InputError(
                f"{location}: {name} gets {' and '.join(arguments)}, but weft passes a convolution of a heterogeneous "
                "graph only x, and the edges of its relation with their features: make it an attribute of the layer"
            )
        if conv.flow != "source_to_target":
            raise InputError(f"{location}: {name} has flow='target_to_source': reverse the graph's edges instead")
        self.path, self.relation = self._path(conv), relation
        rule = hetero.RULES.get(name) if type(conv).__module__.startswith("torch_geometric.nn.conv") else None
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in conv.modules())
        if rule and not hooked and getattr(conv, "aggr", "") in hetero.REDUCE:
            return rule(self, conv, x, x_target)
        self._paused = True  # it runs the convolution
        try:
            width = hetero.width_over_relation(
                conv, same_rows=x is x_target, same_type=source == target, reads_edge_attr=features is not None
            )
        except InputError as error:
            raise InputError(f"{location}: {error}") from error
        finally:
            self._paused = False
        return self.call_over(relation, width, x, x_target, reads_edge_attr=features is not None)

    def _convolve_types(self, conv: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Convert a convolution over dicts of rows and edges."""
        name, location = type(conv).__name__, line_of(sys._getframe(1))
        bound = inspect.signature(conv.forward).bind(*args, **kwargs).arguments
        rows, edges = bound.pop("x_dict", None), bound.pop("edge_index_dict", None)
        assert self.types is not None
        relations = {relation: tuple(relation.split("|")) for relation in self.types.relations}
        if (
            bound
            or not isinstance(rows, dict)
            or not isinstance(edges, dict)
            or any(hetero.type_of(x) != key for key, x in rows.items())
            or any(relations.get(hetero.relation_of(each)) != key for key, each in edges.items())
        ):
            raise InputError(f"{location}: {name} must get x_dict and edge_index_dict with the graph's types and edges")
        lacking = {end for key in edges for end in (key[0], key[2])} - rows.keys()
        if lacking:
            raise InputError(f"{location}: {name} gets edges of {', '.join(sorted(lacking))}, but no rows of them")
        try:
            width = hetero.width_by_type(conv)
        except InputError as error:
            raise InputError(f"{location}: {error}") from error
        if hetero.is_han(conv):
            self.path = self._path(conv)
            return hetero.convert_han(self, conv, rows, edges)
        targets = getattr(conv, "dst_node_types", {key[2] for key in edges})
        types = CalledTypes(
            tuple(rows),
            tuple(self.types.names.index(each) for each in rows),
            tuple(edges),
            tuple(self.types.relations.index("|".join(key)) for key in edges),
            tuple(each for each in rows if each in targets),
        )
        step = typed_steps.CallByType(
            path=self._path(conv), width=width, called=types, types=types.numbers, num_types=self.types.num_types
        )
        result = self.over_graph(step, self.vertex_type, *rows.values())
        columns = Columns(0, width)
        places = tuple(Place(self.types.names.index(each), columns) for each in types.results)
        split = typed_steps.SplitByType(places, self.types.num_types)
        return self.rows_by_type(self.over_graph(split, self.vertex_type, result), types.results)

    def _convolve(self, conv: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        name, location = type(conv).__name__, line_of(sys._getframe(1))
        signature = inspect.signature(conv.forward)
        bound = signature.bind(*args, **kwargs).arguments
        arguments = {key: value for key, value in bound.items() if value is not signature.parameters[key].default}
        # 1. Check that edges, their weights, features and types are the graph's. 2. Find the rows x.
        # 3. If there is a rule that accepts the remaining arguments, apply it. 4. Otherwise call it on blocks of edges.
        for key in EDGES:
            if arguments.get(key) is not None and not _is_unchanged(arguments[key], key):
                raise InputError(
                    f"{location}: {name} gets an {key} that is not the graph's (edge dropout, for instance). weft "
                    "partitions a fixed graph: change the edges before training"
                )
        first = "x" if "x" in arguments else next(iter(arguments))
        x = arguments.pop(first)
        x = x[0] if isinstance(x, tuple | list) and len(x) == 2 and x[0] is x[1] else x
        if not isinstance(x, fx.Proxy):
            raise InputError(f"{location}: {name} gets different rows for sources and targets: use conv(x, edge_index)")
        if getattr(conv, "flow", "source_to_target") != "source_to_target":
            raise InputError(f"{location}: {name} has flow='target_to_source': reverse the graph's edges instead")
        self.path = self._path(conv)
        rule = RULES.get(name) if type(conv).__module__.startswith("torch_geometric.nn.conv") else None
        if rule and not any(part._forward_hooks or part._forward_pre_hooks for part in conv.modules()):
            accepted = [key for key in inspect.signature(rule).parameters if key not in ("scope", "conv", "x")]
            if arguments.keys() <= {*accepted, *EDGES}:
                y = rule(self, conv, x=x, **{key: arguments.get(key) for key in accepted})
                if y is not None:
                    return y
        others = {key: arguments.pop(key) for key in [*arguments] if key not in EDGES}
        if not all(isinstance(value, fx.Proxy) for value in others.values()):
            raise InputError(
                f"{location}: {name} gets {' and '.join(others)}, but weft passes a convolution only rows, and the "
                "edges with their weights, features and types: make it an attribute of the layer"
            )
        make = partial(pyg_conv_layer, edge_arguments=frozenset(arguments), row_names=tuple(others))
        return self.over_graph(WithView(self.path, make), x, *others.values())


def _is_unchanged(edges: Any, name: str) -> bool:
    """Return whether the argument of a convolution is the graph's own tensor of that name."""
    return isinstance(edges, fx.Proxy) and edges.node.op == "placeholder" and edges.node.target == name


def _is_edge_attr(value: fx.Proxy) -> bool:
    """Return whether the edges or features of a relation are features."""
    (values,) = value.node.args
    return isinstance(values, fx.Node) and values.target == "edge_attr"


def _is_message_passing(module: nn.Module) -> bool:
    return any(base.__name__ == "MessagePassing" for base in type(module).__mro__)
