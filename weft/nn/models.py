"""Models as lists of stages, each of which gets one view, and the families that the command line knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from weft.core.config import Config
from weft.core.errors import InputError, unknown
from weft.nn.conv import GATConv, GCNConv, GINConv, SAGEConv, mlp
from weft.nn.norm import make_norm
from weft.nn.view import View

Activation = Callable[[Tensor], Tensor]


class RowLayer(nn.Module):
    """A layer that maps each row by itself, such as nn.Linear, in a place where a view is handed over."""

    def __init__(self, update: nn.Module, out_width: int) -> None:
        super().__init__()
        self.update, self.out_width = update, out_width

    def forward(self, _view: View, x: Tensor) -> Tensor:
        y: Tensor = self.update(x)
        return y


class Stack(nn.Module):
    """Layers in a row; between two of them normalisation, activation, the residual and keyed dropout.

    A layer is called as `layer(view, x)` and names its `out_width`.
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
    ) -> None:
        super().__init__()
        self.num_stages = len(layers)
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(make_norm(norm, cast(int, layer.out_width)) for layer in layers[:-1])
        self.dropout, self.input_dropout = dropout, input_dropout
        self.residual, self.activation = residual, activation

    def forward(self, views: Sequence[View], x: Tensor) -> Tensor:
        for stage, (view, layer) in enumerate(zip(views, self.layers, strict=True)):
            if self.training:
                x = view.dropout(x, self.dropout if stage else self.input_dropout)
            y = layer(view, x)
            if stage + 1 < self.num_stages:
                y = self.activation(self.norms[stage](view, y))
                own = view.targets(x)
                if self.residual and own.shape == y.shape:
                    y = y + own
            x = y
        return x


class Decoupled(nn.Module):
    """L updates of every row, then L propagations of the result (NeutronTP, section 4.1, eq. 7-9).

    One split and one gather forward, whatever L. With attention, the weights are computed once, after the updates.
    """

    num_stages = 1

    def __init__(self, updates: Stack, propagation: nn.Module) -> None:
        super().__init__()
        self.updates, self.propagation = updates, propagation

    def forward(self, views: Sequence[View], x: Tensor) -> Tensor:
        (view,) = views
        steps = self.updates.num_stages
        y: Tensor = self.propagation(view, self.updates([view] * steps, x), steps)
        return y


def make_model(
    model: str,
    in_width: int,
    out_width: int,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    decoupled: bool = False,
    dropout: float = 0.5,
    input_dropout: float = 0.0,
    norm: str = "none",
    residual: bool = False,
) -> Stack | Decoupled:
    """A model from features [n, in_width] to logits [n, out_width]: `model` is gcn, sage, gin or gat.

    `hidden` is the width of hidden rows, of all heads together for gat, whose last layer averages its heads.
    """
    if model not in MODELS:
        raise unknown("model", model, MODELS)
    if model == "gat" and hidden % heads:
        raise InputError(f"--hidden {hidden} is no multiple of --heads {heads}: give {heads * (hidden // heads + 1)}")
    stack = partial(
        Stack,
        dropout=dropout,
        input_dropout=input_dropout,
        norm=norm,
        residual=residual,
        activation=nn.functional.elu if model == "gat" else torch.relu,
    )
    last = layers - 1
    if not decoupled:
        widths = [in_width, *[hidden] * last, out_width]
        return stack(
            [
                _conv(model, a, b, heads, last=stage == last, bias=stage == last or norm != "batch")
                for stage, (a, b) in enumerate(pairwise(widths))
            ]
        )
    widths = [in_width, *[hidden] * last, heads * out_width if model == "gat" else out_width]
    update = mlp if model == "gin" else nn.Linear
    updates = stack(
        [
            RowLayer(update(a, b, bias=stage == last or norm != "batch"), b)
            for stage, (a, b) in enumerate(pairwise(widths))
        ]
    )
    return Decoupled(updates, _conv(model, out_width, out_width, heads, last=True, update=False))


def _conv(
    model: str, in_width: int, out_width: int, heads: int, *, last: bool, update: bool = True, bias: bool = True
) -> nn.Module:
    if model == "gat":
        return GATConv(in_width, out_width, heads=heads, concat=not last, update=update, bias=bias)
    layer = {"gcn": GCNConv, "sage": SAGEConv, "gin": GINConv}[model]
    return layer(in_width, out_width, update=update, bias=bias)


MODELS = ("gcn", "sage", "gin", "gat")
GCN = partial(make_model, "gcn")
SAGE = partial(make_model, "sage")
GIN = partial(make_model, "gin")
GAT = partial(make_model, "gat")


def from_config(config: Config, in_width: int, out_width: int) -> Stack | Decoupled:
    """The model that a configuration names, its weights drawn from the configuration's seed, in its dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = make_model(
            config.model,
            in_width,
            out_width,
            hidden=config.hidden,
            layers=config.layers,
            heads=config.heads,
            decoupled=config.decoupled,
            dropout=config.dropout,
            input_dropout=config.input_dropout,
            norm=config.norm,
            residual=config.residual,
        )
    return model.to(getattr(torch, config.dtype))
