"""Checks that find a caller's mistake before ranks start and before anything is written."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from weft.config.config import Config, LearningOptions, PlacementOptions, TrainingOptions
from weft.data import DataWarning, Graph
from weft.kernels import NO_TRITON, triton_backend
from weft.nn import (
    ONE_DEVICE,
    Aggregate,
    Converted,
    GraphOperation,
    LinkModel,
    TypedInput,
    Workload,
    check_row_independence,
    idle_parameters,
)
from weft.strategies import get_strategy
from weft.training.artifacts.checkpoint import Checkpoint, tensors_under
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions
from weft.training.flag_checks import rows_device
from weft.training.launch.payload import pickled, sending
from weft.training.launch.torchrun import is_main_process
from weft.training.optimizer import check_scheduler, check_updates, make_optimizer
from weft.training.tasks.link_losses import make_link_loss
from weft.training.tasks.losses import make_loss
from weft.training.tasks.scores import compares_ranks, make_metrics
from weft.training.tasks.task import validation_score
from weft.utils.dtypes import is_low_precision
from weft.utils.errors import InputError, cause
from weft.utils.optional_packages import check_extra


def check(
    config: Config, work: Workload, functions: OwnFunctions = NO_FUNCTIONS, *, launched: bool, own_model: bool = False
) -> None:
    """Check that a run can train a model on a graph as configured.

    Warn if layers ignore the graph's edge weights (DataWarning), or if parameters without effect would make float32
    runs differ between strategies (UserWarning).

    Args:
        config: The run's configuration.
        work: The model and graph.
        functions: User-defined functions of the run.
        launched: True if this process starts local ranks, to which model and functions are sent.
        own_model: True if the model is a custom module, not a built-in that the configuration names.

    Raises:
        InputError: The run is impossible.
    """
    graph = work.graph
    check_placing(config, work, launched=launched, own_model=own_model)
    if lacks_triton(config) and not own_model:
        for flag, probability in (("--dropout", config.dropout), ("--input-dropout", config.input_dropout)):
            if probability:
                raise InputError(f"{flag} {probability}: {NO_TRITON}")
    validation = validation_score(graph, config)
    for flag, value in (("--patience", config.patience), ("--until", config.until)):
        if value and validation is None:
            what = {"node": "vertices", "link": "links", "edge": "labelled edges"}[config.task]
            raise InputError(f"{flag} {value}: {graph.name} has no validation {what}; leave it out")
    check_functions(config, work, functions, validation)
    if config.tensorboard:
        check_extra("tensorboard", "--tensorboard")
    if launched:
        functions.require_sendable()
    if config.goal and config.goal[0] != validation:
        raise InputError(f"--until {config.until}: the validation score is {validation}: give {validation}=...")
    if own_model:
        warn_of_idle_parameters(work)
    if is_main_process():
        operations = work.outline(get_strategy(config.strategy).traits, training=True)
        if isinstance(work.model, Converted):
            warn_of_repeated_loops(graph, operations)
        if work.stats.weighted:
            warn_of_ignored_weights(graph.name, operations)


def check_placing(config: Config, work: Workload, *, launched: bool, own_model: bool) -> None:
    """Check that a model and graph can be placed under the configured strategy, for training or prediction.

    Args:
        config: The run's configuration.
        work: The model and graph.
        launched: True if this process starts local ranks, to which the model is sent.
        own_model: True if the model is a custom module, not a built-in that the configuration names.

    Raises:
        InputError: The model or graph does not suit the strategy, the ranks or the device.
    """
    graph, model = work.graph, work.model
    require_device(config)
    if lacks_triton(config) and is_low_precision(getattr(torch, config.dtype)):
        raise InputError(f"--dtype {config.dtype}: {NO_TRITON}")
    if own_model:
        check_restorable(model)
    check_input(graph, model)
    check_returned_types(graph, model)
    plan = get_strategy(config.strategy)
    plan.check_size(config.workers)
    plan.check_rows(work)
    operations = work.outline(plan.traits, training=True)
    if lacks_triton(config):
        for operation in operations:
            if operation.is_aggregate and not operation.linear:
                raise InputError(f"{operation.layer}: {NO_TRITON}")
    rows_device(config)
    if own_model:
        # Under --order, a row of all vertices has another position than in the model that the user wrote.
        all_rows = plan.traits == ONE_DEVICE and config.order == "none"
        check_row_independence(work, all_rows=all_rows, alternative="--strategy single")
    if launched:
        if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
            raise InputError(
                "the model shares a parameter between modules, which local ranks do not support: start the script with "
                "torchrun"
            )
        with sending("model"):
            pickled(copy.deepcopy(model).to("meta"))


def require_device(options: PlacementOptions) -> None:
    """Check that the configured device exists.

    Raises:
        InputError: There is no GPU.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no GPU here; give --device cpu, or install a CUDA build of torch")


def lacks_triton(options: PlacementOptions) -> bool:
    """Return True if the run is on a GPU without Triton. Such a run has kernels for sums only."""
    return options.device == "cuda" and triton_backend() is None


def check_functions(config: LearningOptions, work: Workload, functions: OwnFunctions, validation: str | None) -> None:
    """Check that loss, metrics, optimizer and scheduler can be created and fit the graph and each other.

    Args:
        config: The run's configuration.
        work: The model and graph.
        functions: User-defined functions of the run.
        validation: Name of the validation score, or None without validation data.

    Raises:
        InputError: One of them cannot be created, --until can never be reached, or the scheduler does not suit the
            number of epochs or the validation score.
    """
    labels = work.graph.labels(config.task)
    if config.task != "link":
        make_loss(config, labels, functions)
    elif functions.loss is not None:
        raise InputError("a custom loss has no effect under task link: leave it out, or give --loss bpr")
    else:
        make_link_loss(config)
        if config.eval_negatives and not compares_ranks(config.metrics):
            raise InputError(f"--eval-negatives {config.eval_negatives} needs --metrics mrr or hits@K: leave it out")
    metric = make_metrics(config, labels, functions)[0]
    if config.goal and config.goal[1] > metric.upper_bound:
        raise InputError(
            f"--until {config.until}: {metric.name} is at most {metric.upper_bound}: give a value up to that"
        )
    optimizer = make_optimizer(config, list(work.model.parameters()), functions)
    check_scheduler(
        config, optimizer, functions, lower_is_better=metric.lower_is_better, has_validation=validation is not None
    )


def check_restorable(model: nn.Module) -> None:
    """Check that a model can be copied for the ranks, and that the copy can load the weights.

    Raises:
        InputError: It cannot, for instance because of a parametrized layer.
    """
    try:
        copy.deepcopy(model).load_state_dict(model.state_dict())
    except Exception as error:
        raise InputError(
            f"a copy of the model cannot load its state_dict ({cause(error, 300)}), so the best weights could not be "
            "restored. For parametrized layers, use torch.nn.utils.parametrizations on a torch.nn.Linear; PyG's Linear "
            "does not support it"
        ) from error


def check_checkpoint(saved: Checkpoint, config: TrainingOptions, model: nn.Module, functions: OwnFunctions) -> None:
    """Check that a run can continue from a checkpoint, before anything is removed that was written after it.

    Args:
        saved: The checkpoint, whose tensors may have any names, shapes and dtypes.
        config: The run's configuration.
        model: The model, with all rows of embeddings.
        functions: User-defined functions of the run.

    Raises:
        InputError: The checkpoint belongs to another model, optimizer or scheduler, or is damaged.
    """
    weights = {name: (list(value.shape), value.dtype) for name, value in model.state_dict().items()}
    expected = {f"{part}.{name}": weight for name, weight in weights.items() for part in ("model", "best")}
    actual = {name: (list(value.shape), value.dtype) for name, value in saved.tensors.items()}
    for name in sorted(expected.keys() | {name for name in actual if not name.startswith("optimizer.")}):
        if expected.get(name) != actual.get(name):
            saved_weight, weight = (
                f"{named[name][1]} {named[name][0]}" if name in named else "missing" for named in (actual, expected)
            )
            raise InputError(
                f"--resume: the checkpoint belongs to another model ({name} is {saved_weight} in the checkpoint, and "
                f"{weight} in the model): give the model of the run, or a new --out"
            )
    check_updates(
        config, list(model.parameters()), functions, tensors_under("optimizer.", saved.tensors), saved.updates
    )


def check_input(graph: Graph, model: nn.Module) -> None:
    """Check that a model has an input layer for each vertex type if their features differ or are missing.

    Args:
        graph: The graph.
        model: The model that reads its features.

    Raises:
        InputError: The model has no such input layer, or one for other vertex types.
    """
    typed_inputs = [module.typed for module in model.modules() if isinstance(module, TypedInput)]
    expected = graph.typed._replace(num_relations=0)
    if expected.has_input and not typed_inputs:
        raise InputError(
            f"{graph.name} has no features, or other features for each vertex type: make the model with "
            "typed=graph.typed, give its "
            "Stack input=weft.nn.TypedInput(graph.typed, width), or use a PyG model that takes x_dict"
        )
    if any(typed._replace(num_relations=0) != expected for typed in typed_inputs):
        raise InputError(
            f"the model's TypedInput was made for other vertex types than {graph.name} has: use typed=graph.typed"
        )


def check_returned_types(graph: Graph, model: nn.Module) -> None:
    """Check that a converted heterogeneous model returns rows for each vertex type that is trained or scored.

    Args:
        graph: The graph.
        model: The model. Models that do not return a dict of vertex types pass.

    Raises:
        InputError: Labelled vertices, or endpoints of links, have a type for which the model returns no rows.
    """
    if isinstance(model, LinkModel):
        model, masks = model.encoder, [torch.ones(graph.num_vertices, dtype=torch.bool)]
    else:
        masks = [mask for mask in (graph.train_mask, graph.val_mask, graph.test_mask) if mask is not None]
    if not isinstance(model, Converted) or not model.output_types:
        return
    for name in graph.vertex_types:
        span = graph.type_range(name)
        if name not in model.output_types and any(bool(mask[span.start : span.stop].any()) for mask in masks):
            raise InputError(
                f"the model returns rows of {' and '.join(model.output_types)}, but {graph.name} has vertices of type "
                f"{name} to train or score: return a dict with the rows of all these types"
            )


def warn_of_idle_parameters(work: Workload) -> None:
    """Warn, in one line, of parameters whose only gradient is rounding noise."""
    names = idle_parameters(work)
    if names and is_main_process():
        warnings.warn(
            f"{' and '.join(names)}: no effect, because a normalization or a softmax follows. The gradient is only "
            "rounding noise, so float32 runs may differ slightly between strategies. Set bias=False in these layers, "
            "convert the model with .double(), or ignore this",
            stacklevel=5,
        )


def warn_of_repeated_loops(graph: Graph, operations: Sequence[GraphOperation]) -> None:
    """Warn, in one line, if a converted model would count repeated self-loops, which PyG's layers count once.

    Args:
        graph: The graph.
        operations: Operations that the model requests from its views.
    """
    layers = dict.fromkeys(op.layer for op in operations if isinstance(op.op, Aggregate) and op.op.loops)
    number = graph.in_edges.num_repeated_loops if layers else 0
    if number:
        warnings.warn(
            f"{graph.name} has {number:,} repeated self-loops: PyG's {' and '.join(layers)} counts one for each "
            "vertex, weft counts all. Remove the repeated ones",
            DataWarning,
            stacklevel=5,
        )


def warn_of_ignored_weights(name: str, operations: Sequence[GraphOperation]) -> None:
    """Warn, in one line, of layers that ignore edge weights.

    Args:
        name: Name of the graph.
        operations: Operations that the model requests from its views.
    """
    ignoring = dict.fromkeys(
        operation.layer for operation in operations if operation.reads_edges and not operation.weighted
    )
    if ignoring or not any(operation.weighted for operation in operations):
        warnings.warn(
            f"{name} has edge weights, which are ignored by {' and '.join(ignoring) or 'the model'}: use gcn, or drop "
            "them with dataclasses.replace(graph, in_edges=graph.in_edges.with_weight(None))",
            DataWarning,
            stacklevel=5,
        )
