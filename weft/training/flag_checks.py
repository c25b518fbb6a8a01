"""Flags, and who reads them: what a configuration says to its strategy, and one refusal of what that does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.config import Config
from weft.data import Graph
from weft.nn import FAMILY_OPTIONS, MODELS, RELATIONAL, LinkModel, parameter_dtype, row_dtype
from weft.partition import METHODS, PartitionBook, make_book
from weft.strategies import STRATEGIES, Options, Plan, VertexOptions, get_strategy
from weft.training.custom_functions import OwnFunctions
from weft.training.optimizer import OPTIMIZER_FLAGS, OPTIMIZERS, SCHEDULER_FLAGS, SCHEDULERS
from weft.utils.dtypes import dtype_name, is_narrow
from weft.utils.errors import InputError, unknown
from weft.utils.units import parse_bytes

CHOICE_FLAGS = {
    "decoder": ("task", ("link",)),
    "negatives": ("task", ("link",)),
    "loss": ("task", ("node",)),
    "class_weights": ("task", ("node",)),
    "heads": ("model", ("gat", "gatv2")),
    "momentum": ("optimizer", ("sgd", "rmsprop")),
    "scheduler_epochs": ("scheduler", ("step", "cosine", "plateau")),
    "lr_factor": ("scheduler", ("step", "plateau")),
    "warmup_epochs": ("scheduler", ("none", "step", "cosine")),
}
"""Flags that belong to some choices of another field, by their names; models refuse the rest themselves."""
CHOICES: dict[str, Collection[str]] = {
    "task": ("node", "link"),
    "model": (*MODELS, *RELATIONAL),
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
}
"""The names of these fields that are weft's; flags that what is a person's own does not read are refused elsewhere."""


@cache  # every run asks for each flag of each strategy
def own_flags(plan: type[Plan]) -> frozenset[str]:
    """Return the fields of Config that a strategy has and that not all have."""
    every = {"device", "seed", "task", "negatives"}  # also where they are options
    return frozenset({*configured_options(plan), *plan.flags} - every)


def configured_options(plan: type[Plan]) -> list[str]:
    """The options of a strategy that are fields of Config; others, of a strategy of one's own, keep their defaults."""
    known = {spec.name for spec in dataclasses.fields(Config)}
    return [spec.name for spec in dataclasses.fields(plan.options_type) if spec.name in known]


def draws_batches(plan: type[Plan]) -> bool:
    """Whether a strategy trains on mini-batches."""
    return "batch_size" in own_flags(plan)


def asks_for_batches(config: Config) -> bool:
    """Whether a flag is given that strategies of mini-batches alone have."""
    given = [spec.name for spec in dataclasses.fields(config) if getattr(config, spec.name) != spec.default]
    owners = filter(None, map(strategies_with, given))
    return any(all(draws_batches(STRATEGIES[name]) for name in some) for some in owners)


def strategies_with(flag: str) -> list[str]:
    """The strategies that have a flag of this field of Config; none where every one has."""
    return [name for name, plan in STRATEGIES.items() if flag in own_flags(plan)]


def strategies_with_optimisation(optimisation: str) -> list[str]:
    """The strategies that have an optimisation which not all have; none where every one has."""
    return [name for name, plan in STRATEGIES.items() if optimisation in plan.optimisations]


def foreign_flags(config: Config, strategy: str) -> dict[str, str]:
    """The flags that are given and that a strategy, or the task, does not have, each with who has it."""
    found: dict[str, str] = {}
    for spec in dataclasses.fields(config):
        flag, owners = "--" + spec.name.replace("_", "-"), strategies_with(spec.name)
        if getattr(config, spec.name) == spec.default:
            continue
        if owners and strategy not in owners:
            found[flag] = f"--strategy {' or '.join(owners)}"
        kind, having = CHOICE_FLAGS.get(spec.name, ("", ()))
        if kind and getattr(config, kind) in CHOICES[kind] and getattr(config, kind) not in having:
            found[flag] = f"--{kind} {' or '.join(having)}"
    for name in filter(None, config.disable.split(",")):
        owners = strategies_with_optimisation(name)
        if owners and strategy not in owners:
            found[f"--disable {name}"] = f"--strategy {' or '.join(owners)}"
        elif name == "capture" and config.device == "cpu":
            found[f"--disable {name}"] = "--device cuda"
    return found


def refuse_foreign_flags(config: Config, strategies: tuple[str, ...] = ()) -> None:
    """InputError, in one line, for a flag that would have no effect under any of some strategies, or the one chosen."""
    names = strategies or (config.strategy,)
    for flag, owners in foreign_flags(config, names[0]).items():
        if all(flag in foreign_flags(config, name) for name in names):
            kind = owners.split()[0].removeprefix("--")
            chosen = " and ".join(names) if kind == "strategy" else getattr(config, kind)
            raise InputError(f"{flag} has no effect under {kind} {chosen}: leave it out, or give {owners}")


def options_of_families(config: Config, model: nn.Module | None) -> tuple[str, ...]:
    """The fields of a configuration that a module of one's own does not read. InputError where one of them is given.

    model: None: one that is yet to be made, of the configuration's dtype.
    """
    idle = [name for name in FAMILY_OPTIONS if name != "hidden" or config.task != "link"]
    if isinstance(model, LinkModel):
        idle += ["hidden", "decoder"]
    for spec in dataclasses.fields(config):
        if spec.name in idle and getattr(config, spec.name) != spec.default:
            raise InputError(
                f"{spec.name} has no effect on a model of your own: leave it out, and make the {config.model} so"
            )
    asked = getattr(torch, config.dtype)
    narrow = model is not None and row_dtype(model) != parameter_dtype(model)
    if is_narrow(asked) and not narrow:
        raise InputError(
            f"dtype {config.dtype} is for models that are named, such as gcn: convert a model of your own to float32"
        )
    if model is not None and asked != (found := row_dtype(model)):
        what, remedy = ("rows", "set its row_dtype to None") if narrow else ("parameters", "convert the model")
        raise InputError(f"dtype {config.dtype}: the model's {what} are {dtype_name(found)}: leave it out, or {remedy}")
    return tuple(idle)


def options_without_own(config: Config, own: OwnFunctions) -> tuple[str, ...]:
    """The fields of a configuration that functions of one's own do not read. InputError where one of them is given."""
    idle: list[str] = []
    for kind, fields in (("optimizer", OPTIMIZER_FLAGS), ("scheduler", SCHEDULER_FLAGS)):
        if getattr(own, kind) is not None:
            idle += fields
            for spec in dataclasses.fields(config):
                if spec.name in fields and getattr(config, spec.name) != spec.default:
                    raise InputError(
                        f"{spec.name} has no effect on the {kind} of your own: leave it out, and set it there"
                    )
    return tuple(idle)


def without_foreign_flags(config: Config, strategy: str) -> Config:
    """A configuration for a strategy, without the flags that it does not have."""
    own = own_flags(get_strategy(strategy))
    defaults: dict[str, Any] = {
        spec.name: spec.default
        for spec in dataclasses.fields(config)
        if strategies_with(spec.name) and spec.name not in own
    }
    optimisations = [
        one
        for one in config.disable.split(",")
        if one and strategy in (strategies_with_optimisation(one) or [strategy])
    ]
    return replace(config, strategy=strategy, disable=",".join(optimisations), **defaults)


def make_options(config: Config, graph: Graph | None = None) -> Options:
    """What a configuration says to its strategy; without a graph, partitions are left out.

    InputError for an amount that is none, a book of another graph or another number of parts, and an unknown method.
    """
    plan, values = get_strategy(config.strategy), dict[str, Any]()
    for name in configured_options(plan):
        value = getattr(config, name)
        if name in ("device_memory", "cache_memory"):
            value = parse_bytes(value, "--" + name.replace("_", "-")) if value else None
        elif name == "cache_ratio":
            if -1 < value < 0:
                raise InputError(f"--cache-ratio {value}: give a share from 0 to 1, or -1 for where it costs less")
            value = value if value >= 0 else None
        elif name == "scratch":
            value = Path(value) if value else None
        elif name == "partition":
            value = value or plan.partition
            value = open_book(value, config.workers, graph).part if value and graph is not None else None
        values[name] = value
    return plan.options_type(**values)


def partition_of(options: Options) -> Tensor | None:
    """The rank of every vertex, int32 [N], where options say it."""
    return options.partition if isinstance(options, VertexOptions) else None


def with_partition(options: Options, part: Tensor | None) -> Options:
    """Options with another partition, or without one."""
    return replace(options, partition=part) if isinstance(options, VertexOptions) else options


def rows_device(config: Config) -> str:
    """The device of the rows, their maps and the exchange. InputError where they are to be where there is no room."""
    if "nn_device" not in own_flags(get_strategy(config.strategy)):
        return config.device
    if config.nn_device == "device" and config.device_memory:
        raise InputError("--nn-device device: under --device-memory rows are mapped on the host: leave one out")
    if config.nn_device == "host" and config.device != "cpu" and not config.device_memory:
        raise InputError("--nn-device host is for --device-memory: give that as well, or leave it out")
    return "cpu" if config.nn_device == "host" or config.device_memory else config.device


def open_book(name: str, workers: int, graph: Graph) -> PartitionBook:
    """The partition of a graph among some workers: by a method, or from a file."""
    if name in METHODS:
        if workers > graph.num_vertices:
            raise InputError(
                f"--workers {workers}: {graph.name} has {graph.num_vertices} vertices: give at most as many"
            )
        return make_book(graph, workers, method=name)
    if not Path(name).exists() and not Path(name).suffix:
        raise unknown("--partition", name, METHODS)
    book = PartitionBook.open(name, graph)
    if book.num_parts != workers:
        raise InputError(f"--partition {name}: has {book.num_parts} parts: give as many --workers or ranks")
    return book
