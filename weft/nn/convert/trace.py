"""A model's forward as steps, found by running it on stand-ins of its arguments (torch.fx)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.core.errors import InputError
from weft.nn.convert.layers import RULES, GlobalNorm, WithView, by_blocks
from weft.nn.convert.program import GraphStep, Program
from weft.nn.convert.steps import LAYER, ROOT, make_program, run_step
from weft.nn.convert.where import blamed, first_line, line_of

EDGES = {
    "edge_index": ("edge_index", "adj_t", "adj"),
    "edge_weight": ("edge_weight",),
    "edge_attr": ("edge_attr",),
    "edge_type": ("edge_type",),
}
"""What a graph's edges are called in a model's forward."""
COUPLING = ("GraphNorm", "InstanceNorm", "PairNorm", "MeanSubtractionNorm", "GraphSizeNorm", "DiffGroupNorm")
"""Norms of PyG whose rows depend on all rows."""


def trace(model: nn.Module, given: frozenset[str]) -> Program:
    """The steps of a model's forward, as it is set to train or to evaluate.

    given: the optional arguments that the graph fills. InputError, with the line, for what no step can be made of.
    """
    root = Root(model, given)
    try:
        graph = Tracer().trace(root)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{blamed(error)}: weft.nn.convert cannot follow it ({first_line(error)})") from error
    return make_program(graph, root, training=model.training)


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


class Tracer(fx.Tracer):
    """Convolutions become steps over the graph, by their rule or by blocks; what PyTorch has stays one call."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.path = ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, Root):
            return False
        dense = type(m).__module__.startswith("torch_geometric.nn.dense.linear")
        return dense or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if _is_message_passing(m):
            y = self._convolve(m, args, kwargs)
            y.node.meta[LAYER] = True
            return y
        kind = type(m).__name__
        if kind in COUPLING or (kind == "LayerNorm" and getattr(m, "mode", "node") == "graph"):
            raise InputError(
                f"{line_of(sys._getframe(1))}: {kind} normalises a row by all others, of which a rank has some: use "
                "BatchNorm, or LayerNorm(mode='node')"
            )
        if isinstance(m, _BatchNorm):
            return self.over_graph(GlobalNorm(self._path(m)), *args)
        return super().call_module(m, forward, args, kwargs)

    def over_graph(self, step: GraphStep, *rows: Any) -> Any:
        """The result of a step over the graph."""
        return self.create_proxy("call_function", run_step, (step, *rows), {}, name=type(step).__name__.lower())

    def create_arg(self, a: Any) -> Any:
        return a if isinstance(a, GraphStep) else super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["line"] = line_of(sys._getframe(1))
        return node

    def _path(self, module: nn.Module) -> str:
        return self.path_of_module(module).removeprefix(ROOT)

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
                f"{where}: {name} reads edge_type in a way that weft has no aggregate for: take RGCNConv with aggr='mean'"
            )
        return self.over_graph(WithView(self.path, partial(by_blocks, given=frozenset(said))), x)


def _is_graphs(edges: Any, name: str) -> bool:
    """Whether what a convolution is given is what the graph knows of its edges by that name."""
    return isinstance(edges, fx.Proxy) and edges.node.op == "placeholder" and edges.node.target == name


def _is_message_passing(module: nn.Module) -> bool:
    return any(one.__name__ == "MessagePassing" for one in type(module).__mro__)
