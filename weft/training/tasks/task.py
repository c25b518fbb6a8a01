"""Tasks (`--task`): prepares the graph for a task, creates the model to train, and the task itself."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.config.config import LearningOptions, ModelOptions, TaskOptions, TrainingOptions, is_imported
from weft.data import (
    EdgeLabels,
    Graph,
    GraphShape,
    forward_relations,
    require_edge_labels,
    require_links,
    require_trainable,
    with_held_out_links,
    with_inverse_relations,
)
from weft.nn import (
    EMBEDDING_MODELS,
    MODEL_NAMES,
    Decoder,
    EdgeDecoder,
    LinkModel,
    Unconverted,
    convert,
    from_options,
    make_decoder,
    parameter_dtype,
)
from weft.nn.convert import is_pyg, parameters_of, takes_types, unwrapped
from weft.strategies import Placed
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions
from weft.training.launch.torchrun import is_main_process
from weft.training.tasks.edge_prediction import EdgeTask
from weft.training.tasks.link_prediction import LinkTask
from weft.training.tasks.losses import make_loss, num_logits, output_kind
from weft.training.tasks.metrics import NodeTask, Task
from weft.training.tasks.report_metrics import report_metrics
from weft.training.tasks.scores import make_metrics, metric_names
from weft.utils.entry_points import find_entry_point, load_entry_point
from weft.utils.errors import InputError, refusing_exit
from weft.utils.random import key


def graph_for_task(graph: Graph, config: LearningOptions) -> Graph:
    """Return the graph as the task needs it. For links, edges for validation and test are held out.

    Args:
        graph: The graph.
        config: The run's configuration.

    Raises:
        InputError: The graph lacks something that the task needs.
    """
    if config.task == "link":
        if graph.val_links is None and graph.test_links is None:
            graph = with_held_out_links(graph, config.seed)
        require_links(graph)
        if config.inverse_relations and forward_relations(graph) == graph.relations:
            # Only now, since an inverse of a held-out edge would give the edge away.
            graph = with_inverse_relations(graph)
    if config.task == "edge":
        require_edge_labels(graph)
    if config.model in EMBEDDING_MODELS and not graph.in_edges.degree[graph.in_edges.indices.long()].any():
        raise InputError(
            f"--model {config.model}: no vertex of {graph.name} with an out-edge has an in-edge, so nothing would be "
            "propagated: add --inverse-relations"
        )
    require_trainable(graph, features=not graph.vertex_types, labels=config.task == "node")
    return graph


def requested_model(model: nn.Module | None, config: ModelOptions) -> nn.Module | str | None:
    """Return the module that the user passed, or the name of a custom model if the user named one, else None.

    Args:
        model: The module, if the user passed one.
        config: The run's configuration, with values that the user gave.
    """
    return config.model if model is None and is_custom(config.model) else model


def is_custom(name: str) -> bool:
    """Return True if a model's name is `package.module:Class`, or one that an installed package declares."""
    return is_imported(name) or find_entry_point("model", name, MODEL_NAMES) is not None


def task_model(
    model: nn.Module | str | None, shape: GraphShape, config: LearningOptions, *, strategy: str
) -> nn.Module:
    """Return the model to train: the user's module, converted if it is of PyG, or a built-in model.

    For tasks on edges, a decoder is added.

    Args:
        model: The module; or a model name that the user gave, which is imported if it has the form
            `package.module:Class` or an installed package declares it; or None for the built-in model that the
            configuration names. A class named only in the configuration is never imported, since the configuration may
            come from a file.
        shape: Shape of the graph.
        config: The run's configuration.
        strategy: Strategy of the run; `single` runs a model as it is that cannot be converted.
    """
    num_outputs = 0 if config.task == "link" else num_logits(config, shape) or shape.num_classes
    width = num_outputs if config.task == "node" else config.hidden
    if isinstance(model, str) and is_custom(model):
        model = imported_model(model, shape, width, config)
    elif not isinstance(model, nn.Module):
        config = config if model is None else replace(config, model=model)
        model = from_options(
            config,
            shape.num_features,
            width,
            seed=config.seed,
            dtype=getattr(torch, config.dtype),
            edge_width=shape.num_edge_features,
            typed=shape.typed,
        )
    model = unwrapped(model)
    if is_called_with_any(model):
        raise InputError(
            f"{type(model).__name__}.forward(*{parameters_of(model)[0].name}) does not name what it takes: name its "
            "arguments, such as x and edge_index"
        )
    if is_pyg(model):
        model = converted_model(model, shape, width, config, strategy)
    if config.task == "node" or isinstance(model, LinkModel):
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(config.seed, DECODER) >> 1)
        decoder: nn.Module
        if config.task == "edge":
            decoder = EdgeDecoder(config.hidden, shape.num_label_features, num_outputs)
        else:
            decoder = make_decoder(config.decoder, max(shape.num_forward_relations, 1), config.hidden)
    return LinkModel(model, decoder.to(parameter_dtype(model)))


def is_called_with_any(model: nn.Module) -> bool:
    """Return whether a module without views takes any arguments, as in `forward(self, *args)`."""
    kinds = [parameter.kind for parameter in parameters_of(model)]
    return not hasattr(model, "num_stages") and bool(kinds) and kinds[0] is inspect.Parameter.VAR_POSITIONAL


def converted_model(
    model: nn.Module, shape: GraphShape, width: int, config: LearningOptions, strategy: str
) -> nn.Module:
    """Convert a PyG model; `single` runs one that cannot be converted as it is, with a warning.

    Args:
        model: The model.
        shape: Shape of the graph.
        width: Number of columns of its result.
        config: The run's configuration.
        strategy: Strategy of the run.

    Raises:
        InputError: The model cannot be converted, and the strategy is another, or the graph is heterogeneous.
    """
    inputs, alternative = edge_inputs(shape), "use --strategy single, which runs the model as it is"
    try:
        return convert(model, edge_inputs=inputs, shape=shape, unchecked=config.unchecked, alternative=alternative)
    except InputError as error:
        if strategy != "single" or takes_types(model):
            raise
        if config.order != "none":  # it may read the ids of vertices, which are the positions of rows
            raise InputError(f"{error}. Without --order, --strategy single can run it as it is") from error
        if is_main_process():
            warnings.warn(
                f"{type(model).__name__} runs as it is, without conversion. Other strategies need a change: {error}",
                stacklevel=2,
            )
        return Unconverted(model, frozenset(inputs), width)


@refusing_exit()
def imported_model(name: str, shape: GraphShape, out_width: int, config: TrainingOptions) -> nn.Module:
    """Import a class or function, and create a module with it from the seed, in the configured dtype.

    Importing runs code. So `name` must come from the user, never from a file.

    Args:
        name: `package.module:Class`, in Python's path or the current folder, or a name that an installed package
            declares. It is called with the number of features and `out_width`.
        shape: Shape of the graph.
        out_width: Width of the output rows.
        config: The run's configuration.

    Raises:
        InputError: The name cannot be imported, or not called with these arguments, or returns no module.
    """
    factory: Any = None if is_imported(name) else load_entry_point("model", name)
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # the path of a command does not contain the current folder
    try:
        factory = factory or getattr(importlib.import_module(module_name), attribute)
        inspect.signature(factory).bind(shape.num_features, out_width)
    except (ImportError, ValueError) as error:
        raise InputError(f"--model {name}: cannot import module {module_name!r} ({error})") from error
    except AttributeError as error:
        raise InputError(f"--model {name}: {module_name} has no {attribute!r}: give package.module:Class") from error
    except TypeError as error:
        raise InputError(
            f"--model {name} cannot be called as {attribute or name}({shape.num_features}, {out_width}), with the "
            f"number of features and of outputs ({error}): give a class or function with these two parameters"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = factory(shape.num_features, out_width)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"--model {name} returns a {type(model).__name__}: give a class or function that returns a torch.nn.Module"
        )
    return model.to(getattr(torch, config.dtype))


def edge_inputs(shape: GraphShape) -> list[str]:
    """Return the inputs that a graph has for its edges, by the names of PyG."""
    present = {
        "edge_weight": shape.weighted,
        "edge_attr": shape.num_edge_features,
        "edge_type": shape.typed.num_relations,
    }
    return [name for name, value in present.items() if value]


def validation_score(graph: Graph, config: TaskOptions) -> str | None:
    """Return the name of the score that chooses the best weights, or None without validation data.

    Args:
        graph: The graph.
        config: The run's configuration.
    """
    labels = graph.labels(config.task)
    validation = graph.val_links if config.task == "link" else labels.labelled("val")
    has_validation = (
        validation is not None and len(validation) > 0 and (config.task == "link" or bool(validation.any()))
    )
    return f"val_{metric_names(config, labels)[0]}" if has_validation else None


DECODER = 1
"""Key, next to the seed, of the decoder's initial parameters."""


def make_task(config: LearningOptions, strategy: Placed, functions: OwnFunctions = NO_FUNCTIONS) -> Task:
    """Return the task of a run on this rank.

    Args:
        config: The run's configuration.
        strategy: The model and graph, placed on this rank by a strategy.
        functions: User-defined functions of the run.
    """
    graph, group, model = strategy.graph, strategy.group, strategy.model
    if config.task == "link":
        assert isinstance(model, LinkModel)
        assert isinstance(model.decoder, Decoder)
        return LinkTask(config, config.seed, strategy.links, model.decoder, strategy.rows, group, strategy.empty_rows)
    labels = graph.labels(config.task)
    loss, metrics = make_loss(config, labels, functions), make_metrics(config, labels, functions)
    metrics += report_metrics(output_kind(config, labels), labels.num_classes, loss, metrics)
    if not isinstance(labels, EdgeLabels):
        return NodeTask(labels, strategy.rows, group, strategy.empty_rows, strategy.rows_device, loss, metrics)
    assert isinstance(model, LinkModel)
    return EdgeTask(labels, graph.num_vertices, model.decoder, strategy.rows, group, loss, metrics, strategy.empty_rows)
