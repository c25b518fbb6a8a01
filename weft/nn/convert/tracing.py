"""A model's forward as steps, found by running it on stand-ins of its arguments (torch.fx)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.nn.convert import hetero
from weft.nn.convert.fx_calls import CONSTANT, LAYER, ROOT, make_program, run_step
from weft.nn.convert.native_layers import RULES, GlobalNorm, WithView, by_blocks
from weft.nn.convert.source_location import blamed, first_line, line_of
from weft.nn.convert.traced_steps import GraphStep, TracedProgram
from weft.utils.errors import InputError

EDGES = {
    "edge_index": ("edge_index", "adj_t", "adj"),
    "edge_weight": ("edge_weight",),
    "edge_attr": ("edge_attr",),
    "edge_type": ("edge_type",),
}
"""What a graph's edges are called in a model's forward."""
COUPLING = ("GraphNorm", "InstanceNorm", "PairNorm", "MeanSubtractionNorm", "GraphSizeNorm", "DiffGroupNorm")
"""Norms of PyG whose rows depend on all rows."""


def trace(model: nn.Module, given: frozenset[str], types: hetero.Types | None = None) -> TracedProgram:
    """The steps of a model's forward, as it is set to train or to evaluate.

    given: the optional arguments that the graph fills. types: of a model by vertex types. InputError, with the line,
    for what no step can be made of.
    """
    root: Root = Root(model, given) if types is None else RootByType(model, types)
    try:
        with torch.enable_grad():
            graph = Tracer(types).trace(root)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{blamed(error)}: weft.nn.convert cannot follow it ({first_line(error)})") from error
    program = make_program(graph, root, training=model.training, num_relations=len(types.relations) if types else 0)
    return replace(program, output_types=root.output_types) if isinstance(root, RootByType) else program


def parameters_of(model: nn.Module) -> list[inspect.Parameter]:
    """What a model's forward takes."""
    names = getattr(getattr(model, "signature", None), "param_dict", None)  # of PyG's Sequential
    if names:
        return [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    return list(inspect.signature(model.forward).parameters.values())


class Root(nn.Module):
    """A model under arguments of fixed names."""

    def __init__(self, model: nn.Module, given: frozenset[str]) -> None:
        super().__init__()
        self.model, self.given = model, given

    def forward(self, x: Any, edge_index: Any, edge_weight: Any, edge_attr: Any, edge_type: Any) -> Any:
        edges = dict(zip(EDGES, (edge_index, edge_weight, edge_attr, edge_type), strict=True))
        known = {name: edges[what] for what, names in EDGES.items() for name in names}
        first, *others = parameters_of(self.model)
        kwargs = {}
        names = {parameter.name for parameter in others}
        if "edge_attr" in names - self.given and "edge_weight" in self.given - names:
            raise InputError(
                f"{type(self.model).__name__}.forward takes edge_attr, and the graph has edge weights instead (an "
                "edge_attr of one column becomes weights): take edge_weight, or give the graph edge features"
            )
        for one in others:
            optional = one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            if one.name in EDGES["edge_index"] or (one.name in known and (not optional or one.name in self.given)):
                kwargs[one.name] = known[one.name]
            elif not optional:
                raise InputError(
                    f"{type(self.model).__name__}.forward wants {one.name}, and weft has x, edge_index, edge_weight, "
                    "edge_attr and edge_type to give: give it a default"
                )
        return self.model(SimpleNamespace(x=x, **edges) if first.name == "data" else x, **kwargs)


class RootByType(Root):
    """A model that takes rows and edges by type, in dicts."""

    def __init__(self, model: nn.Module, types: hetero.Types) -> None:
        super().__init__(model, frozenset())
        self.types = types

    def forward(self, x: Any, edge_index: Any, edge_weight: Any, edge_attr: Any, edge_type: Any) -> Any:  # noqa: ARG002
        tracer = x.tracer
        rows = tracer.over_graph(hetero.FirstRows(), x)
        tracer.kind = hetero.columns_of(rows, 0, 1)
        x_dict = {name: tracer.first_rows(rows, name) for name in self.types.names}
        edges = {}
        for name in self.types.relations:
            edges[tuple(name.split("|"))] = tracer.edges_by(edge_index, name)
        result = self.model(*self._arguments(x_dict, edges))
        given = result if isinstance(result, dict) else {hetero.type_of(result): result}
        given = {name: one for name, one in given.items() if one is not None}
        if not given or any(name is None or hetero.type_of(one) != name for name, one in given.items()):
            raise InputError("the model is to return the rows of a vertex type, or a dict of rows by vertex type")
        self.output_types = tuple(given)
        numbers = tuple(self.types.names.index(name) for name in given)
        return tracer.create_proxy(
            "call_function", hetero.logits_by_number, (tracer.kind, numbers, *given.values()), {}
        )

    def _arguments(self, x_dict: Any, edges: Any) -> list[Any]:
        first, *others = parameters_of(self.model)
        if first.name == "data":
            return [SimpleNamespace(x_dict=x_dict, edge_index_dict=edges)]
        wanted = [one for one in others if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        if [one.name for one in wanted] not in (["edge_index_dict"], ["edge_index"]):
            said = ", ".join(one.name for one in wanted) or "no edges"
            raise InputError(
                f"{type(self.model).__name__}.forward wants {said} beside {first.name}, and weft has x_dict and "
                "edge_index_dict to give: give others a default"
            )
        return [x_dict, edges]


class Extreme(NamedTuple):
    """What a maximum or minimum by columns gives, as a tuple, which people ask whether it is one."""

    values: Any
    indices: Any


class Tracer(fx.Tracer):
    """Convolutions become steps over the graph, by their rule or by blocks; what PyTorch has stays one call."""

    proxy_buffer_attributes = True

    def __init__(self, types: hetero.Types | None = None) -> None:
        super().__init__()
        self.path, self.types = "", types
        self.kind: Any = None
        """The number of each row's vertex type, of a model by vertex types."""
        self.relation = ""
        """That which a convolution goes over."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, Root):
            return False
        dense = type(m).__module__.startswith("torch_geometric.nn.dense.linear") and type(m).__name__ == "Linear"
        return dense or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if _is_message_passing(m):
            if self.types is not None:
                return self._relate(m, args, kwargs)
            y = self._convolve(m, args, kwargs)
            y.node.meta[LAYER] = True
            return y
        kind = type(m).__name__
        if kind in COUPLING or (kind == "LayerNorm" and getattr(m, "mode", "node") == "graph"):
            raise InputError(
                f"{line_of(sys._getframe(1))}: {kind} normalises a row by all others, of which a rank has some: use "
                "BatchNorm, or LayerNorm(mode='node')"
            )
        if isinstance(m, _BatchNorm) and self.types is not None:
            raise InputError(
                f"{line_of(sys._getframe(1))}: {kind} over the rows of a vertex type cannot be converted: use LayerNorm"
            )
        if isinstance(m, _BatchNorm):
            return self.over_graph(GlobalNorm(self._path(m)), *args)
        return super().call_module(m, forward, args, kwargs)

    def over_graph(self, step: GraphStep, *rows: Any) -> Any:
        """The result of a step over the graph."""
        return self.create_proxy("call_function", run_step, (step, *rows), {}, name=type(step).__name__.lower())

    def first_rows(self, rows: Any, name: str) -> Any:
        """The rows of a vertex type, as the model gets them."""
        assert self.types is not None
        found = self.create_proxy("call_function", hetero.columns_of, (rows, 1, self.types.widths[name]), {})
        found.node.meta[hetero.TYPE] = name
        return found

    def edges_by(self, edge_index: Any, relation: str) -> Any:
        """What stands for the edges of a relation."""
        found = self.create_proxy("call_function", hetero.edges_of, (edge_index,), {})
        found.node.meta[hetero.RELATION] = relation
        return found

    def over_relation(self, weight: str, reduce: hetero.Reduce, x: Any) -> Any:
        """The sources' rows x by the relation that the convolution goes over, reduced and mapped."""
        assert self.types is not None
        source, _, target = self.relation.split("|")
        path = f"{self.path}.{weight}"
        width, height = self.root.get_submodule(ROOT + path)._parameters["weight"].shape  # type: ignore[union-attr]
        step = hetero.Related(
            relation=self.types.relations.index(self.relation),
            target=target,
            source=self.types.names.index(source),
            reduce=reduce,
            weight=path,
            widths=(height, width),
        )
        found = self.over_graph(step, x, self.kind)
        found.node.meta[hetero.TYPE] = target
        return found

    def create_arg(self, a: Any) -> Any:
        return a if isinstance(a, GraphStep) else super().create_arg(a)

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: Any, *more: Any, **rest: Any) -> Any:
        found: Any = super().create_proxy(kind, target, args, kwargs, *more, **rest)
        if target in (torch.max, torch.min) and isinstance(kwargs.get("dim", args[1] if args[1:] else None), int):
            return Extreme(found[0], found[1])
        return found

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["line"] = line_of(sys._getframe(1))
        node.meta[CONSTANT] = not torch.is_grad_enabled()
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise InputError(
                f"{node.meta['line']}: torch.autocast cannot be followed: leave it out; dtype='bfloat16' has weft keep "
                "rows in half the bytes"
            )
        types = {one.meta[hetero.TYPE] for one in node.all_input_nodes if hetero.TYPE in one.meta}
        if len(types) > 1 and node.op != "output" and node.target is not hetero.logits_by_number:
            raise InputError(
                f"{node.meta['line']}: rows of {' and '.join(sorted(types))} are put together, of which none belongs "
                "to another: leave that to convolutions"
            )
        if len(types) == 1:
            (node.meta[hetero.TYPE],) = types
        return node

    def _path(self, module: nn.Module) -> str:
        return self.path_of_module(module).removeprefix(ROOT)

    def _relate(self, conv: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A convolution over the edges of one relation."""
        name, where = type(conv).__name__, line_of(sys._getframe(1))
        signature = inspect.signature(conv.forward)
        given = signature.bind(*args, **kwargs).arguments
        said = {key: one for key, one in given.items() if one is not signature.parameters[key].default}
        x, edges = said.pop("x", None), said.pop("edge_index", None)
        relation = edges.node.meta.get(hetero.RELATION) if isinstance(edges, fx.Proxy) else None
        if relation is None:
            raise InputError(
                f"{where}: {name} is given other edges than those of edge_index_dict: give it one of these"
            )
        source, _, target = relation.split("|")
        x, own = x if isinstance(x, tuple | list) else (x, x)
        if (hetero.type_of(x), hetero.type_of(own)) != (source, target):
            raise InputError(
                f"{where}: {name} over {relation} is to be given rows of {source} and of {target}, as x_dict has them: "
                "give vertices without features some, in the graph"
            )
        rule = hetero.RULES.get(name) if type(conv).__module__.startswith("torch_geometric.nn.conv") else None
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in conv.modules())
        if (
            rule is None
            or said
            or hooked
            or getattr(conv, "aggr", "") not in hetero.REDUCE
            or conv.flow != "source_to_target"
        ):
            what = f" with {' and '.join(said)}" if said else f" with aggr={conv.aggr!r}" if rule and not hooked else ""
            raise InputError(
                f"{where}: {name}{what} cannot be converted over one relation of several: use SAGEConv or GraphConv "
                "with aggr='mean' or 'sum', without hooks"
            )
        self.path, self.relation = self._path(conv), relation
        return rule(self, conv, x, own)

    def _convolve(self, conv: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        name, where = type(conv).__name__, line_of(sys._getframe(1))
        signature = inspect.signature(conv.forward)
        given = signature.bind(*args, **kwargs).arguments
        said = {key: one for key, one in given.items() if one is not signature.parameters[key].default}
        for key in EDGES:
            if said.get(key) is not None and not _is_graphs(said[key], key):
                raise InputError(
                    f"{where}: {name} is given another {key} than the graph's: give the graph the edges that it is to "
                    "have"
                )
        first = "x" if "x" in said else next(iter(said))
        x = said.pop(first)
        x = x[0] if isinstance(x, tuple | list) and len(x) == 2 and x[0] is x[1] else x
        if not isinstance(x, fx.Proxy):
            raise InputError(f"{where}: {name} reads rows of two kinds: call it as conv(x, edge_index)")
        if getattr(conv, "flow", "source_to_target") != "source_to_target":
            raise InputError(f"{where}: {name} sends from targets to sources: turn the graph's edges round instead")
        self.path = self._path(conv)
        rule = RULES.get(name) if type(conv).__module__.startswith("torch_geometric.nn.conv") else None
        if rule and not any(part._forward_hooks or part._forward_pre_hooks for part in conv.modules()):
            wanted = [key for key in inspect.signature(rule).parameters if key not in ("scope", "conv", "x")]
            if said.keys() <= {*wanted, *EDGES}:
                y = rule(self, conv, x=x, **{key: said.get(key) for key in wanted})
                if y is not None:
                    return y
        others = [key for key in said if key not in EDGES]
        if others:
            raise InputError(
                f"{where}: {name} is given {' and '.join(others)} beside x and what the graph knows of its edges, and "
                "runs on those alone: have it in the layer"
            )
        if "edge_type" in said:
            raise InputError(
                f"{where}: {name} reads edge_type in a way that weft has no aggregate for: take RGCNConv with "
                "aggr='mean'"
            )
        return self.over_graph(WithView(self.path, partial(by_blocks, given=frozenset(said))), x)


def _is_graphs(edges: Any, name: str) -> bool:
    """Whether what a convolution is given is what the graph knows of its edges by that name."""
    return isinstance(edges, fx.Proxy) and edges.node.op == "placeholder" and edges.node.target == name


def _is_message_passing(module: nn.Module) -> bool:
    return any(one.__name__ == "MessagePassing" for one in type(module).__mro__)
