"""Models as layers in a row, each with the view of its stage."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.nn.layers.linear_transform import Linear
from weft.nn.layers.norm import make_norm
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel, begin, begin_layer, phases_of, resume
from weft.nn.layers.typed_input import TypedInput
from weft.nn.view import View

Activation = Callable[[Tensor], Tensor]

PYG_NAME = re.compile(r"\.(lin|lin_l|lin_r|att|att_src|nn)(\.|$)")
"""What parameters of PyG's convolutions are called, behind the name of their module."""


class RowLayer(nn.Module):
    """A layer that maps each row by itself, such as nn.Linear, in a place where a view is handed over."""

    def __init__(self, update: nn.Module, out_width: int) -> None:
        super().__init__()
        self.update, self.out_width = update, out_width

    def forward(self, view: View, x: Tensor) -> Tensor:
        if isinstance(self.update, Linear):
            return view.linear(x, self.update.weight.t(), self.update.bias)
        y: Tensor = self.update(x)
        return y


class Stack(PhasedModel):
    """Layers in a row; between two of them normalisation, activation, the residual and keyed dropout.

    A layer is called as `layer(view, x)` and names its `out_width`. input: makes the first rows of a graph without x.
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
        self.norms = nn.ModuleList(make_norm(norm, cast(int, layer.out_width)) for layer in layers[:-1])
        self.dropout, self.input_dropout = dropout, input_dropout
        self.residual, self.activation = residual, activation

    @property
    def num_layers(self) -> int:
        """Its layers."""
        return len(self.layers)

    @property
    def is_plain(self) -> bool:
        """Whether its layers, and what is between them, are all that it does: not with phases or hooks of its own."""
        own = (type(self).begin, type(self).resume) != (Stack.begin, Stack.resume)
        return not own and phases_of(self) is not None

    def up_to(self, layers: int) -> Stack:
        """The first so many layers, which it shares: its rows are theirs, before what follows the last of them."""
        made = Stack(
            list(self.layers)[:layers],
            dropout=self.dropout,
            input_dropout=self.input_dropout,
            residual=self.residual,
            activation=self.activation,
            input=self.input,
        )
        made.norms, made.row_dtype = self.norms[: layers - 1], self.row_dtype
        return made

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *told: Any) -> None:
        """torch's, with an error more where all tensors are of PyG's layers."""
        super()._load_from_state_dict(state_dict, prefix, *told)
        known = {f"{prefix}{name}" for name in self.state_dict()}
        if known.isdisjoint(state_dict) and any(map(PYG_NAME.search, state_dict)):
            told[-1].append(
                "these are tensors of a PyG model: load them into that, and give it to weft.train or weft.nn.convert"
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
        """From what the module at a position has reached to the next boundary, or to the logits.

        position: 2 s for the layer of stage s, 2 s + 1 for the norm behind it. x: what that layer has read, where it is
        at hand.
        """
        stage, in_norm = divmod(position, 2)
        while isinstance(reached, Tensor) and stage < len(self.norms):
            if in_norm:
                reached = x = self._between(views[stage + 1], reached, x)
            position += 1
            stage, in_norm = divmod(position, 2)
            reached = self._begin(views[stage], position, reached)
        if isinstance(reached, Tensor):
            return reached
        adds = self.residual and stage < len(self.norms)
        kept = {"residual": x} if adds and x is not None and x.shape[1] == self.layers[stage].out_width else {}
        return replace(reached, stage=stage, rows={**reached.rows, **kept}, context=(position, reached.context))

    def _begin(self, view: View, position: int, x: Tensor) -> Boundary | Tensor:
        """The first phase of the module at a position."""
        stage, in_norm = divmod(position, 2)
        if in_norm:
            return begin(self.norms[stage], view, x)
        layer = self.layers[stage]
        return begin(layer, view, x) if isinstance(layer, RowLayer) else begin_layer(layer, view, x)

    def _between(self, view: View, y: Tensor, x: Tensor | None) -> Tensor:
        """The next layer's input under its view, from this layer's normalised result and what it has read."""
        p = self.dropout if self.training else 0.0
        if self.residual and x is not None and x.shape == y.shape:
            return view.dropout(self.activation(y) + x, p)
        if self.activation is torch.relu:
            return view.dropout(y, p, relu=True)
        return view.dropout(self.activation(y), p)


class Decoupled(PhasedModel):
    """L updates of every row, then L propagations of the result (NeutronTP, section 4.1, eq. 7-9).

    One split and one gather forward, whatever L. With attention, the weights are computed once, after the updates.
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
        """From what the updates or the propagation have reached to the next boundary, or to the logits."""
        if isinstance(reached, Tensor) and not propagating:
            propagating, reached = True, begin_layer(self.propagation, views[0], reached)
        if isinstance(reached, Tensor):
            return reached
        steps = self.updates.num_stages if propagating else 1
        return replace(reached, stage=0, steps=steps, context=(propagating, reached.context))
