"""Program of a converted model: the steps of its forward pass, and the values between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from weft.nn.layers.phases import Boundary, BoundaryState
from weft.nn.view import View


class TracedValue(NamedTuple):
    """Reference to the result of a step, in the arguments of another step."""

    name: str
    """Name of the step."""


class Parameter(NamedTuple):
    """Reference to a parameter or buffer of the model, in the arguments of a step."""

    path: str
    """Path of the tensor in the model."""


StepKind = Literal["rows", "shared"]
"""Kind of a value: rows, one for each vertex, or shared by all rows."""


class GraphStep:
    """Step that couples rows. It runs in phases like a `PhasedLayer`, with the parameters of the model."""

    over_edges = True
    """True if the step aggregates over edges, False if it goes over all vertices."""
    has_effect = False
    """True if the step changes the model, so that it runs even if nothing reads its result."""

    def begin(self, model: nn.Module, view: View, *rows: Tensor) -> Boundary | Tensor:
        """Run up to the first boundary, or to the result [n, .] if there is none.

        Args:
            model: The converted model, which has the parameters.
            view: The graph.
            *rows: Arguments of the step, [n, .].
        """
        raise NotImplementedError

    def resume(self, model: nn.Module, view: View, state: BoundaryState) -> Boundary | Tensor:
        """Run from a boundary to the next one, or to the result [n, .]; by default, the result is the boundary's.

        Args:
            model: The converted model, which has the parameters.
            view: The graph.
            state: State after the boundary.
        """
        del model, view
        return state.result


@dataclass(frozen=True)
class Method:
    """Call of a tensor's method."""

    name: str
    """Name of the method."""

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(first, self.name)(*args, **kwargs)


@dataclass(frozen=True)
class Module:
    """Call of a module of the model."""

    path: str
    """Path of the module in the model."""


@dataclass(frozen=True)
class Dropout:
    """Call of keyed dropout."""

    p: float
    """Probability that a number becomes zero."""
    of_type: int | None = None
    """Number of the vertex type of the rows; None: rows of all vertices."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """One call in the forward pass of a converted model."""

    name: str
    """Name of the result."""
    operation: Callable[..., Any] | Module | Dropout | GraphStep
    """Function that is called."""
    args: tuple[Any, ...]
    """Positional arguments: `TracedValue`, `Parameter` and Python values, in tuples, lists, dicts and slices."""
    kwargs: dict[str, Any]
    """Keyword arguments."""
    line: str
    """Location in the user's code."""
    constant: bool = False
    """True if the call is under torch.no_grad, or only changes the model."""
    stage: int = 0
    """Stage whose view the step uses. An aggregate over edges has a stage of its own; a norm uses that of the aggregate
    before it, and a step on rows that of the next aggregate."""
    live: tuple[str, ...] = ()
    """Names of x and of results of earlier steps that later steps read."""


@dataclass(frozen=True, kw_only=True)
class ValueTypes:
    """Vertex types of the values of a program, on a heterogeneous graph."""

    vertex_type: str
    """Name of the value with the number of each vertex's type, [n, 1]."""
    num_types: int
    """Number of vertex types, one for all vertices without features."""
    of_value: dict[str, int]
    """Number of the vertex type of each value that has rows of one type only, by name."""


@dataclass(frozen=True, kw_only=True)
class TracedProgram:
    """Steps of a forward pass, in order."""

    steps: tuple[TracedStep, ...]
    """Steps that the result depends on, or that change the model."""
    result: str
    """Name of the value that the model returns."""
    kinds: dict[str, StepKind]
    """Kind of each value, by name."""
    layers: tuple[str, ...] = ()
    """Names of the results of convolutions, in the order of the calls."""
    output_types: tuple[str, ...] = ()
    """Vertex types whose rows the model returns, on a heterogeneous graph; rows of the other types are zero."""
    types: ValueTypes | None = None
    """Vertex types of the values; None: all rows are of all vertices."""

    @classmethod
    def of(
        cls,
        steps: Sequence[TracedStep],
        result: str,
        kinds: dict[str, StepKind],
        layers: tuple[str, ...],
        types: ValueTypes | None = None,
    ) -> TracedProgram:
        """Return the program of the steps that a result needs, with their stages and live values.

        Args:
            steps: Steps in order.
            result: Name of the result.
            kinds: Kind of each value, by name.
            layers: Names of the results of convolutions, in the order of the calls.
            types: Vertex types of the values; None: all rows are of all vertices.
        """
        read, read_by_effects, needed = {result}, set[str](), list[TracedStep]()
        for step in reversed(steps):
            if step.name in read:
                needed.append(step)
                read |= {*values_in(step.args, step.kwargs)}
            elif step.name in read_by_effects or (isinstance(step.operation, GraphStep) and step.operation.has_effect):
                needed.append(replace(step, constant=True))  # the result does not depend on it
                read_by_effects |= {*values_in(step.args, step.kwargs)}
        with_stages = _with_stages(needed[::-1], result)
        return cls(steps=with_stages, result=result, kinds=kinds, layers=layers, types=types)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedProgram:
        return self  # steps are not changed; copies of a model, of which each plan needs several, share them

    def up_to(self, layer: int) -> TracedProgram:
        """Return the program that ends with a convolution and returns its result; `layer` counts from 1."""
        result = self.layers[layer - 1]
        end = next(number for number, step in enumerate(self.steps, 1) if step.name == result)
        return TracedProgram.of(self.steps[:end], result, self.kinds, self.layers[:layer])

    @property
    def num_stages(self) -> int:
        """Number of aggregates over edges, at least 1."""
        return max(1, sum(isinstance(step.operation, GraphStep) and step.operation.over_edges for step in self.steps))


def _with_stages(steps: list[TracedStep], result: str) -> tuple[TracedStep, ...]:
    """Return the steps with their stage and the values that are live after them (backwards, as a compiler does)."""
    aggregates = [isinstance(step.operation, GraphStep) and step.operation.over_edges for step in steps]
    num_before, last = [0, *accumulate(aggregates)], max(sum(aggregates) - 1, 0)
    live: dict[str, None] = {result: None}
    with_stages: list[TracedStep] = []
    for number, step in reversed([*enumerate(steps)]):
        live.pop(step.name, None)
        norm = isinstance(step.operation, GraphStep) and not step.operation.over_edges
        stage = max(num_before[number] - 1, 0) if norm else min(num_before[number], last)
        with_stages.append(replace(step, stage=stage, live=tuple(live)))
        live |= dict.fromkeys(values_in(step.args, step.kwargs))
    return tuple(reversed(with_stages))


def map_values(change: Callable[[TracedValue | Parameter], Any], argument: Any) -> Any:
    """Return an argument in which each reference is replaced.

    Args:
        change: Returns the replacement of a reference.
        argument: A reference, or a tuple, list, dict or slice with references; anything else is returned as it is.
    """
    if isinstance(argument, TracedValue | Parameter):
        return change(argument)
    if isinstance(argument, tuple | list):
        changed = [map_values(change, value) for value in argument]
        return tuple(changed) if isinstance(argument, tuple) else changed
    if isinstance(argument, dict):
        return {name: map_values(change, value) for name, value in argument.items()}
    if isinstance(argument, slice):
        return slice(*(map_values(change, value) for value in (argument.start, argument.stop, argument.step)))
    return argument


def values_in(*arguments: Any) -> list[str]:
    """Return the names of the values that arguments refer to."""
    names: list[str] = []
    map_values(lambda value: names.append(value.name) if isinstance(value, TracedValue) else None, list(arguments))
    return names
