"""The families of models that the command line knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import ParamSpec

import torch
from torch import nn

from weft.config.config import Config
from weft.data import UNTYPED, TypedShape
from weft.nn.layers.activation import elu
from weft.nn.layers.conv import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, mlp
from weft.nn.layers.linear_transform import Linear
from weft.nn.layers.rgcn import OneHotRGCNConv, RGCNConv
from weft.nn.layers.stack import Decoupled, RowLayer, Stack
from weft.nn.layers.typed_input import TypedInput
from weft.utils.dtypes import is_low_precision, sum_dtype
from weft.utils.errors import InputError, unknown

P = ParamSpec("P")


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
    attention_dropout: float = 0.0,
    bases: int = 0,
    blocks: int = 0,
    one_hot: bool = False,
    typed: TypedShape = UNTYPED,
) -> Stack | Decoupled:
    """A model from features [n, in_width] to logits [n, out_width]: `model` is gcn, sage, gin, gat, gatv2 or rgcn.

    `hidden` is the width of hidden rows, of all heads together for gat and gatv2, whose last layer averages its heads.
    edge_width: the features of an edge that their logits have a part for, 0 for none. attention_dropout: of what their
    edges weigh, in training.
    typed: `graph.typed`, for rgcn, and for a graph without x, whose first rows are `hidden` wide; in_width is 0 then.
    """
    check_family(model, typed, hidden, decoupled=decoupled, bases=bases, blocks=blocks, one_hot=one_hot)
    check_attention(model, hidden, heads=heads, edge_width=edge_width, dropout=attention_dropout)
    attends, last, num_relations = model in ATTENTION, layers - 1, typed.num_relations
    biases = [*[norm != "batch"] * last, True]
    builders: dict[str, Callable[..., nn.Module]] = {
        **PLAIN,
        **{
            name: partial(kind, heads=heads, edge_width=edge_width, dropout=attention_dropout)
            for name, kind in ATTENTION.items()
        },
        "rgcn": partial(_relational, num_relations=num_relations, bases=bases, blocks=blocks),
    }
    hidden_layer = builders[model]
    last_layer = partial(hidden_layer, concat=False) if attends else hidden_layer
    in_width = hidden if typed.has_input else in_width
    made: list[nn.Module] = []  # parameters are drawn in the order in which layers are made
    if one_hot:
        width = hidden if last else out_width
        first = OneHotRGCNConv(width, num_relations=num_relations, bases=bases, bias=biases[0])
        made, in_width = [first], first.in_width
    stack = partial(
        Stack,
        dropout=dropout,
        input_dropout=input_dropout,
        norm=norm,
        residual=residual,
        activation=elu if attends else torch.relu,
        input=TypedInput(typed, in_width) if typed.has_input else None,
    )
    widths = [in_width, *[hidden] * last, heads * out_width if attends and decoupled else out_width]
    shapes = [*zip(pairwise(widths), biases, strict=True)]
    if decoupled:
        update = mlp if model == "gin" else Linear
        updates = stack([RowLayer(update(a, b, bias=bias), b) for (a, b), bias in shapes])
        return Decoupled(updates, last_layer(out_width, out_width, update=False))
    for (a, b), bias in shapes[len(made) :]:
        made.append((hidden_layer if len(made) < last else last_layer)(a, b, bias=bias))
    return stack(made)


def check_model_name(model: str) -> None:
    """InputError for a model that there is none of."""
    if model not in (*MODELS, *RELATIONAL):
        raise unknown("model", model, (*MODELS, *RELATIONAL))


def check_family(
    model: str, typed: TypedShape, hidden: int, *, decoupled: bool, bases: int, blocks: int, one_hot: bool
) -> None:
    """InputError for a model that there is none of, for what rgcn cannot be, and for others with its options."""
    check_model_name(model)
    if model not in RELATIONAL:
        if bases or blocks or one_hot:
            raise InputError(f"--bases, --blocks and --one-hot are of rgcn: leave them out for {model}")
        return
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


def _relational(in_width: int, out_width: int, *, num_relations: int, bases: int, blocks: int, bias: bool) -> nn.Module:
    blocks = 0 if blocks and (in_width % blocks or out_width % blocks) else blocks
    return RGCNConv(in_width, out_width, num_relations=num_relations, bases=bases, blocks=blocks, bias=bias)


def check_attention(model: str, hidden: int, *, heads: int, edge_width: int, dropout: float) -> None:
    """InputError for heads that do not fit, and for options of attention where nothing attends."""
    if model not in ATTENTION:
        for flag, given in (("--edge-attention", edge_width), ("--attention-dropout", dropout)):
            if given:
                raise InputError(f"{flag} is of {' and '.join(ATTENTION)}, and {model} has no attention: leave it out")
    elif hidden % heads:
        raise InputError(f"--hidden {hidden} is no multiple of --heads {heads}: give {heads * (hidden // heads + 1)}")


PLAIN = {"gcn": GCNConv, "sage": SAGEConv, "gin": GINConv}
ATTENTION = {"gat": GATConv, "gatv2": GATv2Conv}
MODELS = (*PLAIN, *ATTENTION)
RELATIONAL = ("rgcn",)
"""For graphs with typed edges."""
FAMILY_OPTIONS = (
    "decoupled",
    "layers",
    "hidden",
    "heads",
    "edge_attention",
    "attention_dropout",
    "bases",
    "blocks",
    "one_hot",
    "dropout",
    "input_dropout",
    "norm",
    "residual",
)
"""Fields of a configuration that say how a model of a family is made."""
ABOUT = """A model of such layers from features [n, in_width] to logits [n, out_width], with dropout and norm between.

in_width, out_width: graph.num_features, graph.num_classes. hidden: the width of rows between layers, of all heads
together. norm: none, layer or batch. residual: adds a layer's input to what it gives, where they are of one width.
decoupled: all maps of rows first, then as many propagations. edge_width: graph.num_edge_features, if they are to take
part in attention; attention_dropout: of what edges weigh. bases, blocks: how matrices of relations are made; one_hot:
they have a row for each vertex. typed: graph.typed, of a graph with relations or without x; in_width is 0 without x.
InputError for what does not fit together.
"""
OF_ATTENTION = ("heads", "edge_width", "attention_dropout")
OF_RELATIONS = ("bases", "blocks", "one_hot")


def family(name: str, make: Callable[P, Stack | Decoupled], layer: type) -> Callable[P, Stack | Decoupled]:
    """`make` as a function whose name, signature and docstring `help` shows; without options that are of others."""

    def made(*args: P.args, **options: P.kwargs) -> Stack | Decoupled:
        return make(*args, **options)

    kind, about = name.lower(), str(layer.__doc__).splitlines()[0]
    others = (*(() if kind in ATTENTION else OF_ATTENTION), *(() if kind in RELATIONAL else OF_RELATIONS))
    signature = inspect.signature(make, eval_str=True)
    shown = [one for one in signature.parameters.values() if one.name not in others]
    made.__name__ = made.__qualname__ = name
    made.__doc__ = f"{about}\n\n{ABOUT}"
    made.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return made


GCN = family("GCN", partial(make_model, "gcn"), GCNConv)
SAGE = family("SAGE", partial(make_model, "sage"), SAGEConv)
GIN = family("GIN", partial(make_model, "gin"), GINConv)
GAT = family("GAT", partial(make_model, "gat"), GATConv)
GATv2 = family("GATv2", partial(make_model, "gatv2"), GATv2Conv)
RGCN = family("RGCN", partial(make_model, "rgcn"), RGCNConv)


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
            edge_width=edge_width if config.edge_attention else 0,
            typed=typed,
            **{name: getattr(config, name) for name in FAMILY_OPTIONS if name != "edge_attention"},
        )
    dtype = getattr(torch, config.dtype)
    if is_low_precision(dtype):
        check_low_precision_rows(config, typed)
        model.row_dtype = dtype
    return model.to(sum_dtype(dtype))


def check_low_precision_rows(config: Config, typed: TypedShape) -> None:
    """InputError for a model whose rows cannot be narrower than its parameters."""
    given, remedy = f"--dtype {config.dtype}", "leave it out"
    if config.model not in (*PLAIN, "gat"):
        raise InputError(
            f"{given} is of {', '.join((*PLAIN, 'gat'))}, and {config.model} sums in float32 alone: {remedy}"
        )
    if config.edge_attention:
        raise InputError(f"{given}: attention by edge features is in float32 alone: {remedy}, or --edge-attention")
    if typed.has_input:
        raise InputError(f"{given}: the graph's vertices have no features of one width, but learned rows: {remedy}")
