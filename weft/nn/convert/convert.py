"""The door: a PyG model in, a model over views out."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from weft.data import GraphShape
from weft.nn.convert.hetero import INPUT, RowsByType, Types, takes_types
from weft.nn.convert.native_layers import GlobalNorm, WithView
from weft.nn.convert.traced_model import Converted
from weft.nn.convert.traced_steps import GraphStep, TracedProgram
from weft.nn.convert.tracing import EDGES, parameters_of, trace
from weft.nn.layers.norm import BatchNorm
from weft.utils.errors import InputError


def convert(model: nn.Module, *, given: Collection[str] = (), shape: GraphShape | None = None) -> Converted:
    """A PyG model, unchanged, as one that runs under weft's strategies, with the numbers of one device.

    model: its forward takes x and edge_index, and may take edge_weight and edge_attr, or `data` with these; it returns
    a row for each vertex. Its Python runs once in training and once in evaluation: loops and branches on its options
    stay, branches on tensors cannot. given: the optional arguments, such as edge_weight, that the graph is to fill.
    Of a graph of HeteroData, it may take x_dict and edge_index_dict instead, and return rows of a vertex type, or of
    several in a dict: shape is that of the graph then, as `Graph.by_type` gives it.

    Convolutions that weft has (weft.nn.convert.native_layers.RULES) become its aggregates, others run by blocks of edges as
    they are; dropout becomes keyed, batch norm that of all vertices. The result shares the model's parameters, and
    names them as it does: `state_dict` goes both ways.

    InputError names the file, the line and the remedy of what cannot be converted.
    """
    unknown = set(given) - {*EDGES}
    if unknown:
        raise InputError(f"given={sorted(unknown)}: give some of edge_weight, edge_attr, edge_type")
    if any(isinstance(one, UninitializedParameter) for one in model.parameters()):
        raise InputError(
            f"{type(model).__name__} has weights that get their widths with the first rows: call it once on the data "
            "before, under torch.no_grad()"
        )
    shadow = _sharing(model)
    types = Types.of(shape, type(model).__name__) if takes_types(model) else None
    if types is not None and shape is not None:
        _require_no_edge_values(model, shape)
    programs = {training: trace(shadow.train(training), frozenset(given), types) for training in (True, False)}
    training, evaluating = programs[True], programs[False]
    if [type(step.does) for step in _graph_steps(training)] != [type(step.does) for step in _graph_steps(evaluating)]:
        raise InputError(f"{type(model).__name__} has other convolutions in training than in evaluation: have the same")
    for path, part in _replaced(shadow, training).items():
        parent, _, name = path.rpartition(".")
        shadow.get_submodule(parent).add_module(name, part)
    if types is not None:
        shadow.add_module(INPUT, RowsByType(types.typed))
    return Converted(shadow, training, evaluating).train(model.training)


def _require_no_edge_values(model: nn.Module, shape: GraphShape) -> None:
    """InputError where a model by vertex types takes features or weights of edges that the graph has."""
    has = {"edge_attr_dict": shape.num_edge_features > 0, "edge_weight_dict": shape.weighted}
    for parameter in parameters_of(model):
        if has.get(parameter.name):
            raise InputError(
                f"{type(model).__name__}.forward takes {parameter.name}, and weft has no edge features or weights by "
                "relation: leave the argument out, or give the graph none"
            )


def is_pyg(model: nn.Module) -> bool:
    """Whether a module is written for PyG: it is none over views, and takes edges, or `data`."""
    wanted = {"data", "edge_index_dict", *(one for some in EDGES.values() for one in some)}
    return not hasattr(model, "num_stages") and not wanted.isdisjoint(one.name for one in parameters_of(model))


def _sharing(model: nn.Module) -> nn.Module:
    """A copy of the modules, whose parameters and buffers are the model's."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(one): one for one in tensors})


def _graph_steps(program: TracedProgram) -> list[Any]:
    return [step for step in program.steps if isinstance(step.does, GraphStep)]


def _replaced(model: nn.Module, program: TracedProgram) -> dict[str, nn.Module]:
    """The modules that stand for others, by path."""
    found: dict[str, nn.Module] = {}
    for step in _graph_steps(program):
        if isinstance(step.does, WithView):
            found[step.does.path] = step.does.make(model.get_submodule(step.does.path))
        elif isinstance(step.does, GlobalNorm):
            part = model.get_submodule(step.does.path)
            assert isinstance(part, _BatchNorm)
            found[step.does.path] = BatchNorm.of(part)
    return found
