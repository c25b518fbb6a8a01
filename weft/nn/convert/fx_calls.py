"""Conversion of a torch.fx graph to the steps of a `TracedProgram`."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from weft.nn.convert.hetero import TYPE, VERTEX_TYPE, GraphTypes, edges_of, join_relations
from weft.nn.convert.traced_steps import (
    Dropout,
    GraphStep,
    Method,
    Module,
    Parameter,
    StepKind,
    TracedProgram,
    TracedStep,
    TracedValue,
    ValueTypes,
    values_in,
)
from weft.utils.errors import InputError

RANDOM = (
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "multinomial"),
    *("dropout_edge", "dropout_node", "dropout_path", "dropout_adj"),
)
"""Names of functions that draw random numbers."""
IN_PLACE = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul}
"""Operators that change a tensor in place, with those that return a new one."""
IN_PLACE[operator.itruediv] = operator.truediv
LAYER = "layer"
"""Key in the metadata of a node that is the result of a convolution."""
CONSTANT = "constant"
"""Key in the metadata of a node of a call under torch.no_grad."""
ROOT = "model."
"""Prefix of the paths of the model's modules in the module that is traced."""


def make_program(graph: fx.Graph, root: nn.Module, *, training: bool, types: GraphTypes | None = None) -> TracedProgram:
    """Return the program of a traced forward pass.

    Args:
        graph: The traced calls; changed.
        root: Module that was traced, with the model as `model`.
        training: True if it was traced in training.
        types: Types of the graph, for a model on a heterogeneous graph.
    """
    # 1. Reject calls that cannot be converted. 2. Replace calls in place by calls that return new tensors.
    # 3. Remove unused calls, and turn the rest into steps.
    for node in graph.nodes:
        _check_supported(node)
    _remove_in_place(graph, root)
    _add_without_stacking(graph)
    graph.eliminate_dead_code(_is_needed)
    return _program(graph, root, training, types)


def run_step(*_: Any) -> Any:
    """Stand in for a `GraphStep` among torch.fx nodes; never called."""
    raise NotImplementedError


def _is_needed(node: fx.Node) -> bool:
    """Return whether a node is needed even if nothing reads its result."""
    has_effect = node.target is run_step and cast(GraphStep, node.args[0]).has_effect
    return node.op in ("placeholder", "output") or has_effect


def _check_supported(node: fx.Node) -> None:
    """Raise InputError for a function whose result on a subset of rows differs."""
    line, name = node.meta.get("line", ""), str(getattr(node.target, "__name__", node.target))
    if node.op == "call_function" and name in RANDOM:
        raise InputError(f"{line}: {name} draws random numbers, which would differ between ranks: use dropout instead")
    if node.op == "call_function" and name in ("batch_norm", "alpha_dropout", "feature_alpha_dropout"):
        raise InputError(f"{line}: {name} cannot be converted: use the modules BatchNorm1d or Dropout of torch.nn")


def _remove_in_place(graph: fx.Graph, root: nn.Module) -> None:
    """Replace calls in place by calls that return a new tensor, which all later calls read."""
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
                f"{node.meta.get('line', '')}: a tensor is changed in place under torch.no_grad, which autograd "
                "does not see: create a new tensor, or remove torch.no_grad"
            )
        if isinstance(node.args[0], fx.Node):
            is_later = partial(_is_after, order, node)
            node.args[0].replace_all_uses_with(node, is_later)


def _add_without_stacking(graph: fx.Graph) -> None:
    """Replace the sum of stacked rows by additions, which need no copy of all of them. HeteroConv stacks and sums."""
    for node in graph.nodes:
        stacked = node.args[0] if node.target is torch.sum and node.args else None
        if not isinstance(stacked, fx.Node) or stacked.target is not torch.stack:
            continue
        if not isinstance(stacked.args[0], list | tuple):  # the result of a call
            continue
        if node.args[1:] or node.kwargs != {"dim": 0} or stacked.args[1:] or stacked.kwargs not in ({}, {"dim": 0}):
            continue
        first, *others = cast(list[fx.Node], stacked.args[0])
        for other in others:
            with graph.inserting_before(node):
                first = graph.call_function(operator.add, (first, other))
                first.meta = dict(node.meta)
        node.replace_all_uses_with(first)


def _is_after(order: dict[fx.Node, int], node: fx.Node, user: fx.Node) -> bool:
    return order[user] > order[node]


def _program(graph: fx.Graph, root: nn.Module, training: bool, types: GraphTypes | None) -> TracedProgram:
    """Turn the nodes of a graph into steps.

    `references` maps each node to what its readers get instead: a `TracedValue`, a `Parameter`, or, if a call does
    nothing, its argument.
    """
    kinds: dict[str, StepKind] = {"x": "rows"}
    references: dict[fx.Node, Any] = {}
    edges: set[fx.Node] = set()
    steps: list[TracedStep] = []
    result = vertex_type = ""
    of_value: dict[str, int] = {}
    for node in graph.nodes:
        line = node.meta.get("line", "")
        if node.op == "placeholder":
            references[node] = TracedValue("x")
            if node.target != "x":
                edges.add(node)
            continue
        if node.op == "get_attr":
            references[node] = Parameter(node.target.removeprefix(ROOT))
            continue
        if node.target is edges_of:
            edges.add(node)
            continue
        edge_names = [source.name for source in node.all_input_nodes if source in edges]
        if edge_names:
            raise InputError(
                f"{line}: the model uses {edge_names[0]} outside of a convolution. weft partitions a fixed graph: "
                "change the edges before training, and leave degrees to convolutions"
            )
        args, kwargs = (
            fx.map_arg(argument, lambda source: references[source]) for argument in (node.args, node.kwargs)
        )
        if node.op == "output":
            (output,) = args
            if not isinstance(output, TracedValue) or kinds[output.name] != "rows":
                raise InputError("the model must return one tensor with a row for each vertex, [vertices, classes]")
            result = output.name
            continue
        step = _step(node, args, kwargs, root, training)
        if step is None:  # the call returns its argument
            references[node] = args[0]
            continue
        if types is not None and TYPE in node.meta:
            of_value[node.name] = types.names.index(node.meta[TYPE])
            if isinstance(step[0], Dropout):
                step = Dropout(step[0].p, of_value[node.name]), (*step[1], TracedValue(vertex_type)), {}
        if node.meta.get(VERTEX_TYPE):
            vertex_type = node.name
        kind: StepKind = "rows" if any(kinds[name] == "rows" for name in values_in(args, kwargs)) else "shared"
        if _is_width(node):
            kind = "shared"
        kinds[node.name], references[node] = kind, TracedValue(node.name)
        constant = bool(node.meta.get(CONSTANT))
        steps.append(
            TracedStep(name=node.name, operation=step[0], args=step[1], kwargs=step[2], line=line, constant=constant)
        )
    layers = [references[node].name for node in graph.nodes if node.meta.get(LAYER)]
    if types is None:
        return TracedProgram.of(steps, result, kinds, tuple(layers))
    value_types = ValueTypes(vertex_type=vertex_type, num_types=types.num_types, of_value=of_value)
    return TracedProgram.of(join_relations(steps, kinds, types), result, kinds, tuple(layers), value_types)


def _step(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], root: nn.Module, training: bool
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return the operation of a node and its arguments; None for a call that returns its argument."""
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
        arguments = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        p, is_on = arguments.get("p", 0.5), arguments.get("training", True)
        if is_on and p and not training:
            raise InputError(f"{line}: dropout stays on in evaluation: pass training=self.training, or use nn.Dropout")
        return (Dropout(p), (arguments["input"],), {}) if is_on and p else None
    return node.target, args, kwargs


def _is_width(node: fx.Node) -> bool:
    """Return whether a node is a number of columns, which is the same for all rows."""
    if node.op == "call_method" and node.target == "size":
        return bool(len(node.args) == 2 and node.args[1] != 0)
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        tensor = node.args[0]
        is_shape = tensor.target is getattr and tensor.args[1] == "shape"
        return bool((is_shape or (tensor.op == "call_method" and tensor.target == "size")) and node.args[1] != 0)
    return False
