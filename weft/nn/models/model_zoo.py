"""Models that the command line offers by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import ParamSpec

import torch
from torch import nn

from weft.config.config import ModelOptions
from weft.data import UNTYPED, TypedShape
from weft.nn.layers.activation import elu
from weft.nn.layers.conv import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, mlp
from weft.nn.layers.linear_transform import Linear
from weft.nn.layers.rgcn import OneHotRGCNConv, RGCNConv
from weft.nn.layers.stack import Decoupled, RowLayer, Stack
from weft.nn.layers.typed_input import TypedInput
from weft.nn.models.light_gcn import LightGCN
from weft.utils.dtypes import dtype_name, is_low_precision, sum_dtype
from weft.utils.errors import InputError, unknown

P = ParamSpec("P")
Model = Stack | Decoupled | LightGCN
"""Built-in model."""


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
) -> Model:
    """Return a model from features [n, in_width] to logits [n, out_width].

    Args:
        model: gcn, sage, gin, gat, gatv2, rgcn or lightgcn.
        in_width: Number of features of a vertex; 0 for a graph without x.
        out_width: Number of logits of a vertex.
        hidden: Width of hidden rows, over all heads.
        layers: Number of layers.
        heads: Number of attention heads of gat and gatv2, whose last layer averages its heads.
        decoupled: True for all updates first, then all propagations.
        dropout: Dropout probability between layers.
        input_dropout: Dropout probability of the features.
        norm: Normalization between layers: none, layer or batch.
        residual: True adds the input of a layer to its output, if both have the same width.
        edge_width: Number of edge features on which attention depends; 0: none.
        attention_dropout: Dropout probability of attention weights.
        bases: Number of basis matrices that all relations of rgcn share; 0: a matrix for each relation.
        blocks: Number of diagonal blocks of the matrices of rgcn; 0: full matrices.
        one_hot: True if matrices of rgcn's first layer have a row for each vertex.
        typed: `graph.typed`, for rgcn, and for a graph without x, whose first rows are `hidden` wide.

    Raises:
        InputError: Arguments do not fit together.
    """
    check_family(model, typed, hidden, decoupled=decoupled, bases=bases, blocks=blocks, one_hot=one_hot)
    check_attention(model, hidden, heads=heads, edge_width=edge_width, dropout=attention_dropout)
    if model in EMBEDDING_MODELS:
        check_embedding_model(model, typed, hidden, out_width)
        return LightGCN(typed, out_width, layers)
    attends, last, num_relations = model in ATTENTION, layers - 1, typed.num_relations
    biases = [*[norm != "batch"] * last, True]
    builders: dict[str, Callable[..., nn.Module]] = {
        **PLAIN,
        **{
            name: partial(layer_class, heads=heads, edge_width=edge_width, dropout=attention_dropout)
            for name, layer_class in ATTENTION.items()
        },
        "rgcn": partial(_relational, num_relations=num_relations, bases=bases, blocks=blocks),
    }
    hidden_layer = builders[model]
    last_layer = partial(hidden_layer, concat=False) if attends else hidden_layer
    in_width = hidden if typed.has_input else in_width
    modules: list[nn.Module] = []  # initial weights are drawn in the order in which layers are created
    if one_hot:
        width = hidden if last else out_width
        first = OneHotRGCNConv(width, num_relations=num_relations, bases=bases, bias=biases[0])
        modules, in_width = [first], first.in_width
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
    for (a, b), bias in shapes[len(modules) :]:
        modules.append((hidden_layer if len(modules) < last else last_layer)(a, b, bias=bias))
    return stack(modules)


def check_model_name(model: str) -> None:
    """Raise InputError if there is no model of this name."""
    if model not in MODEL_NAMES:
        raise unknown("model", model, MODEL_NAMES)


def check_family(
    model: str, typed: TypedShape, hidden: int, *, decoupled: bool, bases: int, blocks: int, one_hot: bool
) -> None:
    """Check the name of a model, and the options that only rgcn has.

    Args:
        model: Name of the model.
        typed: Types of the graph.
        hidden: Width of hidden rows.
        decoupled: See `make_model`, also for the following arguments.
        bases: Number of basis matrices.
        blocks: Number of diagonal blocks.
        one_hot: True if matrices of the first layer have a row for each vertex.

    Raises:
        InputError: The name is unknown, or options do not fit the model or the graph.
    """
    check_model_name(model)
    if model not in RELATIONAL:
        if bases or blocks or one_hot:
            raise InputError(f"--bases, --blocks and --one-hot only work with rgcn: leave them out for {model}")
        return
    if not typed.num_relations:
        raise InputError("--model rgcn needs a graph with relations, and this one's edges have no types: use sage")
    if decoupled:
        raise InputError("--decoupled does not work with rgcn, which transforms rows before it sums them: leave it out")
    if one_hot and (typed.featured or not typed.num_embedded):
        raise InputError("--one-hot needs a graph whose vertices have no features: leave it out")
    if bases and blocks:
        raise InputError(f"--bases {bases} and --blocks {blocks} exclude each other: give one of them")
    if blocks and hidden % blocks:
        raise InputError(
            f"--hidden {hidden} is not a multiple of --blocks {blocks}: use {blocks * (hidden // blocks + 1)}"
        )


def _relational(in_width: int, out_width: int, *, num_relations: int, bases: int, blocks: int, bias: bool) -> nn.Module:
    blocks = 0 if blocks and (in_width % blocks or out_width % blocks) else blocks
    return RGCNConv(in_width, out_width, num_relations=num_relations, bases=bases, blocks=blocks, bias=bias)


def check_embedding_model(model: str, typed: TypedShape, hidden: int, out_width: int) -> None:
    """Check that a model whose parameters are rows of vertices suits the graph and the task.

    Args:
        model: Name of the model.
        typed: Types of the graph.
        hidden: Width of hidden rows.
        out_width: Number of columns of the result.

    Raises:
        InputError: The graph has x, or the task needs another width.
    """
    if not typed.has_input:
        raise InputError(f"--model {model} trains a row for each vertex, but the graph has features: use gcn")
    if out_width != hidden:
        raise InputError(f"--model {model} has no layer that computes {out_width} logits: use --task link, or gcn")


def check_attention(model: str, hidden: int, *, heads: int, edge_width: int, dropout: float) -> None:
    """Check the options of attention.

    Args:
        model: Name of the model.
        hidden: Width of hidden rows.
        heads: Number of attention heads.
        edge_width: Number of edge features on which attention depends.
        dropout: Dropout probability of attention weights.

    Raises:
        InputError: `heads` does not divide `hidden`, or the model has no attention.
    """
    if model not in ATTENTION:
        for flag, value in (("--edge-attention", edge_width), ("--attention-dropout", dropout)):
            if value:
                raise InputError(
                    f"{flag} only works with {' and '.join(ATTENTION)}, and {model} has no attention: leave it out"
                )
    elif hidden % heads:
        raise InputError(f"--hidden {hidden} is not a multiple of --heads {heads}: use {heads * (hidden // heads + 1)}")


PLAIN = {"gcn": GCNConv, "sage": SAGEConv, "gin": GINConv}
"""Layers of the models without attention, by name of the model."""
ATTENTION = {"gat": GATConv, "gatv2": GATv2Conv}
"""Layers of the models with attention, by name of the model."""
MODELS = (*PLAIN, *ATTENTION)
"""Names of the models for any graph."""
RELATIONAL = ("rgcn",)
"""Names of the models for graphs with typed edges."""
EMBEDDING_MODELS = ("lightgcn",)
"""Names of the models that only train rows of vertices without features."""
MODEL_NAMES = (*MODELS, *RELATIONAL, *EMBEDDING_MODELS)
"""Names of all built-in models."""
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
"""Fields of `Config` that are arguments of `make_model`."""
FAMILY_DOC = """Return a model of such layers from features [n, in_width] to logits [n, out_width].

Args:
    in_width: Number of features of a vertex, graph.num_features; 0 for a graph without x.
    out_width: Number of logits of a vertex, for instance graph.num_classes.
    hidden: Width of hidden rows, over all heads.
    layers: Number of layers.
    heads: Number of attention heads, for GAT and GATv2; the last layer averages them.
    decoupled: True for all updates of rows first, then as many propagations: another model.
    dropout: Dropout probability between layers.
    input_dropout: Dropout probability of the features.
    norm: Normalization between layers: none, layer or batch.
    residual: True adds the input of a layer to its output, if both have the same width.
    edge_width: Number of edge features on which attention depends, graph.num_edge_features; 0: none.
    attention_dropout: Dropout probability of attention weights.
    bases: Number of basis matrices that all relations share, for RGCN; 0: a matrix for each relation.
    blocks: Number of diagonal blocks of each relation's matrix, for RGCN; 0: full matrices.
    one_hot: True if RGCN's first layer has a row for each vertex; for vertices without features.
    typed: graph.typed, for a graph with relations or without x.

Raises:
    InputError: Arguments do not fit together.
"""
OF_ATTENTION = ("heads", "edge_width", "attention_dropout")
"""Options that only models with attention have."""
OF_RELATIONS = ("bases", "blocks", "one_hot")
"""Options that only models for relations have."""


def define_family(name: str, make: Callable[P, Model], layer: type) -> Callable[P, Model]:
    """Return `make` as a function with a name, signature and docstring of its own, for `help`.

    Args:
        name: Name of the function.
        make: Function that returns the model.
        layer: Class of the model's layers, whose docstring has the formula.

    Returns:
        The function. Its signature leaves out the options that the model does not have.
    """

    def build(*args: P.args, **options: P.kwargs) -> Model:
        return make(*args, **options)

    kind, formula = name.lower(), str(layer.__doc__).splitlines()[0]
    others = (*(() if kind in ATTENTION else OF_ATTENTION), *(() if kind in RELATIONAL else OF_RELATIONS))
    signature = inspect.signature(make, eval_str=True)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in others]
    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"{formula}\n\n{FAMILY_DOC}"
    build.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return build


GCN = define_family("GCN", partial(make_model, "gcn"), GCNConv)
SAGE = define_family("SAGE", partial(make_model, "sage"), SAGEConv)
GIN = define_family("GIN", partial(make_model, "gin"), GINConv)
GAT = define_family("GAT", partial(make_model, "gat"), GATConv)
GATv2 = define_family("GATv2", partial(make_model, "gatv2"), GATv2Conv)
RGCN = define_family("RGCN", partial(make_model, "rgcn"), RGCNConv)


def from_options(
    options: ModelOptions,
    in_width: int,
    out_width: int,
    *,
    seed: int,
    dtype: torch.dtype,
    edge_width: int = 0,
    typed: TypedShape = UNTYPED,
) -> Model:
    """Return the built-in model that options describe.

    Args:
        options: The options.
        in_width: Number of features of a vertex.
        out_width: Number of logits of a vertex.
        seed: Seed of the initial weights.
        dtype: Type of the rows. If it is one of low precision, the parameters have another one.
        edge_width: Number of edge features of the graph.
        typed: Types of the graph.

    Raises:
        InputError: The model needs edge features that the graph does not have, or the options do not fit.
    """
    if options.edge_attention and not edge_width:
        raise InputError("--edge-attention: the graph has no edge features: leave it out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(
            options.model,
            in_width,
            out_width,
            edge_width=edge_width if options.edge_attention else 0,
            typed=typed,
            **{name: getattr(options, name) for name in FAMILY_OPTIONS if name != "edge_attention"},
        )
    if is_low_precision(dtype):
        check_low_precision_rows(options, dtype, typed)
        model.row_dtype = dtype
    return model.to(sum_dtype(dtype))


def check_low_precision_rows(options: ModelOptions, dtype: torch.dtype, typed: TypedShape) -> None:
    """Check that a model can store rows in lower precision than its parameters.

    Args:
        options: The options that describe the model.
        dtype: Type of the rows.
        typed: Types of the graph.

    Raises:
        InputError: The model supports only float32, or trains embeddings.
    """
    flag, remedy = f"--dtype {dtype_name(dtype)}", "leave it out"
    if options.model not in (*PLAIN, "gat"):
        raise InputError(
            f"{flag} only works with {', '.join((*PLAIN, 'gat'))}, and {options.model} computes in float32: {remedy}"
        )
    if options.edge_attention:
        raise InputError(f"{flag}: attention by edge features computes in float32: {remedy}, or --edge-attention")
    if typed.has_input:
        raise InputError(
            f"{flag}: the model trains embeddings, because vertices have no features of one width: {remedy}"
        )
