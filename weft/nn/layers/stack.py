"""Models as sequences of layers, with a view for each layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.nn.layers.linear_transform import Linear
from weft.nn.layers.norm import make_norm
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel, begin, begin_layer, phases_of, resume
from weft.nn.layers.typed_input import TypedInput
from weft.nn.view import View
from weft.utils.errors import InputError

Activation = Callable[[Tensor], Tensor]
"""Function that is applied to each element of a tensor."""

PYG_NAME = re.compile(r"\.(lin|lin_l|lin_r|att|att_src|nn)(\.|$)")
"""Pattern of the parameter names of PyG's convolutions, after the name of their module."""


class RowLayer(nn.Module):
    """Adapter for a module that computes each row by itself, such as nn.Linear, as a layer that is called with a view.

    Args:
        update: The module, from rows [n, in_width] to rows [n, out_width].
        out_width: Number of columns of its result.
    """

    def __init__(self, update: nn.Module, out_width: int) -> None:
        super().__init__()
        self.update, self.out_width = update, out_width

    def forward(self, view: View, x: Tensor) -> Tensor:
        if isinstance(self.update, Linear):
            return view.linear(x, self.update.weight.t(), self.update.bias)
        y: Tensor = self.update(x)
        return y


class Stack(PhasedModel):
    """Sequence of layers; between two of them normalization, activation, residual connection and keyed dropout.

    Args:
        layers: The layers, called as `layer(view, x)`; each has an attribute `out_width`.
        dropout: Dropout probability between layers.
        input_dropout: Dropout probability of the features.
        norm: Normalization between layers: 'none', 'layer' or 'batch'.
        residual: True adds the input of a layer to its activated output, if both have the same width.
        activation: Activation between layers.
        input: Computes the first rows, for a graph without x.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
        norm: str = "none",
        residual: bool = False,
        activation: Activation = torch.relu,
        input: TypedInput | None = None,
    ) -> None:
        super().__init__()
        self.num_stages = len(layers)
        self.input = input
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(make_norm(norm, width_of(number, layer)) for number, layer in enumerate(layers[:-1]))
        self.dropout, self.input_dropout = dropout, input_dropout
        self.residual, self.activation = residual, activation

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def is_plain(self) -> bool:
        """True if the stack has no hooks, and neither `begin`, `resume` nor `forward` is overridden."""
        overrides = (type(self).begin, type(self).resume) != (Stack.begin, Stack.resume)
        return not overrides and phases_of(self) is not None

    def up_to(self, layers: int) -> Stack:
        """Return a model that shares the first `layers` layers and returns the output of the last of them.

        That output is before normalization and activation.
        """
        result = Stack(
            list(self.layers)[:layers],
            dropout=self.dropout,
            input_dropout=self.input_dropout,
            residual=self.residual,
            activation=self.activation,
            input=self.input,
        )
        result.norms, result.row_dtype = self.norms[: layers - 1], self.row_dtype
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as PyTorch does, with a further error if the tensors are those of a PyG model."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        names = {f"{prefix}{name}" for name in self.state_dict()}
        if names.isdisjoint(state_dict) and any(map(PYG_NAME.search, state_dict)):
            args[-1].append(
                "these are tensors of a PyG model: load them into that model, and give the model to weft.train or "
                "weft.nn.convert"
            )

    def begin(self, views: Sequence[View], x: Tensor) -> Boundary | Tensor:
        x = x if self.input is None else self.input(views[0])
        x = views[0].dropout(x, self.input_dropout if self.training else 0.0)
        return self._advance(views, 0, self._begin(views[0], 0, x), x)

    def resume(self, views: Sequence[View], state: BoundaryState) -> Boundary | Tensor:
        position, context = state.context
        stage, in_norm = divmod(position, 2)
        module = (self.norms if in_norm else self.layers)[stage]
        inner, x = replace(state, context=context), state.rows.get("residual")
        return self._advance(views, position, resume(module, views[stage], inner), x)

    def _advance(
        self, views: Sequence[View], position: int, reached: Boundary | Tensor, x: Tensor | None
    ) -> Boundary | Tensor:
        """Run on to the next boundary, or to the logits.

        Args:
            views: The view of each stage.
            position: Module that has run: 2 s for the layer of stage s, 2 s + 1 for the norm after it.
            reached: Boundary or result of that module.
            x: Input of the layer of this stage, for the residual connection, if it is known.
        """
        stage, in_norm = divmod(position, 2)
        # 1. As long as modules return rows, run the next one: the norm of this stage, or the layer of the next.
        # 2. Return a boundary with this model's state added: its position, and the input of a layer with a residual.
        while isinstance(reached, Tensor) and stage < len(self.norms):
            if in_norm:
                reached = x = self._between(views[stage + 1], reached, x)
            position += 1
            stage, in_norm = divmod(position, 2)
            reached = self._begin(views[stage], position, reached)
        if isinstance(reached, Tensor):
            return reached
        adds = self.residual and stage < len(self.norms)
        residual = {"residual": x} if adds and x is not None and x.shape[1] == self.layers[stage].out_width else {}
        return replace(reached, stage=stage, rows={**reached.rows, **residual}, context=(position, reached.context))

    def _begin(self, view: View, position: int, x: Tensor) -> Boundary | Tensor:
        """Run the first phase of the module at a position."""
        stage, in_norm = divmod(position, 2)
        if in_norm:
            return begin(self.norms[stage], view, x)
        layer = self.layers[stage]
        return begin(layer, view, x) if isinstance(layer, RowLayer) else begin_layer(layer, view, x)

    def _between(self, view: View, y: Tensor, x: Tensor | None) -> Tensor:
        """Return the next layer's input, from the normalized result y and the input x of this layer."""
        p = self.dropout if self.training else 0.0
        if self.residual and x is not None and x.shape == y.shape:
            return view.dropout(self.activation(y) + x, p)
        if self.activation is torch.relu:
            return view.dropout(y, p, relu=True)
        return view.dropout(self.activation(y), p)


def width_of(number: int, layer: nn.Module) -> int:
    """Return the number of columns of a layer's result.

    Args:
        number: Number of the layer in its stack, from 0.
        layer: The layer.

    Raises:
        InputError: The layer does not state it.
    """
    if (width := getattr(layer, "out_width", None)) is None:
        raise InputError(
            f"weft.nn.Stack: {type(layer).__name__} (layer {number + 1}) has no attribute out_width: set it to the "
            "number of columns of its result; for a convolution of PyG, use weft.nn.PyGConv"
        )
    return int(width)


class Decoupled(PhasedModel):
    """Decoupled model: L updates of every row, then L propagations of the result (NeutronTP, section 4.1, eqs. 7-9).

    Under `tensor`, it needs one split and one gather forward, whatever L is. Attention weights are computed once, after
    the updates.

    Args:
        updates: The L updates, a stack of row layers.
        propagation: Layer without a linear transform, which is applied L times.
    """

    num_stages = 1

    def __init__(self, updates: Stack, propagation: nn.Module) -> None:
        super().__init__()
        self.updates, self.propagation = updates, propagation

    def begin(self, views: Sequence[View], x: Tensor) -> Boundary | Tensor:
        return self._advance(views, False, begin(self.updates, self._update_views(views), x))

    def resume(self, views: Sequence[View], state: BoundaryState) -> Boundary | Tensor:
        propagating, context = state.context
        inner = replace(state, context=context)
        if propagating:
            return self._advance(views, True, resume(self.propagation, views[0], inner))
        return self._advance(views, False, self.updates.resume(self._update_views(views), inner))

    def _update_views(self, views: Sequence[View]) -> list[View]:
        (view,) = views
        return [view] * self.updates.num_stages

    def _advance(self, views: Sequence[View], propagating: bool, reached: Boundary | Tensor) -> Boundary | Tensor:
        """Run on to the next boundary, or to the logits.

        Args:
            views: The view of the only stage.
            propagating: True if the propagation has begun.
            reached: Boundary or result of the updates or of the propagation.
        """
        if isinstance(reached, Tensor) and not propagating:
            propagating, reached = True, begin_layer(self.propagation, views[0], reached)
        if isinstance(reached, Tensor):
            return reached
        steps = self.updates.num_stages if propagating else 1
        return replace(reached, stage=0, steps=steps, context=(propagating, reached.context))
