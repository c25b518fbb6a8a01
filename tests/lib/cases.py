"""Graphs and models that strategies are tested on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

import examples.broadcast  # noqa: F401  # a custom strategy, which registers itself
from tests.lib.graphs import (
    NUM_CLASSES,
    NUM_FEATURES,
    NUM_FEATURES_SPARSE,
    make_graph,
    make_named_relations,
    make_typed_graph,
    with_few_labels,
)
from weft.cost import Machine
from weft.data import Graph, GraphShape, reorder
from weft.nn import MODELS, Linear, Stack, View, convert, from_pyg, make_model
from weft.nn.layers.conv import mlp
from weft.strategies import STRATEGIES, ResidentPlan

EXACT = [name for name, plan in STRATEGIES.items() if plan.exact and name != "single"]
RESIDENT = [name for name in EXACT if issubclass(STRATEGIES[name], ResidentPlan)]
"""Strategies whose rows stay on the device."""
EXAMPLE_STRATEGIES = [name for name in RESIDENT if not STRATEGIES[name].__module__.startswith("weft.")]
"""Strategies of the examples."""
MACHINE = Machine(seconds_per_flop=1e-10, seconds_per_edge=1e-9, seconds_per_byte=8e-10)
"""Prices with which hybrid caches some of the sources and fetches others."""


OPTIONS = (
    "decoupled",
    "norm",
    "residual",
    "input_dropout",
    "edge_attention",
    "attention_dropout",
    "frozen",
    "bases",
    "blocks",
    "one_hot",
    "without",
)
GRAPH_KINDS = ("weighted", "edge_features", "multilabel", "sparse", "order", "labels", "typed")
"""Fields of a case that describe its graph; `OPTIONS` are those of the model and its training."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph and a model, whose sizes no number of ranks divides."""

    model: str
    decoupled: bool = False
    num_vertices: int = 23
    hidden: int = 9
    heads: int = 3
    layers: int = 3
    norm: str = "none"
    residual: bool = False
    dropout: float = 0.4
    input_dropout: float = 0.0
    weighted: bool = False
    edge_features: int = 0
    edge_attention: bool = False
    attention_dropout: float = 0.0
    multilabel: bool = False
    without: str = ""
    frozen: bool = False
    sparse: bool = False
    order: str = "none"
    bases: int = 0
    blocks: int = 0
    one_hot: bool = False
    labels: int = 0
    """Number of training vertices, and of validation vertices; 0: two of three vertices train, the others validate."""
    scored: int = 0
    """Number of validation vertices, if it is not that of training vertices."""
    typed: str = ""
    """Kind of features in a typed graph, see make_typed_graph; '' for a graph without types."""

    @cached_property
    def id(self) -> str:
        """The model and the values that differ from the defaults, as part of a test's name."""
        words = [self.model]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "model" or value == field.default:
                continue
            joint = "_" if isinstance(value, str) else ""
            words.append(field.name if value is True else f"{field.name}{joint}{value}".replace(",", "+"))
        return "-".join(words)

    @property
    def family(self) -> str:
        """The model without its variant: `pyg-gat-dropout` is `pyg-gat`."""
        words = self.model.split("-")
        return "-".join(words[:2]) if words[0] == "pyg" and words[1] != "to" else self.model

    @property
    def options(self) -> list[str]:
        """Options of the model and its training that differ from the defaults."""
        words = self._set(OPTIONS)
        if self.model != self.family:
            words.append(self.model.removeprefix(self.family))
        return [*words, "narrow"] if self.hidden < 4 else words

    @property
    def graph_kinds(self) -> list[str]:
        """Properties of the graph that differ from the default graph's."""
        kinds = self._set(GRAPH_KINDS)
        return [*kinds, "tiny"] if self.num_vertices < 8 else kinds or ["plain"]

    def _set(self, names: tuple[str, ...]) -> list[str]:
        return [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) not in (False, 0, "", "none")]

    @property
    def reads_edges(self) -> bool:
        """True if its layers read the edges themselves, which not every strategy provides."""
        return self.model in (*PYG, *BY_BLOCKS, *BY_RELATION, *BY_TYPE)

    def without_saving(self, saving: str) -> Case:
        """Return the case without one more optimisation, if any."""
        return replace(self, without=",".join(filter(None, (self.without, saving))))

    def build(self) -> tuple[Graph, Stack | nn.Module]:
        graph = self.build_graph()
        torch.manual_seed(5)
        model = self.make_pyg_stack() if self.model in PYG else self.make_model(graph)
        if self.frozen:
            next(model.parameters()).requires_grad_(False)
            model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        for parameter in model.parameters():  # biases and eps start at zero, where an error in them would not show
            nn.init.uniform_(parameter, -0.6, 0.6)
        return graph, model.double()

    def build_graph(self) -> Graph:
        graph = (
            make_typed_graph(self.num_vertices, self.typed, sparse=self.sparse)
            if self.typed
            else make_graph(
                self.num_vertices,
                weighted=self.weighted,
                edge_features=self.edge_features,
                multilabel=self.multilabel,
                sparse=self.sparse,
            )
        )
        if self.typed and self.edge_features:
            random = torch.Generator().manual_seed(6)
            graph = replace(graph, edge_features=torch.randn(graph.num_edges, self.edge_features, generator=random))
        if self.by_type:
            graph = make_named_relations(graph).by_type()
        if self.labels:
            graph = with_few_labels(graph, self.labels, self.scored)
        return reorder(graph, self.order)

    @property
    def by_type(self) -> bool:
        """True if its model takes a dict of rows by vertex type."""
        return "hetero" in self.model

    def make_model(self, graph: Graph) -> nn.Module:
        if self.model.startswith("pyg-"):
            return self.make_converted(GraphShape.of(graph))
        return make_model(
            self.model,
            NUM_FEATURES_SPARSE if self.sparse else NUM_FEATURES,
            NUM_CLASSES,
            typed=graph.typed,
            bases=self.bases,
            blocks=self.blocks,
            one_hot=self.one_hot,
            hidden=self.hidden,
            heads=self.heads,
            layers=self.layers,
            decoupled=self.decoupled,
            dropout=self.dropout,
            input_dropout=self.input_dropout,
            norm=self.norm,
            residual=self.residual,
            edge_width=self.edge_features if self.edge_attention else 0,
            attention_dropout=self.attention_dropout,
        )

    def make_converted(self, shape: GraphShape) -> nn.Module:
        from benchmarks.pyg_models import PYG_MODELS

        optional = (["edge_attr"] if self.edge_features else []) + (["edge_weight"] if self.weighted else [])
        return convert(PYG_MODELS[self.model](), edge_inputs=optional, shape=shape)

    def make_pyg_stack(self) -> Stack:
        import torch_geometric.nn as pyg

        options: dict[str, object] = {}
        if self.model == "PNAConv":
            options = {"aggregators": ["mean", "max", "std"], "scalers": ["amplification"], "deg": torch.arange(9)}
        if self.model == "GENConv":
            options = {"norm": "layer"}
        if self.edge_features:
            options["edge_dim"] = self.edge_features
        kind = getattr(pyg, self.model)
        widths = [NUM_FEATURES, *[self.hidden] * (self.layers - 1), NUM_CLASSES]
        sizes = [(mlp(a, b),) if self.model == "GINEConv" else (a, b) for a, b in pairwise(widths)]
        layers = [from_pyg(kind(*size, **options)) for size in sizes]
        return Stack(layers, dropout=self.dropout, norm=self.norm)


PYG = ("SAGEConv", "GATv2Conv", "TransformerConv", "PNAConv", "GraphConv", "GENConv", "GINEConv")
"""PyG's convolutions that run unchanged, under strategies that provide edges to layers."""


def pyg_cases() -> list[Case]:
    """Return cases of every PyG convolution, of those that accept edge features, and of GraphConv with edge weights."""
    result = [Case(model=name, layers=2, hidden=8, norm="batch" if name == "SAGEConv" else "none") for name in PYG[:-1]]
    for name in ("GINEConv", "GATv2Conv", "TransformerConv", "PNAConv", "GENConv"):
        result.append(Case(model=name, layers=2, hidden=8, edge_features=3))
    result.append(Case(model="GATv2Conv", layers=2, hidden=8, edge_features=3, order="bfs"))
    result.append(Case(model="GINEConv", layers=2, num_vertices=3, edge_features=3))  # P = 4: a rank has no edge
    result.append(Case(model="GraphConv", layers=2, hidden=8, weighted=True))
    return result


BY_RELATION = ("pyg-hetero-attention", "pyg-hetero-edges")
"""PyG models whose convolutions run on the edges of relations."""
BY_TYPE = ("pyg-hetero-hgt", "pyg-hetero-han")
"""PyG models whose convolutions take all relations. Planning them takes seconds, so they are not among the cases."""
BY_BLOCKS = ("pyg-pna", "pyg-transformer", "pyg-deeper", "pyg-custom", "pyg-own-edges")
"""PyG models whose convolutions run by blocks, see benchmarks.pyg_models."""


def converted_cases() -> list[Case]:
    """Return cases of models written for PyG and converted."""
    names = ["gcn", "gat", "gatv2", "sage", "sage-max", "gin", "gcnii", "appnp", "jk", "jk-lstm", "mixed", "basic"]
    names += ["constant", "gru"]
    result = [Case(model=f"pyg-{name}") for name in names]
    result += [Case(model=name, edge_features=3 if "edges" in name else 0) for name in BY_BLOCKS]
    result += [Case(model=f"pyg-{name}-edges", edge_features=3) for name in ("gat", "gatv2")]
    result += [Case(model=f"pyg-{name}-dropout") for name in ("gat", "gatv2")]
    result += [Case(model=f"pyg-rgcn{kind}", typed="x") for kind in ("", "-bases", "-blocks")]
    names = ["pyg-hetero", "pyg-hetero-max", "pyg-to-hetero", *BY_RELATION]
    result += [Case(model=name, typed="x", edge_features=3 if "edges" in name else 0) for name in names]
    result.append(Case(model="pyg-hetero-some", typed="some"))
    result.append(Case(model="pyg-gcn", weighted=True, order="bfs"))
    result.append(Case(model="pyg-jk", num_vertices=150, labels=4))  # with rows that no loss reads
    return result


def cases() -> list[Case]:
    """Return cases of every model, coupled and decoupled, and of each option at least once."""
    result = [Case(model=model, decoupled=decoupled) for model, decoupled in product(MODELS, (False, True))]
    for model in MODELS:  # each with the options that all models share, several at once
        result.append(Case(model=model, norm="batch", residual=True, input_dropout=0.3, layers=2))
        result.append(Case(model=model, hidden=2, heads=2, layers=2, without="reuse"))  # P beyond the width
        result.append(Case(model=model, num_vertices=3, layers=2))  # P = 4: a rank has no row
        result.append(Case(model=model, norm="layer", multilabel=True, weighted=True, order="bfs", layers=2))
        result.append(Case(model=model, sparse=True, layers=2, frozen=True, order="degree"))
    result.append(Case(model="gcn", weighted=True, input_dropout=0.3, hidden=4, layers=2))
    result.append(Case(model="gcn", decoupled=True, norm="layer", multilabel=True, layers=4))
    result.append(Case(model="sage", sparse=True, decoupled=True))
    result.append(Case(model="gat", hidden=20, heads=5, layers=3, norm="layer"))  # heads that no P in 2..4 divides
    result.append(Case(model="gcn", order="bfs", weighted=True, input_dropout=0.3, layers=2))
    result.append(Case(model="sage", order="degree", input_dropout=0.3, norm="batch", multilabel=True))
    result.append(Case(model="gat", order="bfs", decoupled=True))
    return result + attention_cases()


def attention_cases() -> list[Case]:
    """Return cases of edge features in the logit, with numbers of heads that no number of ranks divides."""
    edges: dict[str, Any] = {"edge_features": 3, "edge_attention": True}
    result = [Case(model=model, decoupled=True, layers=2, **edges) for model in ("gat", "gatv2")]
    result.append(Case(model="gat", hidden=20, heads=5, layers=2, order="degree", **edges))
    result.append(Case(model="gatv2", hidden=20, heads=5, layers=2, order="bfs", **edges))
    result.append(PARTS_OF_LOGITS)
    result.append(Case(model="gatv2", num_vertices=3, layers=2, **edges))
    return result + dropping_cases()


def dropping_cases() -> list[Case]:
    """Return cases of attention dropout: heads split between ranks, self-loops, duplicate edges, several steps."""
    drops: dict[str, Any] = {"attention_dropout": 0.5}
    result = [Case(model=model, **drops) for model in ("gat", "gatv2")]
    result += [Case(model=model, decoupled=True, order="bfs", **drops) for model in ("gat", "gatv2")]
    result.append(Case(model="gat", hidden=20, heads=5, layers=2, residual=True, norm="batch", **drops))
    result.append(
        Case(model="gatv2", hidden=20, heads=5, layers=2, order="degree", edge_features=3, edge_attention=True, **drops)
    )
    result.append(replace(PARTS_OF_LOGITS, **drops))
    return result


PARTS_OF_LOGITS = Case(model="gatv2", hidden=120, heads=1, layers=2, edge_features=2, edge_attention=True)
"""A head so wide that partial logits are smaller than its vectors."""


def typed_cases() -> list[Case]:
    """Return cases of typed graphs: every kind of relation weights, and vertices with and without features."""
    return [
        Case(model="rgcn", typed="some", hidden=8, layers=3, blocks=2),
        Case(model="rgcn", typed="some", layers=2, bases=2, sparse=True),
        Case(model="rgcn", typed="none", layers=2, hidden=6, input_dropout=0.3, norm="batch", residual=True),
        Case(model="rgcn", typed="x", layers=2),
        Case(model="rgcn", typed="x", layers=2, input_dropout=0.3, without="reuse", hidden=2),
        Case(model="rgcn", typed="none", num_vertices=7, layers=2),  # P = 4: hardly a row each
        Case(model="rgcn", typed="one", order="bfs", layers=2, bases=2, one_hot=True, hidden=4),
        Case(model="sage", typed="some", decoupled=True),
    ]


class DropsItself(nn.Module):
    """A custom layer without phases that draws dropout masks."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__()
        self.map, self.out_width = Linear(in_width, out_width), out_width

    def forward(self, view: View, x: Tensor) -> Tensor:
        h = view.dropout(self.map(x), 0.4 if self.training else 0.0, relu=True)
        return view.propagate(h, reduce="mean") + view.targets(self.map(x))


@dataclass(frozen=True, kw_only=True)
class CustomLayers(Case):
    """A model of custom layers, with dropout between them as well."""

    def make_model(self, graph: Graph) -> nn.Module:
        del graph
        return Stack([DropsItself(NUM_FEATURES, 6), DropsItself(6, NUM_CLASSES)], dropout=self.dropout)


def custom_cases() -> list[Case]:
    """Return models in which one view draws dropout masks in several places."""
    return [
        Case(model="gcn", decoupled=True, norm="batch", input_dropout=0.3, residual=True),
        Case(model="gat", decoupled=True, norm="batch"),
        CustomLayers(model="own"),
    ]


FEW_LABELS: dict[str, Any] = {"num_vertices": 150, "labels": 4}
"""A graph in which the receptive field of the labels, over three layers, leaves vertices out at every layer."""


def labelled_cases() -> list[Case]:
    """Return cases of few labels: every model, coupled and decoupled, and options that depend on the rows."""
    few = FEW_LABELS
    result = [Case(model=model, decoupled=decoupled, **few) for model, decoupled in product(MODELS, (False, True))]
    result += [Case(model=model, layers=2, input_dropout=0.3, **few) for model in ("gcn", "sage")]
    result.append(Case(model="sage", layers=2, norm="batch", residual=True, **few))
    result.append(Case(model="gin", norm="layer", residual=True, multilabel=True, without="reuse", **few))
    result.append(Case(model="gcn", order="bfs", weighted=True, **few))
    result.append(Case(model="sage", sparse=True, layers=2, **few))
    result.append(Case(model="gat", edge_features=3, edge_attention=True, layers=2, **few))
    result += [Case(model=model, attention_dropout=0.5, layers=2, **few) for model in ("gat", "gatv2")]
    result.append(Case(model="SAGEConv", layers=2, hidden=8, **few))
    result.append(Case(model="GINEConv", layers=2, edge_features=3, **few))
    result.append(Case(model="rgcn", typed="some", layers=2, blocks=2, hidden=8, **few))
    result.append(Case(model="rgcn", typed="none", layers=2, bases=2, **few))
    result.append(Case(model="gcn", num_vertices=150, labels=1, layers=2))  # ranks without a labelled vertex
    result.append(Case(model="gcn", num_vertices=150, labels=4, scored=1, layers=2))  # steps that share their rows
    return result
