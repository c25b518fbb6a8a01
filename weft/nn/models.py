"""Models as lists of stages, each of which gets one view, and the families that the command line knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from weft.core.config import Config
from weft.core.errors import InputError, unknown
from weft.data import UNTYPED, TypedShape
from weft.nn.activation import elu
from weft.nn.aggregate import Request, Total
from weft.nn.conv import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, mlp
from weft.nn.dense import Linear
from weft.nn.norm import BatchNorm, make_norm
from weft.nn.phases import Pause, Resumed, ask, go_on
from weft.nn.rgcn import OneHotRGCNConv, RGCNConv
from weft.nn.typed import TypedInput
from weft.nn.view import View

Activation = Callable[[Tensor], Tensor]


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


class Stack(nn.Module):
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

    def forward(self, views: Sequence[View], x: Tensor) -> Tensor:
        x = x if self.input is None else self.input(views[0])
        x = views[0].dropout(x, self.input_dropout if self.training else 0.0)
        for stage, layer in enumerate(self.layers[:-1]):
            y = self.norms[stage](views[stage], layer(views[stage], x))
            x = self._between(views[stage + 1], y, x[: len(y)])
        logits: Tensor = self.layers[-1](views[-1], x)
        return logits

    def pauses(self) -> list[tuple[int, str]]:
        """Where the rows' part waits: for the product of a stage, and for the statistics of a batch norm."""
        found = []
        for stage, layer in enumerate(self.layers):
            if not isinstance(layer, RowLayer):
                found.append((stage, "layer"))
            if self.training and stage < len(self.norms) and isinstance(self.norms[stage], BatchNorm):
                found += [(stage, "mean"), (stage, "var")]
        return found

    def resume(self, number: int, views: Sequence[View], x: Tensor, after: Resumed | None) -> Pause | Tensor:
        """Part `number` of the rows' part, see weft.nn.phases.Phased."""
        if after is None:
            x = x if self.input is None else self.input(views[0])
            return self._run(views, 0, views[0].dropout(x, self.input_dropout if self.training else 0.0))
        stage, kind = self.pauses()[number - 1]
        own = after.rows.get("own")
        if kind == "layer":
            y = go_on(self.layers[stage], views[stage], after.note, own, after.answer)
            return self._leave(views, stage, y, after.rows.get("x", y))
        norm, y, count = self.norms[stage], after.rows["y"], views[stage].num_vertices
        assert isinstance(norm, BatchNorm)
        if kind == "mean":
            mean = after.answer / count
            learn = lambda total: norm.learn(mean.detach(), total.detach() / count)  # noqa: E731
            request = Request(Total(), {"x": (y - mean).square()})
            return Pause(request=request, stage=stage, rows=after.rows, shared={"mean": mean}, learn=learn)
        y = norm.normalised(y, after.shared["mean"], after.answer / count)
        return self._run(views, stage + 1, self._between(views[stage + 1], y, after.rows.get("x", y)))

    def _run(self, views: Sequence[View], stage: int, x: Tensor) -> Pause | Tensor:
        """From the rows that a stage reads to the next pause."""
        layer, view = self.layers[stage], views[stage]
        if isinstance(layer, RowLayer):
            return self._leave(views, stage, layer(view, x), x)
        asked = ask(layer, view, x)
        rows = {} if asked.own is None else {"own": asked.own}
        if self.residual and stage < len(self.norms):
            rows["x"] = x
        return Pause(request=asked.request, stage=stage, rows=rows, note=asked.note)

    def _leave(self, views: Sequence[View], stage: int, y: Tensor, x: Tensor) -> Pause | Tensor:
        """From the rows y that a stage's layer makes of its own rows x."""
        if stage == len(self.layers) - 1:
            return y
        norm = self.norms[stage]
        if self.training and isinstance(norm, BatchNorm):
            rows = {"y": y, "x": x} if self.residual else {"y": y}
            return Pause(request=Request(Total(), {"x": y}), stage=stage, rows=rows)
        return self._run(views, stage + 1, self._between(views[stage + 1], norm(views[stage], y), x))

    def _between(self, view: View, y: Tensor, own: Tensor) -> Tensor:
        """The next layer's input under its view, from this layer's normalised result and its own rows."""
        p = self.dropout if self.training else 0.0
        if self.residual and own.shape == y.shape:
            return view.dropout(self.activation(y) + own, p)
        if self.activation is torch.relu:
            return view.dropout(y, p, relu=True)
        return view.dropout(self.activation(y), p)


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

    def resume(self, number: int, views: Sequence[View], x: Tensor, after: Resumed | None) -> Pause | Tensor:
        """Part `number` of the rows' part, see weft.nn.phases.Phased."""
        (view,), steps = views, self.updates.num_stages
        if number > len(self.updates.pauses()):
            assert after is not None
            return go_on(self.propagation, view, after.note, after.rows.get("own"), after.answer)
        reached = self.updates.resume(number, [view] * steps, x, after)
        if isinstance(reached, Pause):
            return replace(reached, stage=0)
        asked = ask(self.propagation, view, reached)
        rows = {} if asked.own is None else {"own": asked.own}
        return Pause(request=asked.request, stage=0, steps=steps, rows=rows, note=asked.note)


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
    edge_width: int = 0,
    bases: int = 0,
    blocks: int = 0,
    one_hot: bool = False,
    typed: TypedShape = UNTYPED,
) -> Stack | Decoupled:
    """A model from features [n, in_width] to logits [n, out_width]: `model` is gcn, sage, gin, gat, gatv2 or rgcn.

    `hidden` is the width of hidden rows, of all heads together for gat and gatv2, whose last layer averages its heads.
    edge_width: the features of an edge that their logits have a part for, 0 for none.
    typed: `graph.typed`, for rgcn, and for a graph without x, whose first rows are `hidden` wide; in_width is 0 then.
    """
    if model not in (*MODELS, *RELATIONAL):
        raise unknown("model", model, (*MODELS, *RELATIONAL))
    if model == "rgcn":
        check_relational(typed, hidden, decoupled=decoupled, bases=bases, blocks=blocks, one_hot=one_hot)
    elif bases or blocks or one_hot:
        raise InputError(f"--bases, --blocks and --one-hot are of rgcn: leave them out for {model}")
    attends = model in ATTENTION
    if edge_width and not attends:
        raise InputError(
            f"--edge-attention is of {' and '.join(ATTENTION)}, and {model} has no attention: leave it out"
        )
    if attends and hidden % heads:
        raise InputError(f"--hidden {hidden} is no multiple of --heads {heads}: give {heads * (hidden // heads + 1)}")
    last = layers - 1
    first_width = hidden
    if one_hot:
        width, bias = (hidden, norm != "batch") if last else (out_width, True)
        first = OneHotRGCNConv(width, num_relations=typed.num_relations, bases=bases, bias=bias)
        first_width = first.in_width
    stack = partial(
        Stack,
        dropout=dropout,
        input_dropout=input_dropout,
        norm=norm,
        residual=residual,
        activation=elu if attends else torch.relu,
        input=TypedInput(typed, first_width) if typed.has_input else None,
    )
    in_width = first_width if typed.has_input else in_width
    relational = partial(_relational, num_relations=typed.num_relations, bases=bases, blocks=blocks)
    conv = relational if model == "rgcn" else partial(_conv, model, heads=heads, edge_width=edge_width)
    last = layers - 1
    if not decoupled:
        widths = [in_width, *[hidden] * last, out_width]
        return stack(
            [
                first
                if one_hot and stage == 0
                else conv(a, b, last=stage == last, bias=stage == last or norm != "batch")
                for stage, (a, b) in enumerate(pairwise(widths))
            ]
        )
    widths = [in_width, *[hidden] * last, heads * out_width if attends else out_width]
    update = mlp if model == "gin" else Linear
    updates = stack(
        [
            RowLayer(update(a, b, bias=stage == last or norm != "batch"), b)
            for stage, (a, b) in enumerate(pairwise(widths))
        ]
    )
    return Decoupled(updates, conv(out_width, out_width, last=True, update=False))


def check_relational(
    typed: TypedShape, hidden: int, *, decoupled: bool, bases: int, blocks: int, one_hot: bool
) -> None:
    """InputError for what rgcn cannot be."""
    if not typed.num_relations:
        raise InputError("--model rgcn needs a graph with relations, and this one's edges have no types: take sage")
    if decoupled:
        raise InputError("--decoupled: rgcn maps each relation's rows by themselves, before their sum; leave it out")
    if one_hot and (typed.featured or not typed.num_embedded):
        raise InputError("--one-hot is for a graph whose vertices have no features: leave it out")
    if bases and blocks:
        raise InputError(f"--bases {bases} and --blocks {blocks}: give one of them")
    if blocks and hidden % blocks:
        raise InputError(
            f"--hidden {hidden} is no multiple of --blocks {blocks}: give {blocks * (hidden // blocks + 1)}"
        )


def _relational(
    in_width: int, out_width: int, *, last: bool, num_relations: int, bases: int, blocks: int, bias: bool
) -> nn.Module:
    del last
    blocks = 0 if blocks and (in_width % blocks or out_width % blocks) else blocks
    return RGCNConv(in_width, out_width, num_relations=num_relations, bases=bases, blocks=blocks, bias=bias)


def _conv(
    model: str,
    in_width: int,
    out_width: int,
    *,
    heads: int,
    edge_width: int,
    last: bool,
    update: bool = True,
    bias: bool = True,
) -> nn.Module:
    if model in ATTENTION:
        concat, kind = not last, ATTENTION[model]
        return kind(in_width, out_width, heads=heads, concat=concat, update=update, bias=bias, edge_width=edge_width)
    layer = {"gcn": GCNConv, "sage": SAGEConv, "gin": GINConv}[model]
    return layer(in_width, out_width, update=update, bias=bias)


ATTENTION = {"gat": GATConv, "gatv2": GATv2Conv}
MODELS = ("gcn", "sage", "gin", *ATTENTION)
RELATIONAL = ("rgcn",)
"""For graphs with typed edges."""
GCN = partial(make_model, "gcn")
SAGE = partial(make_model, "sage")
GIN = partial(make_model, "gin")
GAT = partial(make_model, "gat")
GATv2 = partial(make_model, "gatv2")
RGCN = partial(make_model, "rgcn")


def from_config(
    config: Config, in_width: int, out_width: int, edge_width: int = 0, typed: TypedShape = UNTYPED
) -> Stack | Decoupled:
    """The model that a configuration names, for a graph of these types.

    Its weights are drawn from the configuration's seed, and are of its dtype. edge_width: of the graph's edge features.
    InputError where the configuration asks for some and there are none.
    """
    if config.edge_attention and not edge_width:
        raise InputError("--edge-attention: the graph has no edge features; leave it out")
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
            edge_width=edge_width if config.edge_attention else 0,
            bases=config.bases,
            blocks=config.blocks,
            one_hot=config.one_hot,
            typed=typed,
        )
    return model.to(getattr(torch, config.dtype))
