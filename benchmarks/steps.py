"""Plans and training steps of weft's strategies, for the other benchmarks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch.profiler import record_function

from weft.nn import Workload
from weft.strategies import Placed, Plan, Step, get_strategy
from weft.training.tasks.metrics import Task


def make_plan(strategy: str, work: Workload, size: int = 1, **options: Any) -> Plan:
    """Return the plan of a strategy.

    Args:
        strategy: Name of the strategy.
        work: The model and the graph.
        size: Number of ranks.
        **options: Options of any strategies; those that this strategy lacks are ignored.
    """
    kind = get_strategy(strategy)
    names = {spec.name for spec in fields(kind.options_type)}
    return kind(work, size, kind.options_type(**{name: value for name, value in options.items() if name in names}))


def whole_step(placed: Placed, epoch: int) -> Step:
    """Return the only step of an epoch on the full graph."""
    (step,) = placed.steps(epoch)
    return step


def train_step(placed: Placed, task: Task, step: Step) -> None:
    """Run a training step without the optimizer: the gradients are added to those of the parameters."""
    logits = placed.forward(step)
    with record_function("loss"):
        _, grad = task.loss(logits, step)
    placed.backward(logits, grad)
