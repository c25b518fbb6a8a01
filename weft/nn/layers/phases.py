"""A module's rows and its aggregates apart: it runs row by row up to a boundary, where it requests an aggregate.

A strategy that works chunk by chunk runs a model up to a `Boundary`, makes the aggregate over all chunks, and resumes
with the rows that the boundary kept (HongTu, section 4: AGGREGATE and UPDATE). All others run it as `forward` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.nn.aggregate.aggregate import Request, WholeLayer
from weft.nn.view import View


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Where the rows of a module wait for the graph: what they request, and what goes on with the result."""

    request: Request
    steps: int = 1
    """How often it is aggregated, one result being aggregated by the next."""
    stage: int = 0
    """Whose view aggregates."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Rows [n, .] that go on with the result, by name."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that all rows share and that go on with the result, by name."""
    context: Any = None
    """What else goes on with the result: no tensor, and the same for all rows."""
    on_result: Callable[[Tensor], None] | None = None
    """Called with the result, once in a forward pass."""

    def cross(self, view: View) -> BoundaryState:
        """Aggregates under a view of all rows; behind an aggregate the rows are its targets', behind a total all."""
        op, requested = self.request
        result = view.aggregate(op, requested, self.steps)
        if self.on_result is not None:
            self.on_result(result)
        rows = {name: view.targets(values) for name, values in self.rows.items()} if op.over_edges else self.rows
        return BoundaryState(result=result, rows=rows, shared=self.shared, context=self.context)


@dataclass(frozen=True, kw_only=True)
class BoundaryState:
    """What a module goes on with behind a boundary."""

    result: Tensor
    """What the view gave: rows [n, .], or [F] for a total."""
    rows: dict[str, Tensor]
    """The boundary's rows; behind an aggregate, those of its targets."""
    shared: dict[str, Tensor]
    """The boundary's."""
    context: Any = None
    """The boundary's."""


class PhasedLayer(nn.Module):
    """A layer in phases, each row by row: to a boundary, from there to the next one, at last to its rows."""

    def begin(self, view: View, x: Tensor) -> Boundary | Tensor:
        """From the rows x [n, in_width] to the first boundary, or to the rows [n, out_width]."""
        raise NotImplementedError

    def resume(self, view: View, state: BoundaryState) -> Boundary | Tensor:
        """From a boundary's result to the next boundary, or to the rows [n, out_width]."""
        raise NotImplementedError

    def forward(self, view: View, x: Tensor, steps: int = 1) -> Tensor:
        reached = self.begin(view, x)
        while isinstance(reached, Boundary):
            state = replace(reached, steps=steps).cross(view)
            del reached  # what was aggregated is let go before the rows go on
            reached = self.resume(view, state)
        return reached


class PhasedModel(nn.Module):
    """A model in phases, as a layer is, with a view for each of its stages."""

    num_stages: int
    row_dtype: torch.dtype | None = None
    """The type of its rows, where they are narrower than its parameters."""

    def begin(self, views: Sequence[View], x: Tensor) -> Boundary | Tensor:
        """From the features x [n, in_width] to the first boundary, or to the logits [n, out_width]."""
        raise NotImplementedError

    def resume(self, views: Sequence[View], state: BoundaryState) -> Boundary | Tensor:
        """From a boundary's result to the next boundary, or to the logits [n, out_width]."""
        raise NotImplementedError

    def forward(self, views: Sequence[View], x: Tensor) -> Tensor:
        reached = self.begin(views, x)
        while isinstance(reached, Boundary):
            state = reached.cross(views[reached.stage])
            del reached  # as above
            reached = self.resume(views, state)
        return reached


def parameter_dtype(model: nn.Module) -> torch.dtype:
    """The floating-point type of a model's parameters."""
    return next((parameter.dtype for parameter in model.parameters()), torch.float32)


def row_dtype(model: nn.Module) -> torch.dtype:
    """That of the rows that a model reads and makes."""
    return getattr(model, "row_dtype", None) or parameter_dtype(model)


def phases_of(module: nn.Module) -> PhasedLayer | PhasedModel | None:
    """The module, if its phases are all that its call does: not with a `forward` or hooks of somebody's own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    drivers = (PhasedLayer.forward, PhasedModel.forward)
    if isinstance(module, PhasedLayer | PhasedModel) and type(module).forward in drivers and not any(hooks):
        return module
    return None


def begin(module: nn.Module, views: Any, x: Tensor) -> Boundary | Tensor:
    """The first phase of any module, under its view or views: one without phases is called."""
    phased = phases_of(module)
    reached: Boundary | Tensor = module(views, x) if phased is None else phased.begin(views, x)
    return reached


def begin_layer(layer: nn.Module, view: View, x: Tensor) -> Boundary | Tensor:
    """The first phase of a layer that may need the graph: one without phases is an aggregate itself."""
    if phases_of(layer) is None:
        return Boundary(request=Request(WholeLayer(layer), {"x": x, "own": x}))
    return begin(layer, view, x)


def resume(module: nn.Module, views: Any, state: BoundaryState) -> Boundary | Tensor:
    """The next phase of any module: the result is all that one without phases gives."""
    phased = phases_of(module)
    return state.result if phased is None else phased.resume(views, state)
