"""A model's forward as steps, found by running it on stand-ins of its arguments (torch.fx)."""

from __future__ import annotations

import inspect
import linecache
import operator
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from weft.core.errors import InputError
from weft.nn.convert.layers import RULES, GlobalNorm, WithView
from weft.nn.convert.program import Dropout, GraphStep, Kind, Method, Module, Parameter, Program, Step, Value, values_in
from weft.nn.pyg import from_pyg

EDGES = {
    "edge_index": ("edge_index", "adj_t", "adj"),
    "edge_weight": ("edge_weight",),
    "edge_attr": ("edge_attr",),
    "edge_type": ("edge_type",),
}
"""What a graph's edges are called in a model's forward."""
COUPLING = ("GraphNorm", "InstanceNorm", "PairNorm", "MeanSubtractionNorm", "GraphSizeNorm", "DiffGroupNorm")
"""Norms of PyG whose rows depend on all rows."""
RANDOM = (
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "multinomial"),
    *("dropout_edge", "dropout_node", "dropout_path", "dropout_adj"),
)
"""Functions that draw numbers by themselves."""
IN_PLACE = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul}
IN_PLACE[operator.itruediv] = operator.truediv
WEFT, TORCH = Path(__file__).parent, Path(torch.__file__).parent


def trace(model: nn.Module, given: frozenset[str]) -> Program:
    """The steps of a model's forward, as it is set to train or to evaluate.

    given: which of edge_weight and edge_attr an optional argument of that name has. InputError, with the line, for what
    no step can be made of.
    """
    root = Root(model, given)
    try:
        graph = Tracer().trace(root)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{_blamed(error)}: weft.nn.convert cannot follow it ({_first_line(error)})") from error
    for node in graph.nodes:
        _require_plain(node)
    _without_in_place(graph, root)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return _program(graph, root)


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
            return self._convolve(m, args, kwargs)
        kind = type(m).__name__
        if kind in COUPLING or (kind == "LayerNorm" and getattr(m, "mode", "node") == "graph"):
            raise InputError(
                f"{_line_of(sys._getframe(1))}: {kind} normalises a row by all others, of which a rank has some: use "
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
        node.meta["line"] = _line_of(sys._getframe(1))
        return node

    def _path(self, module: nn.Module) -> str:
        return self.path_of_module(module).removeprefix("model.")

    def _convolve(self, conv: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        name, where = type(conv).__name__, _line_of(sys._getframe(1))
        bound = inspect.signature(conv.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        said = {key: one for key, one in bound.arguments.items() if one is not None and key != "edge_index"}
        x = said.get("x", next(iter(said.values())))
        pair = isinstance(x, tuple | list) and len(x) == 2 and x[0] is x[1]
        x = said["x"] = x[0] if pair else x
        if not isinstance(x, fx.Proxy) or "return_attention_weights" in said:
            raise InputError(
                f"{where}: {name} is called in a way that weft cannot follow: call it as conv(x, edge_index)"
            )
        if getattr(conv, "flow", "source_to_target") != "source_to_target":
            raise InputError(f"{where}: {name} sends from targets to sources: turn the graph's edges round instead")
        self.path = self._path(conv)
        rule = RULES.get(name) if type(conv).__module__.startswith("torch_geometric.nn.conv") else None
        if rule:
            wanted = [key for key in inspect.signature(rule).parameters if key not in ("scope", "conv")]
            y = rule(self, conv, **{key: said.get(key) for key in wanted})
            if y is not None:
                return y
        rows = [key for key, one in said.items() if isinstance(one, fx.Proxy) and key not in EDGES and key != "x"]
        if rows:
            raise InputError(f"{where}: {name} reads {' and '.join(['x', *rows])}, and weft runs it on x alone")
        return self.over_graph(WithView(self.path, from_pyg), x)


def run_step(*_: Any) -> Any:
    """Stands for a step over the graph among fx's nodes."""
    raise NotImplementedError


def _is_message_passing(module: nn.Module) -> bool:
    return any(one.__name__ == "MessagePassing" for one in type(module).__mro__)


def _require_plain(node: fx.Node) -> None:
    """InputError for a function whose result on some rows is another."""
    line, name = node.meta.get("line", ""), str(getattr(node.target, "__name__", node.target))
    if node.op == "call_function" and name in RANDOM:
        raise InputError(f"{line}: {name} draws random numbers of its own: leave it to dropout, which weft makes keyed")
    if node.op == "call_function" and name in ("batch_norm", "alpha_dropout", "feature_alpha_dropout"):
        raise InputError(f"{line}: {name} cannot be followed: use torch.nn.BatchNorm1d or dropout as modules")


def _without_in_place(graph: fx.Graph, root: Root) -> None:
    """Calls that change a tensor give a new one, which everything behind them reads."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__"):
            node.target = node.target.removesuffix("_")
        elif node.op == "call_function" and node.target in IN_PLACE:
            node.target = IN_PLACE[node.target]
        elif node.op == "call_function" and node.kwargs.get("inplace"):
            node.kwargs = {**node.kwargs, "inplace": False}
        elif node.op == "call_module" and getattr(root.get_submodule(node.target), "inplace", False):
            root.get_submodule(node.target).inplace = False  # type: ignore[assignment]
        else:
            continue
        if isinstance(node.args[0], fx.Node):
            behind = partial(_is_behind, order, node)
            node.args[0].replace_all_uses_with(node, behind)


def _is_behind(order: dict[fx.Node, int], node: fx.Node, user: fx.Node) -> bool:
    return order[user] > order[node]


def _program(graph: fx.Graph, root: Root) -> Program:
    """The steps of a graph."""
    kinds: dict[str, Kind] = {"x": "rows"}
    alias: dict[fx.Node, Any] = {}
    edges: set[fx.Node] = set()
    steps: list[Step] = []
    result = ""
    for node in graph.nodes:
        line = node.meta.get("line", "")
        if node.op == "placeholder":
            alias[node] = Value("x")
            if node.target != "x":
                edges.add(node)
            continue
        if node.op == "get_attr":
            alias[node] = Parameter(node.target.removeprefix("model."))
            continue
        touched = [one.name for one in node.all_input_nodes if one in edges]
        if touched:
            raise InputError(
                f"{line}: {touched[0]} is read outside of a convolution: give the graph the edges that it is to have, "
                "and leave degrees to the convolutions"
            )
        args, kwargs = (fx.map_arg(one, lambda one: alias[one]) for one in (node.args, node.kwargs))
        if node.op == "output":
            (found,) = args
            if not isinstance(found, Value) or kinds[found.name] != "rows":
                raise InputError("the model is to return one tensor with a row for each vertex, as [vertices, classes]")
            result = found.name
            continue
        step = _step(node, args, kwargs, root)
        if step is None:  # no more than its argument
            alias[node] = args[0]
            continue
        kind: Kind = "rows" if any(kinds[one] == "rows" for one in values_in(args, kwargs)) else "shared"
        if _is_width(node):
            kind = "shared"
        kinds[node.name], alias[node] = kind, Value(node.name)
        steps.append(Step(name=node.name, does=step[0], args=step[1], kwargs=step[2], kind=kind, line=line))
    return Program(steps=_with_alive(steps, result), result=result, kinds=kinds)


def _step(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], root: Root
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """What a node calls, and with what; None for a call that changes nothing."""
    line = node.meta.get("line", "")
    if node.target is run_step:
        return args[0], args[1:], {}
    if node.op == "call_method":
        return Method(str(node.target)), args, kwargs
    if node.op == "call_module":
        path = str(node.target).removeprefix("model.")
        module = root.get_submodule(str(node.target))
        if isinstance(module, _DropoutNd):
            return (Dropout(module.p), args[:1], {}) if module.training and module.p else None
        return None if isinstance(module, nn.Identity) else (Module(path), args, kwargs)
    if node.target in (functional.dropout, torch.dropout):
        said = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        p, drops = said.get("p", 0.5), said.get("training", True)
        if drops and p and not root.model.training:
            raise InputError(f"{line}: dropout goes on in evaluations: say training=self.training")
        return (Dropout(p), (said["input"],), {}) if drops and p else None
    return node.target, args, kwargs


def _is_width(node: fx.Node) -> bool:
    """Whether a node is a number of columns, which all rows share."""
    if node.op == "call_method" and node.target == "size":
        return bool(len(node.args) == 2 and node.args[1] != 0)
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        of = node.args[0]
        shape = of.target is getattr and of.args[1] == "shape"
        return bool((shape or (of.op == "call_method" and of.target == "size")) and node.args[1] != 0)
    return False


def _with_alive(steps: list[Step], result: str) -> tuple[Step, ...]:
    """The steps, each with what is read behind it."""
    read: dict[str, None] = {result: None}
    found: list[Step] = []
    for step in reversed(steps):
        read.pop(step.name, None)
        found.append(replace(step, alive=tuple(read)))
        read |= dict.fromkeys(values_in(step.args, step.kwargs))
    return tuple(reversed(found))


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _is_theirs(file: str) -> bool:
    """Whether a file is neither weft's nor PyTorch's."""
    return not any(part in Path(file).parents for part in (WEFT, TORCH)) and not file.startswith("<")


def _line_of(frame: FrameType) -> str:
    """The innermost line that is being run and is somebody's own."""
    found = next(((file, line) for file, line in _frames(frame) if _is_theirs(file)), None)
    return _said(*found) if found else "the model"


def _said(file: str, line: int) -> str:
    text = linecache.getline(file, line).strip()
    return f"{Path(file).name}, line {line}" + (f" ({text})" if text else "")


def _blamed(error: Exception) -> str:
    """The line of the model that an error comes from."""
    lines = [
        (one.filename, one.lineno) for one in traceback.extract_tb(error.__traceback__) if _is_theirs(one.filename)
    ]
    return _said(lines[-1][0], lines[-1][1] or 0) if lines else "the model"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
