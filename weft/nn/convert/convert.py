"""Entry point of the conversion: a PyG model in, a model over views out."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from weft.data import GraphShape
from weft.nn.convert.comparison import check_same_results
from weft.nn.convert.hetero import GraphTypes, is_han, takes_types
from weft.nn.convert.native_layers import GlobalNorm, SumOverInEdges, WithView
from weft.nn.convert.random_graph import RandomGraph, RandomTypedGraph
from weft.nn.convert.source_location import first_line, line_of_code
from weft.nn.convert.traced_model import Converted
from weft.nn.convert.traced_steps import GraphStep, TracedProgram, TracedValue
from weft.nn.convert.tracing import EDGES, parameters_of, trace
from weft.nn.convert.typed_steps import INPUT, CallByType, JoinedCalls, NormByType, RowsByType
from weft.nn.layers.norm import BatchNorm
from weft.nn.layers.pyg_conv import ConvWithSums, share_programs
from weft.nn.layers.relation_convs import HanAttention, RelationConv
from weft.nn.layers.typed_conv import TypedConv
from weft.utils.errors import InputError

LISTED = "use layers that docs/models.md lists"
"""Advice for a model that cannot be converted."""


def convert(
    model: nn.Module,
    *,
    edge_inputs: Collection[str] = (),
    shape: GraphShape | None = None,
    unchecked: bool = False,
    alternative: str = LISTED,
) -> Converted:
    """Convert an unchanged PyG model to one that runs under weft's strategies, with the same results as on one device.

    The model's Python code runs twice, once in training and once in evaluation. Loops and branches on the model's
    options are fine, branches on tensors are not. Convolutions with a rule in weft.nn.convert.native_layers.RULES use
    weft's aggregates; all others are called on blocks of edges, after an aggregate for the sums over in-edges that they
    compute before their messages, such as degrees. Dropout becomes keyed, and batch norm normalizes over all vertices.

    Args:
        model: Its forward takes x and edge_index, and optionally edge_weight and edge_attr, or `data` with these; it
            returns a row for each vertex. For a graph from HeteroData, it takes x_dict and edge_index_dict, and returns
            the rows of a vertex type, or a dict of rows by vertex type.
        edge_inputs: Optional arguments of forward, such as edge_weight, that the graph has.
        shape: Shape of the graph (`GraphShape.of(graph)`), by which the results are compared on a graph with the same
            numbers of features. None: these are found from the model's parameters. A model on a graph from HeteroData
            needs it (`GraphShape.of(graph.by_type())`).
        unchecked: True to leave out the comparison of the converted model's results with the original's.
        alternative: What else to do if the results differ, in the error. A model on a graph from HeteroData has no
            alternative but weft's layers.

    Returns:
        A model that shares the parameters. It names them as before, so `state_dict` works in both directions. You can
        call it as the original.

    Raises:
        InputError: The model cannot be converted, or computes other numbers than the original on a small random graph.
            The message names file and line, and what to do.
    """
    model = unwrapped(model)
    unknown = set(edge_inputs) - {*EDGES}
    if unknown:
        raise InputError(f"edge_inputs={sorted(unknown)}: the possible names are edge_weight, edge_attr, edge_type")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise InputError(
            f"{type(model).__name__} has uninitialized lazy layers (-1): run one forward pass on your data first, "
            "under torch.no_grad()"
        )
    shadow = _copy_sharing_tensors(model)
    types = GraphTypes.of(shape, type(model).__name__) if takes_types(model) else None
    if types is not None and shape is not None:
        _check_no_edge_weights(model, shape)
    programs = {training: trace(shadow.train(training), frozenset(edge_inputs), types) for training in (True, False)}
    training, evaluating = programs[True], programs[False]
    if [type(step.operation) for step in _graph_steps(training)] != [
        type(step.operation) for step in _graph_steps(evaluating)
    ]:
        raise InputError(
            f"{line_of_code(type(model).forward)}: {type(model).__name__} calls other convolutions in training than in "
            "evaluation: call the same"
        )
    replacements = _replacements(shadow, training, types)
    summing = {path for path, part in replacements.items() if isinstance(part, ConvWithSums)}
    if summing:
        training, evaluating = (_with_sums(program, summing) for program in (training, evaluating))
    for path, part in replacements.items():
        parent, _, name = path.rpartition(".")
        shadow.get_submodule(parent).add_module(name, part)
    if types is not None:
        shadow.add_module(INPUT, RowsByType(types.typed))
    converted = Converted(shadow, training, evaluating, model).train(model.training)
    share_programs(converted)
    if not unchecked:
        alternative = f"{LISTED}, or weft.nn.RGCN" if types else alternative
        make_graph = partial(RandomGraph.of, model, frozenset(edge_inputs), shape)
        num_edge_features = shape.num_edge_features if shape and "edge_attr" in edge_inputs else 0
        make = partial(RandomTypedGraph.of_types, types, num_edge_features) if types else make_graph
        check_same_results(model, converted, make, alternative)
    return converted


def _check_no_edge_weights(model: nn.Module, shape: GraphShape) -> None:
    """Raise InputError if a model on a heterogeneous graph takes edge weights, and the graph has some."""
    if shape.weighted and any(parameter.name == "edge_weight_dict" for parameter in parameters_of(model)):
        raise InputError(
            f"{type(model).__name__}.forward takes edge_weight_dict, but weft supports no edge weights by relation: "
            "give them as edge features (edge_attr), or remove them from the graph"
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module in wrappers of PyTorch that only change how it is called.

    These are torch.compile, DataParallel, DistributedDataParallel and AveragedModel.
    """
    inner = {"OptimizedModule": "_orig_mod"} | dict.fromkeys(
        ("DataParallel", "DistributedDataParallel", "AveragedModel"), "module"
    )
    while type(model).__name__ in inner and type(model).__module__.startswith("torch."):
        model = getattr(model, inner[type(model).__name__])
    return model


def is_pyg(model: nn.Module) -> bool:
    """Return whether a module is written for PyG: its forward takes edges or `data`, and no views."""
    edge_names = {"data", "edge_index_dict", *(name for names in EDGES.values() for name in names)}
    return not hasattr(model, "num_stages") and not edge_names.isdisjoint(
        parameter.name for parameter in parameters_of(model)
    )


def _copy_sharing_tensors(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied ({first_line(error).rstrip('.')}): keep tensors as parameters or "
            "buffers; for weight normalization, use torch.nn.utils.parametrizations"
        ) from error


def _graph_steps(program: TracedProgram) -> list[Any]:
    return [step for step in program.steps if isinstance(step.operation, GraphStep)]


def _replacements(model: nn.Module, program: TracedProgram, types: GraphTypes | None) -> dict[str, nn.Module]:
    """Return weft's replacements for modules of the model, by path in the model.

    Args:
        model: The model.
        program: Its program.
        types: Types of the graph, for a model on a heterogeneous graph.
    """
    replaced: dict[str, nn.Module] = {}
    for step in _graph_steps(program):
        if isinstance(step.operation, WithView):
            try:
                replaced[step.operation.path] = step.operation.make(model.get_submodule(step.operation.path))
            except InputError as error:
                raise InputError(f"{step.line}: {error}") from error
        elif isinstance(step.operation, JoinedCalls):
            for call, _, _ in step.operation.calls:
                conv = model.get_submodule(call.path)
                if is_han(conv) and types is not None:
                    replaced[call.path] = HanAttention(conv, [name.replace("|", "__") for name in types.relations])
                else:
                    replaced[call.path] = RelationConv(conv, call.width, reads_edge_attr=call.reads_edge_attr)
        elif isinstance(step.operation, CallByType):
            path, width = step.operation.path, step.operation.width
            replaced[path] = TypedConv(model.get_submodule(path), width)
        elif isinstance(step.operation, GlobalNorm | NormByType):
            norm = model.get_submodule(step.operation.path)
            assert isinstance(norm, _BatchNorm)
            replaced[step.operation.path] = BatchNorm.of(norm)
    return replaced


def _with_sums(program: TracedProgram, paths: Collection[str]) -> TracedProgram:
    """Return a program that computes the in-edge sums of some convolutions, and passes them as further rows.

    Args:
        program: The program.
        paths: Paths of the convolutions in the model.
    """
    steps, kinds = [], dict(program.kinds)
    for step in program.steps:
        if isinstance(step.operation, WithView) and step.operation.path in paths:
            sums = replace(step, name=f"{step.name}_sums", operation=SumOverInEdges(step.operation.path))
            kinds[sums.name] = "rows"
            steps += [sums, replace(step, args=(*step.args, TracedValue(sums.name)))]
        else:
            steps.append(step)
    with_sums = TracedProgram.of(steps, program.result, kinds, program.layers, program.types)
    return replace(with_sums, output_types=program.output_types)
