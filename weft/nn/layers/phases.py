"""Modules that run in phases: row by row up to a `Boundary`, where they request an aggregate, and on from its result.

A strategy that works chunk by chunk runs a model up to a boundary for all chunks, computes the aggregate, and resumes
with the rows that the boundary carries (HongTu, section 4: AGGREGATE and UPDATE). All other strategies call `forward`.
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
    """Point at which a module waits for an aggregate: the request, and the state with which the module resumes."""

    request: Request
    """Requested aggregate, with its tensors."""
    steps: int = 1
    """Number of times that the aggregate is applied."""
    stage: int = 0
    """Number of the stage whose view aggregates."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Rows [n, .] that the module reads after the aggregate, by name."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Tensors without a row for each vertex that the module reads after the aggregate, by name."""
    context: Any = None
    """Further state of the module, without tensors, the same for all rows."""
    on_result: Callable[[Tensor], None] | None = None
    """Function that is called with the result, once in a forward pass."""

    def cross(self, view: View) -> BoundaryState:
        """Compute the aggregate with a view, and return the state with which the module resumes.

        The state has the rows of the targets after an aggregate over edges, and all rows after a total.
        """
        op, requested = self.request
        result = view.aggregate(op, requested, self.steps)
        if self.on_result is not None:
            self.on_result(result)
        rows = {name: view.targets(values) for name, values in self.rows.items()} if op.over_edges else self.rows
        return BoundaryState(result=result, rows=rows, shared=self.shared, context=self.context)


@dataclass(frozen=True, kw_only=True)
class BoundaryState:
    """State with which a module resumes after a boundary."""

    result: Tensor
    """Result of the aggregate: rows [n, .], or [F] for a total."""
    rows: dict[str, Tensor]
    """Rows of the boundary; after an aggregate over edges, only the targets'."""
    shared: dict[str, Tensor]
    """Shared tensors of the boundary."""
    context: Any = None
    """Context of the boundary."""


class PhasedLayer(nn.Module):
    """Base class of layers that run in phases; `forward` runs all phases.

    `begin` runs from the input to the first boundary, and `resume` from a boundary to the next one or to the result.
    """

    def begin(self, view: View, x: Tensor) -> Boundary | Tensor:
        """Run up to the first boundary.

        Args:
            view: The graph.
            x: Rows [n, in_width].

        Returns:
            The boundary, or the result [n, out_width] if there is none.
        """
        raise NotImplementedError

    def resume(self, view: View, state: BoundaryState) -> Boundary | Tensor:
        """Run from a boundary to the next one.

        Args:
            view: The graph.
            state: State after the boundary.

        Returns:
            The next boundary, or the result [n, out_width].
        """
        raise NotImplementedError

    def forward(self, view: View, x: Tensor, steps: int = 1) -> Tensor:
        reached = self.begin(view, x)
        while isinstance(reached, Boundary):
            state = replace(reached, steps=steps).cross(view)
            del reached  # release the aggregated rows before the next phase
            reached = self.resume(view, state)
        return reached


class PhasedModel(nn.Module):
    """Base class of models that run in phases, with a view for each of their stages."""

    num_stages: int
    """Number of stages, each of which uses a view of its own."""
    row_dtype: torch.dtype | None = None
    """Type of the rows if it has lower precision than the parameters; None: the type of the parameters."""

    def begin(self, views: Sequence[View], x: Tensor) -> Boundary | Tensor:
        """Run up to the first boundary.

        Args:
            views: The view of each stage.
            x: Features [n, in_width].

        Returns:
            The boundary, or the logits [n, out_width] if there is none.
        """
        raise NotImplementedError

    def resume(self, views: Sequence[View], state: BoundaryState) -> Boundary | Tensor:
        """Run from a boundary to the next one.

        Args:
            views: The view of each stage.
            state: State after the boundary.

        Returns:
            The next boundary, or the logits [n, out_width].
        """
        raise NotImplementedError

    def forward(self, views: Sequence[View], x: Tensor) -> Tensor:
        reached = self.begin(views, x)
        while isinstance(reached, Boundary):
            state = reached.cross(views[reached.stage])
            del reached  # release the aggregated rows before the next phase
            reached = self.resume(views, state)
        return reached


def parameter_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating-point type of a model's parameters."""
    return next((parameter.dtype for parameter in model.parameters()), torch.float32)


def row_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating-point type of the rows that a model reads and computes."""
    return getattr(model, "row_dtype", None) or parameter_dtype(model)


def phases_of(module: nn.Module) -> PhasedLayer | PhasedModel | None:
    """Return the module if calling it only runs its phases; None if it has hooks or a custom `forward`."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    drivers = (PhasedLayer.forward, PhasedModel.forward)
    if isinstance(module, PhasedLayer | PhasedModel) and type(module).forward in drivers and not any(hooks):
        return module
    return None


def begin(module: nn.Module, views: Any, x: Tensor) -> Boundary | Tensor:
    """Run the first phase of any module; a module without phases is called.

    Args:
        module: A layer or a model.
        views: The view of a layer, or the views of a model.
        x: Input rows [n, .].
    """
    phased = phases_of(module)
    reached: Boundary | Tensor = module(views, x) if phased is None else phased.begin(views, x)
    return reached


def begin_layer(layer: nn.Module, view: View, x: Tensor) -> Boundary | Tensor:
    """Run the first phase of a layer; for a layer without phases, return a boundary that requests the whole layer.

    Args:
        layer: The layer.
        view: The graph.
        x: Input rows [n, in_width].
    """
    if phases_of(layer) is None:
        return Boundary(request=Request(WholeLayer(layer), {"x": x, "own": x}))
    return begin(layer, view, x)


def resume(module: nn.Module, views: Any, state: BoundaryState) -> Boundary | Tensor:
    """Run the next phase of any module; a module without phases returns the result of its boundary.

    Args:
        module: A layer or a model.
        views: The view of a layer, or the views of a model.
        state: State after the boundary.
    """
    phased = phases_of(module)
    return state.result if phased is None else phased.resume(views, state)
