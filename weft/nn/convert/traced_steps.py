"""What a converted model does, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from weft.nn.layers.phases import Boundary, BoundaryState
from weft.nn.view import View


class TracedValue(NamedTuple):
    """The result of a step, in the arguments of another."""

    name: str


class Parameter(NamedTuple):
    """A tensor of the model's own, in the arguments of a step."""

    path: str


StepKind = Literal["rows", "shared"]
"""Whether a value has a row for each vertex, or is the same for all."""


class GraphStep:
    """What a step does over the graph, in phases as a `PhasedLayer`; it finds its parameters in the model."""

    over_edges = True

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary | Tensor:
        """From its rows [n, .] to the first boundary."""
        raise NotImplementedError

    def resume(self, model: nn.Module, view: View, state: BoundaryState) -> Boundary | Tensor:
        """From a boundary to the next one, or to the result [n, .]: what the first one gave, if there is no other."""
        del model, view
        return state.result


@dataclass(frozen=True)
class Method:
    """A call of a tensor's method."""

    name: str

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(first, self.name)(*args, **kwargs)


@dataclass(frozen=True)
class Module:
    """A call of one of the model's modules, by its path."""

    path: str


@dataclass(frozen=True)
class Dropout:
    """Keyed dropout with this probability."""

    p: float


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """One call: its result, what is called, and with what."""

    name: str
    """Of the result."""
    does: Callable[..., Any] | Module | Dropout | GraphStep
    args: tuple[Any, ...]
    """Values, Parameters and what Python has, in tuples, lists, dicts and slices."""
    kwargs: dict[str, Any]
    line: str
    """Where it stands in the person's code."""
    stage: int = 0
    """Whose view it runs under: an aggregate over edges has its own, a norm that before it, rows that behind them."""
    alive: tuple[str, ...] = ()
    """Results before it, and x, that later steps read."""


@dataclass(frozen=True, kw_only=True)
class TracedProgram:
    """The steps of a forward pass."""

    steps: tuple[TracedStep, ...]
    result: str
    """Name of the value that is the model's result."""
    kinds: dict[str, StepKind]
    """Of the values."""
    layers: tuple[str, ...] = ()
    """Names of the convolutions' results, in the order of their calls."""
    output_types: tuple[str, ...] = ()
    """Vertex types that it has rows for, of a model by vertex types; the others' are zero."""

    @classmethod
    def of(
        cls, steps: Sequence[TracedStep], result: str, kinds: dict[str, StepKind], layers: tuple[str, ...]
    ) -> TracedProgram:
        """The steps that lead to a result, each with its stage and with what is read behind it."""
        read, needed = {result}, list[TracedStep]()
        for step in reversed(steps):
            if step.name in read:
                needed.append(step)
                read |= {*values_in(step.args, step.kwargs)}
        return cls(steps=_placed(needed[::-1], result), result=result, kinds=kinds, layers=layers)

    def up_to(self, layer: int) -> TracedProgram:
        """That whose result is what the convolution of this number gives, from 1."""
        return TracedProgram.of(self.steps, self.layers[layer - 1], self.kinds, self.layers[:layer])

    @property
    def num_stages(self) -> int:
        """Its aggregates over edges, or 1."""
        return max(1, sum(isinstance(step.does, GraphStep) and step.does.over_edges for step in self.steps))


def _placed(steps: list[TracedStep], result: str) -> tuple[TracedStep, ...]:
    """The steps, each with its stage and with what is read behind it."""
    aggregates = [isinstance(step.does, GraphStep) and step.does.over_edges for step in steps]
    begun, last = [0, *accumulate(aggregates)], max(sum(aggregates) - 1, 0)
    read: dict[str, None] = {result: None}
    found: list[TracedStep] = []
    for number, step in reversed([*enumerate(steps)]):
        read.pop(step.name, None)
        norm = isinstance(step.does, GraphStep) and not step.does.over_edges
        stage = max(begun[number] - 1, 0) if norm else min(begun[number], last)
        found.append(replace(step, stage=stage, alive=tuple(read)))
        read |= dict.fromkeys(values_in(step.args, step.kwargs))
    return tuple(reversed(found))


def map_values(change: Callable[[TracedValue | Parameter], Any], argument: Any) -> Any:
    """An argument with what `change` makes of the values in it."""
    if isinstance(argument, TracedValue | Parameter):
        return change(argument)
    if isinstance(argument, tuple | list):
        found = [map_values(change, one) for one in argument]
        return tuple(found) if isinstance(argument, tuple) else found
    if isinstance(argument, dict):
        return {name: map_values(change, one) for name, one in argument.items()}
    if isinstance(argument, slice):
        return slice(*(map_values(change, one) for one in (argument.start, argument.stop, argument.step)))
    return argument


def values_in(*arguments: Any) -> list[str]:
    """Names of the values in arguments."""
    found: list[str] = []
    map_values(lambda one: found.append(one.name) if isinstance(one, TracedValue) else None, list(arguments))
    return found
