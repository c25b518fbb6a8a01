"""What a person gives as functions where a configuration has names: loss, metrics, optimiser, schedule, callbacks."""

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

from weft.training.launch.payload import dumped, sending
from weft.utils.errors import InputError, RunError, cause

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""The loss [k] of each row, from logits [k, C] and labels [k] or [k, T]."""
RowsMetric = Callable[[Tensor, Tensor], Any]
"""One number of all rows of a split, from logits [k, C] and labels [k] or [k, T]."""
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]
Callback = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True, kw_only=True)
class OwnFunctions:
    """Functions of one's own; where there is none, the configuration's name says what is done."""

    loss: RowLoss | None = None
    metrics: Mapping[str, RowsMetric] = field(default_factory=dict)
    """By the names that scores have."""
    optimizer: MakeOptimizer | None = None
    scheduler: MakeScheduler | None = None
    callbacks: Sequence[Callback] = ()
    """Called on rank 0 with each epoch's record."""

    def named(self) -> dict[str, Any]:
        """The functions by what a person calls them."""
        single = {name: getattr(self, name) for name in ("loss", "optimizer", "scheduler")}
        metrics = {f"metric {name}": metric for name, metric in self.metrics.items()}
        callbacks = {f"callback {number}": callback for number, callback in enumerate(self.callbacks)}
        return {name: one for name, one in {**single, **metrics, **callbacks}.items() if one is not None}

    def require_sendable(self) -> None:
        """InputError where a function cannot be sent to local ranks."""
        for name, function in self.named().items():
            with sending(name):
                dumped(function)


NOTHING_OWN = OwnFunctions()


def taken_functions(options: Mapping[str, Any]) -> tuple[OwnFunctions, dict[str, Any]]:
    """The functions among the options of `weft.train`, and the options with these functions' names in their place.

    InputError for a callback that cannot be called, and a metric without a name of its own.
    """
    named, own = dict(options), dict[str, Any]()
    callbacks = named.pop("callbacks", ())
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise InputError("callbacks: give a list of functions, or objects that can be called, of an epoch's record")
    for option in ("loss", "optimizer", "scheduler"):
        if callable(named.get(option)):
            own[option] = named[option]
            named[option] = name_of(own[option])
    metrics = dict[str, RowsMetric]()
    if callable(given := named.get("metrics", "")) or isinstance(given, list | tuple):
        several = [given] if callable(given) else list(given)
        for metric in filter(callable, several):
            name = name_of(metric)
            if not re.fullmatch(r"\w+", name, re.ASCII) or name in metrics:
                raise InputError(f"metrics: {name} is no name of its own for a score: define each metric by def")
            metrics[name] = metric
        named["metrics"] = ",".join(name_of(one) if callable(one) else str(one) for one in several)
    return OwnFunctions(**own, metrics=metrics, callbacks=tuple(callbacks)), named


def name_of(function: Any) -> str:
    """What a function, or an object that can be called, is called in a configuration and in scores."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


@contextmanager
def blamed(what: str, kind: type[InputError | RunError] = InputError) -> Iterator[None]:
    """Makes one line that names a person's function of whatever it raises."""
    try:
        yield
    except (InputError, RunError, Warning, MemoryError):
        raise
    except Exception as error:
        raise kind(f"{what} raised an error of its own ({type(error).__name__}, {cause(error)})") from error


@contextmanager
def called(callbacks: Sequence[Callback]) -> Iterator[Callback]:
    """One function that calls all of them with a record; those that have a `close` are closed afterwards.

    RunError, which names the callback, for what one raises.
    """

    def call(line: dict[str, Any]) -> None:
        for callback in callbacks:
            with blamed(f"callback {name_of(callback)}", RunError):
                callback(dict(line))

    try:
        yield call
    finally:
        for callback in callbacks:
            if hasattr(callback, "close"):
                with blamed(f"callback {name_of(callback)}", RunError):
                    callback.close()


def require_new_name(option: str, name: str, known: Mapping[str, Any]) -> None:
    """InputError where a person's function has the name of one that weft has: a configuration could not tell them."""
    if name in known:
        raise InputError(f"{option}: {name} is what weft calls one of its own: call your function something else")
