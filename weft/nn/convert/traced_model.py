"""A converted model, as phases under views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from weft.nn.convert.traced_steps import (
    Dropout,
    GraphStep,
    Module,
    Parameter,
    TracedProgram,
    TracedStep,
    TracedValue,
    map_values,
)
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel
from weft.nn.view import View
from weft.utils.errors import InputError

ALIVE = "alive."
"""Names of rows and shared tensors at a boundary that are the program's begin so."""


class Converted(PhasedModel):
    """A model of somebody's, whose parameters it has under the same names, as steps row by row and over the graph.

    Every aggregate over edges has a stage of its own. model: whose modules and parameters become its own. training,
    evaluating: what a forward pass does.
    """

    def __init__(self, model: nn.Module, training: TracedProgram, evaluating: TracedProgram) -> None:
        super().__init__()
        self.num_stages = training.num_stages
        self.programs = {True: training, False: evaluating}
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    @property
    def output_types(self) -> tuple[str, ...]:
        """The vertex types whose rows it gives, of a model by types; (): every vertex's."""
        return self._program.output_types

    @property
    def num_layers(self) -> int:
        """Its convolutions."""
        return len(self._program.layers)

    def up_to(self, layers: int) -> Converted:
        """A model whose parameters it shares: its rows are what the convolution of this number gives, from 1."""
        return Converted(self, *(self.programs[training].up_to(layers) for training in (True, False))).train(
            self.training
        )

    def begin(self, views: Sequence[View], x: Tensor) -> Boundary | Tensor:
        return self._advance(views, 0, None, {"x": x})

    def resume(self, views: Sequence[View], state: BoundaryState) -> Boundary | Tensor:
        number, context, shapes, plain = state.context
        step = self._program.steps[number]
        assert isinstance(step.does, GraphStep)
        rows, kept = _parted(state.rows)
        shared, of_all = _parted(state.shared)
        reached = step.does.resume(self, views[step.stage], replace(state, rows=rows, shared=shared, context=context))
        return self._advance(views, number, reached, {**plain, **of_all, **_restored(kept, shapes)})

    @property
    def _program(self) -> TracedProgram:
        return self.programs[self.training]

    def _advance(
        self, views: Sequence[View], number: int, reached: Boundary | Tensor | None, values: dict[str, Any]
    ) -> Boundary | Tensor:
        """From a step, and what it has reached if it was begun, to the next boundary, or to the result."""
        program = self._program
        for at, step in enumerate(program.steps[number:], number):
            if isinstance(step.does, GraphStep):
                if reached is None:
                    reached = step.does.begin(self, views[step.stage], *self._arguments(step.args, values))
                if isinstance(reached, Boundary):
                    return self._kept(step, at, values, reached)
                values[step.name], reached = reached, None
            else:
                values[step.name] = self._run(step, views[step.stage], values)
            values = {name: values[name] for name in (*step.alive, step.name)}
        found: Tensor = values[program.result]
        return found

    def _run(self, step: TracedStep, view: View, values: dict[str, Any]) -> Any:
        """The result of a step on the rows at hand."""
        args, kwargs = self._arguments(step.args, values), self._arguments(step.kwargs, values)
        does = step.does
        if isinstance(does, Dropout):
            return view.dropout(args[0], does.p)
        if not isinstance(does, Module):
            call: Any = does
            return call(*args, **kwargs)
        module: Any = self.get_submodule(does.path)
        hooked = module._forward_hooks or module._forward_pre_hooks
        if type(module).__name__ == "Linear" and args[0].dim() == 2 and not hooked:
            return view.linear(args[0], module.weight.t(), module.bias)
        return module(*args, **kwargs)

    def _arguments(self, arguments: Any, values: dict[str, Any]) -> Any:
        def known(one: TracedValue | Parameter) -> Any:
            if isinstance(one, TracedValue):
                return values[one.name]
            path, _, name = one.path.rpartition(".")
            return getattr(self.get_submodule(path), name)

        return map_values(known, arguments)

    def _kept(self, step: TracedStep, number: int, values: dict[str, Any], boundary: Boundary) -> Boundary:
        """A step's boundary, with what later steps read of what there is."""
        kinds = self._program.kinds
        rows: dict[str, Tensor] = {}
        shared: dict[str, Tensor] = {}
        shapes: dict[str, Any] = {}
        plain: dict[str, Any] = {}
        for name in step.alive:
            value = values[name]
            if kinds[name] == "shared" and isinstance(value, Tensor):
                shared[ALIVE + name] = value
            elif kinds[name] == "rows":
                shapes[name] = _flat(value, ALIVE + name, rows, step.line)
            else:
                plain[name] = value
        return replace(
            boundary,
            stage=step.stage,
            rows={**boundary.rows, **rows},
            shared={**boundary.shared, **shared},
            context=(number, boundary.context, shapes, plain),
        )


def _parted(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A boundary's tensors that are a step's own, and those that are the program's, by their names there."""
    own = {name: one for name, one in tensors.items() if not name.startswith(ALIVE)}
    return own, {name.removeprefix(ALIVE): one for name, one in tensors.items() if name.startswith(ALIVE)}


def _flat(value: Any, name: str, into: dict[str, Tensor], line: str) -> Any:
    """The shape of a value, whose tensors go into `into` as rows [n, .] each: how `_restored` makes it again."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
        into[name] = value if value.dim() == 2 else value.reshape(len(value), -1)
        return tuple(value.shape[1:])
    if isinstance(value, tuple | list):
        return [_flat(one, f"{name}.{number}", into, line) for number, one in enumerate(value)]
    what = f"{value.dtype} values" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise InputError(
        f"{line}: {what} of the rows before this aggregate are used behind it, where a rank may have fewer rows: "
        "compute them again behind it"
    )


def _restored(kept: dict[str, Tensor], shapes: dict[str, Any]) -> dict[str, Any]:
    def again(name: str, shape: Any) -> Any:
        if isinstance(shape, list):
            return [again(f"{name}.{number}", one) for number, one in enumerate(shape)]
        rows = kept[name]
        return rows if len(shape) == 1 else rows.reshape(len(rows), *shape)

    return {name: again(name, shape) for name, shape in shapes.items()}
