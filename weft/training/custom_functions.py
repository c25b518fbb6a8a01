"""User-defined functions in place of names in the configuration: loss, metrics, optimizer, scheduler, callbacks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from weft.training.launch.payload import pickled, sending
from weft.utils.errors import InputError, RunError, cause

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Function that returns the loss of each row, [k], from logits [k, C] and labels [k] or [k, T]."""
RowsMetric = Callable[[Tensor, Tensor], Any]
"""Function that returns one number for all rows of a split, from logits [k, C] and labels [k] or [k, T]."""
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Function that returns an optimizer for a list of parameters."""
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]
"""Function that returns a learning-rate scheduler for an optimizer."""
Callback = Callable[[dict[str, Any]], Any]
"""Function that is called with the record of each epoch. If it returns True, the run ends."""


@dataclass(frozen=True, kw_only=True)
class OwnFunctions:
    """User-defined functions of a run. If one is missing, the name in the configuration selects a built-in."""

    loss: RowLoss | None = None
    metrics: Mapping[str, RowsMetric] = field(default_factory=dict)
    """Functions by the name of their score."""
    optimizer: MakeOptimizer | None = None
    scheduler: MakeScheduler | None = None
    callbacks: Sequence[Callback] = ()
    """Functions that rank 0 calls with each epoch's record."""

    def named(self) -> dict[str, Any]:
        """Return all functions by the name that error messages use for them."""
        single = {name: getattr(self, name) for name in ("loss", "optimizer", "scheduler")}
        metrics = {f"metric {name}": metric for name, metric in self.metrics.items()}
        callbacks = {f"callback {number}": callback for number, callback in enumerate(self.callbacks)}
        return {name: function for name, function in {**single, **metrics, **callbacks}.items() if function is not None}

    def require_sendable(self) -> None:
        """Check that all functions can be pickled for local ranks.

        Raises:
            InputError: A function cannot be pickled.
        """
        for name, function in self.named().items():
            with sending(name):
                pickled(function)


NO_FUNCTIONS = OwnFunctions()
REGISTERED: dict[str, dict[str, Any]] = {"loss": {}, "metric": {}}
"""Functions that `weft.register` has registered, by kind and name."""


def extract_functions(options: Mapping[str, Any]) -> tuple[OwnFunctions, dict[str, Any]]:
    """Separate the functions among the options of `weft.train` from the other options.

    Args:
        options: The keyword arguments of `weft.train`. loss, optimizer, scheduler and metrics may be functions.

    Returns:
        The functions, and the options with the name of each function in its place and without callbacks.

    Raises:
        InputError: A callback is not callable, or a metric has no unique name.
    """
    named_options, functions = dict(options), dict[str, Any]()
    callbacks = named_options.pop("callbacks", ())
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise InputError("callbacks: pass a list of functions; each is called with the record of an epoch, a dict")
    for option in ("loss", "optimizer", "scheduler"):
        if callable(named_options.get(option)):
            functions[option] = named_options[option]
            named_options[option] = name_of(functions[option])
    metrics = dict[str, RowsMetric]()
    if callable(requested := named_options.get("metrics", "")) or isinstance(requested, list | tuple):
        requested_metrics = [requested] if callable(requested) else list(requested)
        for metric in filter(callable, requested_metrics):
            name = name_of(metric)
            if not re.fullmatch(r"\w+", name, re.ASCII) or name in metrics:
                raise InputError(
                    f"metrics: {name} is not a valid and unique name for a score: define each metric with def, under a "
                    "name of its own"
                )
            metrics[name] = metric
        named_options["metrics"] = ",".join(
            name_of(metric) if callable(metric) else str(metric) for metric in requested_metrics
        )
    return OwnFunctions(**functions, metrics=metrics, callbacks=tuple(callbacks)), named_options


def name_of(function: Any) -> str:
    """Return the name of a function or callable object, as configuration files and scores contain it."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


@contextmanager
def errors_from(name: str, kind: type[InputError | RunError] = InputError) -> Iterator[None]:
    """Turn any exception of a user-defined function, called in the with block, into one line that names it.

    Args:
        name: Kind and name of the function, for the message.
        kind: Class of the error to raise.

    Raises:
        InputError: The function failed, unless `kind` is RunError.
        RunError: The function failed, and `kind` is RunError.
    """
    try:
        yield
    except (InputError, RunError, Warning, MemoryError):
        raise
    except Exception as error:
        raise kind(f"{name} raised an exception ({type(error).__name__}, {cause(error)})") from error


@contextmanager
def combined_callbacks(callbacks: Sequence[Callback]) -> Iterator[Callback]:
    """Yield one function that calls all callbacks with a record. Afterwards, call `close` of those that have it.

    The function returns True if a callback has returned True.

    Args:
        callbacks: The functions to call, in this order.

    Raises:
        RunError: A callback raised an exception. The message names the callback.
    """

    def call(record: dict[str, Any]) -> bool:
        ends = False
        for callback in callbacks:
            with errors_from(f"callback {name_of(callback)}", RunError):
                ends |= callback(dict(record)) is True
        return ends

    try:
        yield call
    finally:
        for callback in callbacks:
            if hasattr(callback, "close"):
                with errors_from(f"callback {name_of(callback)}", RunError):
                    callback.close()


def require_new_name(option: str, name: str, builtins: Mapping[str, Any]) -> None:
    """Check that a user-defined function is not named like a built-in; a configuration could not distinguish them.

    Args:
        option: Name of the option, for the message.
        name: Name of the function.
        builtins: Built-in choices of the option by name.

    Raises:
        InputError: A built-in has this name.
    """
    if name in builtins:
        raise InputError(f"{option}: weft has a built-in named {name}: rename your function")
