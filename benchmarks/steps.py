"""Plans and training steps of weft's strategies, as benchmarks make them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch.profiler import record_function

from weft.nn import Workload
from weft.strategies import Placed, Plan, Step, get_strategy
from weft.training.tasks.metrics import Task


def make_plan(strategy: str, work: Workload, size: int = 1, **options: Any) -> Plan:
    """A strategy's plan on `size` ranks, with those of the options that it has."""
    kind = get_strategy(strategy)
    known = {spec.name for spec in fields(kind.options_type)}
    return kind(work, size, kind.options_type(**{name: value for name, value in options.items() if name in known}))


def whole_step(placed: Placed, epoch: int) -> Step:
    """The step of an epoch on the whole graph."""
    (step,) = placed.steps(epoch)
    return step


def train_step(placed: Placed, task: Task, step: Step) -> None:
    """A training step but for the optimiser's: adds to the parameters' gradients."""
    logits = placed.forward(step)
    with record_function("loss"):
        _, grad = task.loss(logits, step)
    placed.backward(logits, grad)
