"""Finds a caller's mistake before ranks start or anything is written."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from weft.config.config import Config
from weft.data import DataWarning, Graph
from weft.kernels import NO_TRITON, triton_backend
from weft.nn import (
    ONE_DEVICE,
    Converted,
    GraphOperation,
    LinkModel,
    TypedInput,
    Workload,
    idle_parameters,
    check_row_independence,
)
from weft.strategies import get_strategy
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions
from weft.training.flag_checks import rows_device
from weft.training.launch.payload import pickled, sending
from weft.training.launch.torchrun import is_main_process
from weft.training.optimizer import make_optimizer, make_scheduler
from weft.training.tasks.losses import make_loss
from weft.training.tasks.scores import make_metrics
from weft.training.tasks.task import validation_score
from weft.utils.dtypes import is_low_precision
from weft.utils.errors import InputError


def check(
    config: Config, work: Workload, own: OwnFunctions = NO_FUNCTIONS, *, launched: bool, own_model: bool = False
) -> None:
    """InputError for what a run of a model on a graph cannot do; `launched`: in processes of their own.

    own_model: not one that the configuration names. DataWarning where layers ignore the graph's edge weights;
    UserWarning where float32 would make strategies drift apart.
    """
    graph = work.graph
    check_placing(config, work, launched=launched, own_model=own_model)
    if lacks_triton(config) and not own_model:
        for flag, p in (("--dropout", config.dropout), ("--input-dropout", config.input_dropout)):
            if p:
                raise InputError(f"{flag} {p}: {NO_TRITON}")
    validation = validation_score(graph, config)
    for flag, asked in (("--patience", config.patience), ("--until", config.until)):
        if asked and validation is None:
            what = "vertices" if config.task == "node" else "links"
            raise InputError(f"{flag} {asked}: {graph.name} has no validation {what}; leave it out")
    check_functions(config, work, own, validation)
    if launched:
        own.require_sendable()
    if config.goal and config.goal[0] != validation:
        raise InputError(f"--until {config.until}: the validation score is {validation}: give {validation}=...")
    if own_model:
        warn_of_idle_parameters(work)
    if work.stats.weighted and is_main_process():
        warn_of_ignored_weights(graph.name, work.outline(get_strategy(config.strategy).traits, training=True))


def check_placing(config: Config, work: Workload, *, launched: bool, own_model: bool) -> None:
    """InputError for a model on a graph that cannot be placed as a configuration says, to train or not; see `check`."""
    graph, model = work.graph, work.model
    require_device(config)
    check_input(graph, model)
    check_rows_given(graph, model)
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
        by_type = isinstance(model, Converted) and bool(model.output_types)
        check_row_independence(work, together=plan.traits == ONE_DEVICE and not by_type)
    if launched:
        if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
            raise InputError(
                "the model uses one parameter in two places, which local ranks cannot: start it by torchrun"
            )
        with sending("model"):
            pickled(copy.deepcopy(model).to("meta"))


def require_device(config: Config) -> None:
    """InputError where the device is not there, or lacks what rows of the type asked for need."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no GPU here; give --device cpu, or install a CUDA build of torch")
    if lacks_triton(config) and is_low_precision(getattr(torch, config.dtype)):
        raise InputError(f"--dtype {config.dtype}: {NO_TRITON}")


def lacks_triton(config: Config) -> bool:
    """Return whether the run is on a GPU without Triton, which has kernels for sums only."""
    return config.device == "cuda" and triton_backend() is None


def check_functions(config: Config, work: Workload, own: OwnFunctions, validation: str | None) -> None:
    """InputError for a loss, metric, optimiser or schedule that cannot be made, or asks for a score that cannot be."""
    if config.task == "node":
        make_loss(config, work.graph, own)
    elif own.loss is not None:
        raise InputError("loss has no effect under task link: leave it out")
    metric = make_metrics(config, work.graph, own)[0]
    if config.goal and config.goal[1] > metric.most:
        raise InputError(f"--until {config.until}: {metric.name} is at most {metric.most}: give a value up to that")
    optimizer = make_optimizer(config, list(work.model.parameters()), own)
    scheduler = make_scheduler(config, optimizer, own)
    if isinstance(scheduler, ReduceLROnPlateau) and validation is None:
        raise InputError(f"--scheduler {config.scheduler} goes by a validation score, and none is known: give another")


def check_input(graph: Graph, model: nn.Module) -> None:
    """InputError where the vertices have features of several widths or none, and the model is not made for these."""
    found = [module.typed for module in model.modules() if isinstance(module, TypedInput)]
    wanted = graph.typed._replace(num_relations=0)
    if wanted.has_input and not found:
        raise InputError(
            f"{graph.name} has features by vertex type, or none: make the model with typed=graph.typed, give its "
            "Stack input=weft.nn.TypedInput(graph.typed, width), or take a PyG model over x_dict"
        )
    if any(typed._replace(num_relations=0) != wanted for typed in found):
        raise InputError(
            f"the model's TypedInput was made for other vertex types than {graph.name} has: use typed=graph.typed"
        )


def check_rows_given(graph: Graph, model: nn.Module) -> None:
    """InputError where a model by vertex types has no rows for vertices that are read: labelled ones, ends of links."""
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
                f"the model gives rows of {' and '.join(model.gives)}, and {graph.name} has vertices of {name} to "
                "train or score: return a dict of the rows of both"
            )


def warn_of_idle_parameters(work: Workload) -> None:
    """UserWarning, in one line, where parameters have no effect in training but to be moved by rounding noise."""
    found = idle_parameters(work)
    if found and is_main_process():
        warnings.warn(
            f"{' and '.join(found)}: a norm or a softmax behind takes all effect from them, so their gradients are "
            "rounding noise, which Adam makes full steps of, and in float32 strategies drift apart: make these layers "
            "without the bias, or convert the model by .double()",
            stacklevel=5,
        )


def warn_of_ignored_weights(name: str, operations: Sequence[GraphOperation]) -> None:
    """DataWarning, in one line, where layers go over the edges without their weights, or none does with them."""
    deaf = dict.fromkeys(one.layer for one in operations if one.reads_edges and not one.weighted)
    if deaf or not any(one.weighted for one in operations):
        warnings.warn(
            f"{name} has edge weights, which are ignored by {' and '.join(deaf) or 'the model'}: use gcn, or drop "
            "them with dataclasses.replace(graph, in_edges=graph.in_edges.with_weight(None))",
            DataWarning,
            stacklevel=5,
        )
