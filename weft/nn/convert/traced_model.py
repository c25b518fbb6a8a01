"""Converted PyG models, which run their steps in phases, under views."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from weft.nn.aggregate.aggregate import Request
from weft.nn.aggregate.typed_block import Place, TypeOrder, side_by_side
from weft.nn.convert.native_layers import SumOverInEdges
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

LIVE = "alive."
"""Prefix of the names of live values among the tensors of a boundary; the others belong to the step."""
BY_TYPE = "by_type"
"""Name of the live values with rows of one vertex type, side by side."""


class TypedShapes(NamedTuple):
    """Shapes and places of a live value with rows of one vertex type."""

    shape: Any
    """Shape of the value, for `_restored`."""
    places: dict[str, Place]
    """Place of each of its tensors, by name."""


class Converted(PhasedModel):
    """Converted PyG model, with the parameters of the original under the same names.

    Each aggregate over edges has a stage of its own. Strategies call it with views and rows. You can also call it with
    the arguments of the original model, such as x and edge_index, for the original's result with the current weights.

    Args:
        model: Model whose modules, parameters and buffers it takes over.
        training: Program of the forward pass in training.
        evaluating: Program of the forward pass in evaluation.
        original: The original PyG model. None: only strategies can call this model.
    """

    original: nn.Module | None
    """The original PyG model, which is not sent to ranks."""

    def __init__(
        self,
        model: nn.Module,
        training: TracedProgram,
        evaluating: TracedProgram,
        original: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.__dict__["original"] = original  # its parameters are those of this model
        self.num_stages = training.num_stages
        self.programs = {True: training, False: evaluating}
        self.with_leading_dim: set[str] = set()
        """Names of live values with a dimension of size 1 before that of the rows, such as a GRU's state [1, n, F]."""
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits for views and rows, or the original model's result for its arguments."""
        if has_views(args, kwargs):
            return super().__call__(*args, **kwargs)
        if self.original is None:
            raise InputError(
                "this copy of a converted model has no original to call with PyG's arguments: call the model that "
                "weft.nn.convert or weft.load_model returned"
            )
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return functional_call(self.original.train(self.training), tensors, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and for ranks, which need no original and may not be able to import its class."""
        return {**self.__dict__, "original": None}

    @property
    def output_types(self) -> tuple[str, ...]:
        """Vertex types whose rows the model returns, on a heterogeneous graph; empty: rows of all vertices."""
        return self._program.output_types

    @property
    def stages_of_sums(self) -> dict[int, str]:
        """Class of the convolution whose in-edge sums, such as degrees, a stage computes; by stage."""
        return {
            step.stage: type(step.operation.layer(self).conv).__name__
            for step in self._program.steps
            if isinstance(step.operation, SumOverInEdges)
        }

    @property
    def num_layers(self) -> int:
        """Number of calls of convolutions."""
        return len(self._program.layers)

    def up_to(self, layers: int) -> Converted:
        """Return a model that shares the parameters and returns the result of convolution `layers`, from 1."""
        training, evaluating = (self.programs[mode].up_to(layers) for mode in (True, False))
        return Converted(self, training, evaluating).train(self.training)

    def begin(self, views: Sequence[View], x: Tensor) -> Boundary | Tensor:
        return self._advance(views, 0, None, {"x": x})

    def resume(self, views: Sequence[View], state: BoundaryState) -> Boundary | Tensor:
        number, context, shapes, typed_shapes, constants = state.context
        step = self._program.steps[number]
        assert isinstance(step.operation, GraphStep)
        rows, live_rows = _split(state.rows)
        shared, live_shared = _split(state.shared)
        values = {**constants, **live_shared, **_restored(live_rows, shapes)}
        if typed_shapes:
            values |= self._restored_by_type(views[step.stage], values, live_rows[BY_TYPE], typed_shapes)
        with _gradients_of(step):
            reached = step.operation.resume(
                self, views[step.stage], replace(state, rows=rows, shared=shared, context=context)
            )
        return self._advance(views, number, reached, values)

    @property
    def _program(self) -> TracedProgram:
        return self.programs[self.training]

    def _advance(
        self, views: Sequence[View], number: int, reached: Boundary | Tensor | None, values: dict[str, Any]
    ) -> Boundary | Tensor:
        """Run on to the next boundary, or to the result.

        Args:
            views: The view of each stage.
            number: Number of the step to go on with.
            reached: What this step has returned so far; None: it has not begun.
            values: Live values, by name; changed.
        """
        program = self._program
        for index, step in enumerate(program.steps[number:], number):
            if isinstance(step.operation, GraphStep):
                if reached is None:
                    with _gradients_of(step):
                        reached = step.operation.begin(self, views[step.stage], *self._arguments(step.args, values))
                    if step.operation.over_edges and not isinstance(reached, Boundary):
                        values = self._of_targets(step, views[step.stage], values)
                if isinstance(reached, Boundary):
                    return self._with_state(step, views[step.stage], index, values, reached)
                values[step.name], reached = reached, None
            else:
                with _gradients_of(step):
                    values[step.name] = self._run(step, views[step.stage], values)
            values = {name: values[name] for name in (*step.live, step.name)}
        result: Tensor = values[program.result]
        return result

    def _run(self, step: TracedStep, view: View, values: dict[str, Any]) -> Any:
        """Return the result of a step that does not couple rows."""
        args, kwargs = self._arguments(step.args, values), self._arguments(step.kwargs, values)
        operation = step.operation
        if isinstance(operation, Dropout) and operation.of_type is not None:
            x, vertex_type = args
            rows = self._type_order(view, vertex_type).rows_of(operation.of_type)
            return view.dropout(x, operation.p, rows=rows)
        if isinstance(operation, Dropout):
            return view.dropout(args[0], operation.p)
        if not isinstance(operation, Module):
            call: Any = operation
            return call(*args, **kwargs)
        module: Any = self.get_submodule(operation.path)
        hooked = module._forward_hooks or module._forward_pre_hooks
        if type(module).__name__ == "Linear" and args[0].dim() == 2 and not hooked:
            return view.linear(args[0], module.weight.t(), module.bias)
        return module(*args, **kwargs)

    def _arguments(self, arguments: Any, values: dict[str, Any]) -> Any:
        def resolve(reference: TracedValue | Parameter) -> Any:
            if isinstance(reference, TracedValue):
                return values[reference.name]
            path, _, name = reference.path.rpartition(".")
            return getattr(self.get_submodule(path), name)

        return map_values(resolve, arguments)

    def _type_order(self, view: View, vertex_type: Tensor) -> TypeOrder:
        types = self._program.types
        assert types is not None
        return view.type_order(vertex_type, types.num_types)

    def _with_state(
        self, step: TracedStep, view: View, number: int, values: dict[str, Any], boundary: Boundary
    ) -> Boundary:
        """Return the boundary of a step with the live values added to its state."""
        kinds, num_rows = self._program.kinds, len(boundary.request.rows[boundary.request.op.first])
        if step.constant:
            op, requested = boundary.request
            detached = {name: tensor.detach() if tensor.requires_grad else tensor for name, tensor in requested.items()}
            boundary = replace(boundary, request=Request(op, detached))
        rows: dict[str, Tensor] = {}
        shared: dict[str, Tensor] = {}
        shapes: dict[str, Any] = {}
        typed_shapes: dict[str, TypedShapes] = {}
        constants: dict[str, Any] = {}
        types = self._program.types
        typed = [name for name in step.live if types and kinds[name] == "rows" and name in types.of_value]
        if typed:
            rows[LIVE + BY_TYPE], typed_shapes = self._joined_by_type(step, view, typed, values)
        for name in step.live:
            value = values[name]
            if kinds[name] == "shared" and isinstance(value, Tensor):
                shared[LIVE + name] = value
            elif name in typed:
                continue
            elif kinds[name] == "rows":
                shapes[name] = _flatten(value, LIVE + name, rows, num_rows, step.line, self.with_leading_dim)
            else:
                constants[name] = value
        return replace(
            boundary,
            stage=step.stage,
            rows={**boundary.rows, **rows},
            shared={**boundary.shared, **shared},
            context=(number, boundary.context, shapes, typed_shapes, constants),
        )

    def _of_targets(self, step: TracedStep, view: View, values: dict[str, Any]) -> dict[str, Any]:
        """Return the live values of a step over edges that needed no boundary, with the rows of its targets only."""
        types, kinds = self._program.types, self._program.kinds
        assert types is not None
        before = values[types.vertex_type]
        after = view.targets(before)
        if len(after) == len(before):
            return values
        orders, restricted = [self._type_order(view, each) for each in (before, after)], dict[str, Any]()
        for name in step.live:
            if kinds[name] == "rows":
                count, num_targets = len(before), len(after)
                if name in types.of_value:
                    count, num_targets = (order.counts[types.of_value[name]] for order in orders)
                rows = dict[str, Tensor]()
                shape = _flatten(values[name], name, rows, count, step.line, self.with_leading_dim)
                rows = {part: tensor[:num_targets] for part, tensor in rows.items()}
                restricted[name] = _restored_value(rows, name, shape)
        return values | restricted

    def _joined_by_type(
        self, step: TracedStep, view: View, names: Sequence[str], values: dict[str, Any]
    ) -> tuple[Tensor, dict[str, TypedShapes]]:
        """Return live values with rows of one type as rows of all vertices, and how to restore them.

        Args:
            step: The step over which they are live.
            view: The graph.
            names: Names of these values.
            values: Values by name.
        """
        types = self._program.types
        assert types is not None
        order = self._type_order(view, values[types.vertex_type])
        by_name: dict[str, tuple[Any, dict[str, Tensor]]] = {}
        for name in names:
            parts: dict[str, Tensor] = {}
            count = order.counts[types.of_value[name]]
            by_name[name] = _flatten(values[name], name, parts, count, step.line, self.with_leading_dim), parts
        everything = [part for _, parts in by_name.values() for part in parts.values()]
        places = side_by_side([types.of_value[name] for name, (_, parts) in by_name.items() for _ in parts], everything)
        remaining = iter(places)
        shapes = {
            name: TypedShapes(shape, {part: next(remaining) for part in parts})
            for name, (shape, parts) in by_name.items()
        }
        return order.join(everything, places), shapes

    def _restored_by_type(
        self, view: View, values: dict[str, Any], rows: Tensor, shapes: dict[str, TypedShapes]
    ) -> dict[str, Any]:
        """Return the live values with rows of one type, from rows of all vertices."""
        types = self._program.types
        assert types is not None
        order = self._type_order(view, values[types.vertex_type])
        places = {part: place for shape in shapes.values() for part, place in shape.places.items()}
        parts = dict(zip(places, order.split(rows, [*places.values()]), strict=True))
        return _restored(parts, {name: shape.shape for name, shape in shapes.items()})


def _gradients_of(step: TracedStep) -> torch.set_grad_enabled:
    """Return a context without gradients if the step is under torch.no_grad."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and not step.constant)


def has_views(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a model is called with views, as by strategies, not with the arguments of a PyG model.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    return isinstance(args[0] if args else kwargs.get("views"), Sequence)


def _split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split the tensors of a boundary into those of its step and the live values, by their names in the program."""
    step_tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(LIVE)}
    return step_tensors, {name.removeprefix(LIVE): tensor for name, tensor in tensors.items() if name.startswith(LIVE)}


def _flatten(
    value: Any, name: str, into: dict[str, Tensor], num_rows: int, line: str, with_leading_dim: set[str]
) -> Any:
    """Add the tensors of a live value to `into` as rows [n, .], and return the shapes that `_restored` needs.

    Args:
        value: A floating-point tensor, or a tuple or list of these.
        name: Name of the rows; parts of a tuple get their index appended.
        into: Rows by name, which are added to.
        num_rows: Number of rows, n.
        line: Location in the user's code, for an error.
        with_leading_dim: Names of values with a dimension of size 1 before that of the rows. A call on several rows
            adds to it; on one row, the shape alone does not tell.
    """
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
        # The rows may be the second dimension after one of size 1, as in the state of a GRU that runs once.
        before = int(value.dim() > 1 and value.shape[0] == 1 and (num_rows != 1 or name in with_leading_dim))
        widths = tuple(value.shape[before + 1 :])
        if value.shape[before] == num_rows:
            with_leading_dim |= {name} if before else set()
            into[name] = value if value.dim() == 2 and not before else value.reshape(num_rows, math.prod(widths))
            return before, widths
    if isinstance(value, tuple | list):
        parts = enumerate(value)
        return [_flatten(part, f"{name}.{number}", into, num_rows, line, with_leading_dim) for number, part in parts]
    is_tensor = isinstance(value, Tensor)
    what = f"a tensor {list(value.shape)} of {value.dtype}" if is_tensor else f"a value of type {type(value).__name__}"
    raise InputError(
        f"{line}: {what} that was computed before this aggregate is used after it, where a rank may have fewer rows: "
        "compute it again after the aggregate"
    )


def _restored(rows: dict[str, Tensor], shapes: dict[str, Any]) -> dict[str, Any]:
    return {name: _restored_value(rows, name, shape) for name, shape in shapes.items()}


def _restored_value(rows: dict[str, Tensor], name: str, shape: Any) -> Any:
    # No function within a function: one that calls itself would keep the rows until the next garbage collection.
    if isinstance(shape, list):
        return [_restored_value(rows, f"{name}.{number}", part) for number, part in enumerate(shape)]
    tensor, (before, widths) = rows[name], shape
    return tensor if not before and len(widths) == 1 else tensor.reshape(*[1] * before, len(tensor), *widths)
