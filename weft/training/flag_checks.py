"""Which strategy, task or model reads each flag: makes the options of a strategy, and refuses flags without effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.config import OPTIONS, Config, RankOptions
from weft.data import Graph
from weft.nn import FAMILY_OPTIONS, MODEL_NAMES, MODELS, RELATIONAL, LinkModel, parameter_dtype, row_dtype
from weft.nn.convert import is_pyg, unwrapped
from weft.partition import METHODS, PartitionBook, array_book, find_method, make_book
from weft.strategies import STRATEGIES, Options, Plan, VertexOptions, find_strategy, get_strategy
from weft.training.custom_functions import OwnFunctions
from weft.training.optimizer import OPTIMIZER_FLAGS, OPTIMIZERS, SCHEDULER_FLAGS, SCHEDULERS
from weft.utils.dtypes import dtype_name, is_low_precision
from weft.utils.errors import InputError, unknown

TRAINING_FIELDS = ("patience", "until", "timeline", "tensorboard")
"""Fields of a configuration that affect only training, whatever its strategy."""
CHOICE_FLAGS = {
    "decoder": ("task", ("link",)),
    "negatives": ("task", ("link",)),
    "eval_negatives": ("task", ("link",)),
    "class_weights": ("task", ("node", "edge")),
    "heads": ("model", ("gat", "gatv2")),
    **dict.fromkeys(("decoupled", "dropout", "input_dropout", "norm", "residual"), ("model", (*MODELS, *RELATIONAL))),
    "unchecked": ("model", ("package.module:Class",)),
    "momentum": ("optimizer", ("sgd", "rmsprop")),
    "scheduler_epochs": ("scheduler", ("step", "cosine", "plateau")),
    "lr_factor": ("scheduler", ("step", "plateau")),
    "warmup_epochs": ("scheduler", ("none", "step", "cosine")),
}
"""Flags that only some values of another field read: flag -> (the other field, its values). Models refuse flags that
they do not read themselves."""
CHOICES: dict[str, Collection[str]] = {
    "task": ("node", "link", "edge"),
    "model": MODEL_NAMES,
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
}
"""Built-in values of the fields in CHOICE_FLAGS. `fields_unused_by_module` and `fields_unused_by_functions` refuse
flags that a custom model or function does not read."""


@cache  # every run asks for each flag of each strategy
def strategy_flags(plan: type[Plan]) -> frozenset[str]:
    """Return the fields of Config that a strategy reads and that not all strategies read."""
    # All strategies read these, although some list them as options.
    common = {"device", "seed", "task", "negatives", "loss"}
    return frozenset({*configured_options(plan), *plan.flags} - common)


def configured_options(plan: type[Plan]) -> list[str]:
    """Return the names of the options of a strategy that are fields of Config.

    Other options, of a user-defined strategy, keep their defaults.
    """
    return [spec.name for spec in dataclasses.fields(plan.options_type) if spec.name in OPTIONS]


def draws_batches(plan: type[Plan]) -> bool:
    """Return True if a strategy trains on mini-batches."""
    return "batch_size" in strategy_flags(plan)


def requests_batches(config: Config) -> bool:
    """Return True if a flag that only mini-batch strategies read differs from its default."""
    owners = filter(None, map(strategies_with, config.non_defaults()))
    return any(all(draws_batches(STRATEGIES[name]) for name in strategies) for strategies in owners)


def strategies_with(flag: str) -> list[str]:
    """Return the strategies that read a field of Config. Empty: all strategies do."""
    return [name for name, plan in STRATEGIES.items() if flag in strategy_flags(plan)]


def strategies_with_optimisation(optimisation: str) -> list[str]:
    """Return the strategies that have an optimisation. Empty: all strategies do."""
    return [name for name, plan in STRATEGIES.items() if optimisation in plan.optimisations]


def foreign_flags(config: Config, strategy: str) -> dict[str, str]:
    """Return the flags that are set but have no effect under a strategy and the configured task, model and optimizer.

    Args:
        config: The configuration. Fields that equal their defaults count as not set.
        strategy: Name of the strategy.

    Returns:
        For each such flag, the flag and values that would give it an effect, such as "--strategy split or sampled".
    """
    foreign: dict[str, str] = {}
    find_strategy(strategy)  # registers one of an installed package, which then counts as an owner of its flags
    for name in config.non_defaults():
        flag, owners = "--" + name.replace("_", "-"), strategies_with(name)
        if owners and strategy not in owners:
            foreign[flag] = f"--strategy {' or '.join(owners)}"
        field, values = CHOICE_FLAGS.get(name, ("", ()))
        if field and getattr(config, field) in CHOICES[field] and getattr(config, field) not in values:
            foreign[flag] = f"--{field} {' or '.join(values)}"
    for name in filter(None, config.disable.split(",")):
        owners = strategies_with_optimisation(name)
        if owners and strategy not in owners:
            foreign[f"--disable {name}"] = f"--strategy {' or '.join(owners)}"
        elif name == "capture" and config.device == "cpu":
            foreign[f"--disable {name}"] = "--device cuda"
    return foreign


def refuse_foreign_flags(config: Config, strategies: tuple[str, ...] = ()) -> None:
    """Check that each flag that is set has an effect under at least one strategy.

    Args:
        config: The configuration.
        strategies: Names of the strategies that will run. Default: the strategy of the configuration.

    Raises:
        InputError: A flag has no effect.
    """
    names = strategies or (config.strategy,)
    for flag, owners in foreign_flags(config, names[0]).items():
        if all(flag in foreign_flags(config, name) for name in names):
            field = owners.split()[0].removeprefix("--")
            chosen = " and ".join(names) if field == "strategy" else getattr(config, field)
            raise InputError(f"{flag} has no effect under {field} {chosen}: leave it out, or give {owners}")


def fields_unused_by_module(config: Config, model: nn.Module | None) -> tuple[str, ...]:
    """Return the fields of a configuration that a custom module does not read.

    Args:
        config: The configuration.
        model: The module; None if it will be created later, with the dtype of the configuration.

    Raises:
        InputError: One of these fields is set, or dtype differs from the dtype of the model.
    """
    idle = [name for name in FAMILY_OPTIONS if name != "hidden" or config.task == "node"]
    if isinstance(model, LinkModel):
        idle += ["hidden", "decoder"]
    for name in config.non_defaults():
        if name in idle:
            raise InputError(
                f"{name} has no effect on a custom model: leave it out, and set it where you create {config.model}"
            )
    if config.unchecked and model is not None and not is_pyg(unwrapped(model)):
        raise InputError("unchecked has no effect on a model that is not written for PyG: leave it out")
    dtype = getattr(torch, config.dtype)
    low_precision = model is not None and row_dtype(model) != parameter_dtype(model)
    if is_low_precision(dtype) and not low_precision:
        raise InputError(f"dtype {config.dtype} is for built-in models, such as gcn: convert your model to float32")
    if model is not None and dtype != (model_dtype := row_dtype(model)):
        tensors, remedy = (
            ("rows", "set its row_dtype to None") if low_precision else ("parameters", "convert the model")
        )
        raise InputError(
            f"dtype {config.dtype}: the model's {tensors} are {dtype_name(model_dtype)}: leave it out, or {remedy}"
        )
    return tuple(idle)


def fields_unused_by_functions(config: Config, functions: OwnFunctions) -> tuple[str, ...]:
    """Return the fields of a configuration that a user-defined optimizer and scheduler do not read.

    Args:
        config: The configuration.
        functions: User-defined functions of the run.

    Raises:
        InputError: One of these fields is set.
    """
    idle: list[str] = []
    for option, fields in (("optimizer", OPTIMIZER_FLAGS), ("scheduler", SCHEDULER_FLAGS)):
        if getattr(functions, option) is not None:
            idle += fields
            for name in config.non_defaults():
                if name in fields:
                    raise InputError(
                        f"{name} has no effect on a custom {option}: leave it out, and set it in your function"
                    )
    return tuple(idle)


def without_foreign_flags(config: Config, strategy: str) -> Config:
    """Return a configuration with another strategy, and with defaults for the flags that it does not read.

    Args:
        config: The configuration.
        strategy: Name of the strategy.
    """
    flags = strategy_flags(get_strategy(strategy))
    defaults: dict[str, Any] = {
        name: spec.default for name, spec in OPTIONS.items() if strategies_with(name) and name not in flags
    }
    optimisations = [
        name
        for name in config.disable.split(",")
        if name and strategy in (strategies_with_optimisation(name) or [strategy])
    ]
    return replace(config, strategy=strategy, disable=",".join(optimisations), **defaults)


def open_book(name: str, workers: int, graph: Graph) -> PartitionBook:
    """Return the partition of a graph, computed by a method or read from a file.

    Args:
        name: Name of a partition method, or path of a partition file (book) or of an array (.npy).
        workers: Number of parts, one for each rank.
        graph: The graph to partition.

    Raises:
        InputError: The method is unknown, the file is for another graph or number of parts, or there are more workers
            than vertices.
    """
    if find_method(name):
        if workers > graph.num_vertices:
            raise InputError(
                f"--workers {workers}: {graph.name} has {graph.num_vertices} vertices: give at most that many"
            )
        return make_book(graph, workers, method=name)
    if not Path(name).exists() and not Path(name).suffix:
        raise unknown("--partition", name, METHODS)
    if Path(name).suffix == ".npy":
        return array_book(Path(name), workers, graph)
    book = PartitionBook.open(name, graph)
    if book.num_parts != workers:
        raise InputError(
            f"--partition {name}: the file has {book.num_parts} parts: start the same number of --workers or ranks"
        )
    return book


def make_options(
    config: Config, graph: Graph | None = None, find_book: Callable[[str, int, Graph], PartitionBook] = open_book
) -> Options:
    """Return the options of the configured strategy.

    Args:
        config: The configuration.
        graph: The graph, whose partition is computed or read. None: the options contain no partition.
        find_book: `open_book`, or a function that remembers its results.

    Raises:
        InputError: The partition method is unknown, or the partition file is for another graph or number of parts.
    """
    plan = get_strategy(config.strategy)
    values = {name: getattr(config, name) for name in configured_options(plan)}
    if "partition" in values:
        method = config.partition or plan.partition
        book = find_book(method, config.workers, graph) if method and graph is not None else None
        values["partition"] = book.part if book else None
    return plan.options_type(**values)


def predicting_config(trained: Config, options: Mapping[str, Any]) -> Config:
    """Return the configuration of a prediction.

    Args:
        trained: Configuration of the run.
        options: Fields that differ from the run's.

    Raises:
        InputError: An option has no effect under the strategy.
    """
    requested = get_strategy(options.get("strategy", trained.strategy))
    strategy = requested.evaluates_as or requested.name
    defaults: dict[str, Any] = {name: OPTIONS[name].default for name in TRAINING_FIELDS}
    config = replace(without_foreign_flags(replace(trained, **defaults), strategy), **{**options, "strategy": strategy})
    refuse_foreign_flags(config)
    return config


def partition_of(options: Options) -> Tensor | None:
    """Return the rank of every vertex, int32 [N], if the options contain a partition."""
    return options.partition if isinstance(options, VertexOptions) else None


def with_partition(options: Options, part: Tensor | None) -> Options:
    """Return options with another partition.

    Args:
        options: Options of any strategy. Strategies without a partition get the same options back.
        part: Rank of every vertex, int32 [N], or None for no partition.
    """
    return replace(options, partition=part) if isinstance(options, VertexOptions) else options


def rows_device(config: RankOptions) -> str:
    """Return the device where a rank stores rows, runs dense layers, and sends and receives rows.

    Args:
        config: The configuration.

    Raises:
        InputError: --nn-device contradicts --device-memory.
    """
    if "nn_device" not in strategy_flags(get_strategy(config.strategy)):
        return config.device
    if config.nn_device == "device" and config.device_memory:
        raise InputError(
            "--nn-device device: with --device-memory, dense layers run on the host: leave out one of them"
        )
    if config.nn_device == "host" and config.device != "cpu" and not config.device_memory:
        raise InputError("--nn-device host needs --device-memory: give both, or leave it out")
    return "cpu" if config.nn_device == "host" or config.device_memory else config.device
