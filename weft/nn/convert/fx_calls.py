"""What a model's calls, as torch.fx has them, come to as steps."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from weft.nn.convert.hetero import edges_of, together
from weft.nn.convert.traced_steps import (
    Dropout,
    Method,
    Module,
    Parameter,
    StepKind,
    TracedProgram,
    TracedStep,
    TracedValue,
    values_in,
)
from weft.utils.errors import InputError

RANDOM = (
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "multinomial"),
    *("dropout_edge", "dropout_node", "dropout_path", "dropout_adj"),
)
"""Functions that draw numbers by themselves."""
IN_PLACE = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul}
IN_PLACE[operator.itruediv] = operator.truediv
LAYER = "layer"
"""Marks the node of what a convolution gives."""
CONSTANT = "constant"
"""Marks the node of a call under torch.no_grad."""
ROOT = "model."
"""What paths begin with below the module that was traced."""


def make_program(graph: fx.Graph, root: nn.Module, *, training: bool, num_relations: int = 0) -> TracedProgram:
    """The steps of a traced forward; root: has the model as `model`. num_relations: of a model by vertex types."""
    for node in graph.nodes:
        _require_plain(node)
    _without_in_place(graph, root)
    _without_gradients(graph)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return _program(graph, root, training, num_relations)


def run_step(*_: Any) -> Any:
    """Stands for a step over the graph among fx's nodes."""
    raise NotImplementedError


def _require_plain(node: fx.Node) -> None:
    """InputError for a function whose result on some rows is another."""
    line, name = node.meta.get("line", ""), str(getattr(node.target, "__name__", node.target))
    if node.op == "call_function" and name in RANDOM:
        raise InputError(f"{line}: {name} draws random numbers of its own: leave it to dropout, which weft makes keyed")
    if node.op == "call_function" and name in ("batch_norm", "alpha_dropout", "feature_alpha_dropout"):
        raise InputError(f"{line}: {name} cannot be followed: use torch.nn.BatchNorm1d or dropout as modules")


def _without_in_place(graph: fx.Graph, root: nn.Module) -> None:
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
        if node.meta.get(CONSTANT) and not (isinstance(node.args[0], fx.Node) and node.args[0].meta.get(CONSTANT)):
            raise InputError(
                f"{node.meta.get('line', '')}: a tensor is changed in place under torch.no_grad, unknown to its "
                "gradient: make a new tensor, or leave torch.no_grad out"
            )
        if isinstance(node.args[0], fx.Node):
            behind = partial(_is_behind, order, node)
            node.args[0].replace_all_uses_with(node, behind)


def _without_gradients(graph: fx.Graph) -> None:
    """Insert a detach after each result made under torch.no_grad that code outside of it reads."""
    for node in list(graph.nodes):
        if not (node.meta.get(CONSTANT) and node.op.startswith("call_")):
            continue
        readers = [user for user in node.users if not user.meta.get(CONSTANT)]
        if readers:
            with graph.inserting_after(node):
                cut = graph.call_function(detached, (node,))
            cut.meta.update(node.meta)
            cut.meta.pop(LAYER, None)
            node.replace_all_uses_with(cut, readers.__contains__)


def detached(value: Any) -> Any:
    """Return a value without the gradients of its tensors; a named tuple becomes a plain one."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        parts = [detached(part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _is_behind(order: dict[fx.Node, int], node: fx.Node, user: fx.Node) -> bool:
    return order[user] > order[node]


def _program(graph: fx.Graph, root: nn.Module, training: bool, num_relations: int) -> TracedProgram:
    """The steps of a graph."""
    kinds: dict[str, StepKind] = {"x": "rows"}
    alias: dict[fx.Node, Any] = {}
    edges: set[fx.Node] = set()
    steps: list[TracedStep] = []
    result = ""
    for node in graph.nodes:
        line = node.meta.get("line", "")
        if node.op == "placeholder":
            alias[node] = TracedValue("x")
            if node.target != "x":
                edges.add(node)
            continue
        if node.op == "get_attr":
            alias[node] = Parameter(node.target.removeprefix(ROOT))
            continue
        if node.target is edges_of:
            edges.add(node)
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
            if not isinstance(found, TracedValue) or kinds[found.name] != "rows":
                raise InputError("the model is to return one tensor with a row for each vertex, as [vertices, classes]")
            result = found.name
            continue
        step = _step(node, args, kwargs, root, training)
        if step is None:  # no more than its argument
            alias[node] = args[0]
            continue
        kind: StepKind = "rows" if any(kinds[one] == "rows" for one in values_in(args, kwargs)) else "shared"
        if _is_width(node):
            kind = "shared"
        kinds[node.name], alias[node] = kind, TracedValue(node.name)
        steps.append(TracedStep(name=node.name, does=step[0], args=step[1], kwargs=step[2], line=line))
    layers = [alias[node].name for node in graph.nodes if node.meta.get(LAYER)]
    return TracedProgram.of(together(steps, kinds, num_relations), result, kinds, tuple(layers))


def _step(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], root: nn.Module, training: bool
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """What a node calls, and with what; None for a call that changes nothing."""
    line = node.meta.get("line", "")
    if node.target is run_step:
        return args[0], args[1:], {}
    if node.op == "call_method":
        return Method(str(node.target)), args, kwargs
    if node.op == "call_module":
        path = str(node.target).removeprefix(ROOT)
        module = root.get_submodule(str(node.target))
        if isinstance(module, _DropoutNd):
            return (Dropout(module.p), args[:1], {}) if module.training and module.p else None
        return None if isinstance(module, nn.Identity) else (Module(path), args, kwargs)
    if node.target in (functional.dropout, torch.dropout):
        said = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        p, drops = said.get("p", 0.5), said.get("training", True)
        if drops and p and not training:
            raise InputError(f"{line}: dropout goes on in evaluations: say training=self.training, or use nn.Dropout")
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
