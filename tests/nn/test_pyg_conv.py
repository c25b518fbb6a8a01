"""PyG's convolutions as layers of weft equal PyG on one device; an error refuses those that would not be exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.graphs import make_graph
from tests.training.test_input_checks import check_run
from weft.nn import GraphView, Stack, from_pyg
from weft.nn.layers.conv import mlp
from weft.nn.layers.pyg_conv import Trial
from weft.nn.messages import InEdgeSums
from weft.utils.errors import InputError

pyg = pytest.importorskip("torch_geometric.nn")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SAGEConv", {}),
        ("GATConv", {"heads": 2}),
        ("GATv2Conv", {"heads": 2, "concat": False}),
        ("TransformerConv", {"heads": 2}),
        ("GraphConv", {"aggr": "max"}),
        ("PNAConv", {"aggregators": ["mean", "std"], "scalers": ["attenuation"], "deg": torch.arange(9)}),
    ],
)
def test_equals_pyg(kind: str, options: dict[str, Any]) -> None:
    graph = make_graph(23)
    torch.manual_seed(0)
    conv = getattr(pyg, kind)(7, 4, **options).double()
    layer = from_pyg(conv)
    x = torch.randn(23, 7, dtype=torch.float64)
    y = layer(GraphView.of(graph.in_edges), x)
    assert y.shape == (23, layer.out_width)
    torch.testing.assert_close(y, conv(x, torch.stack(graph.in_edges.edges())))


def test_edges_for_a_loss_that_weft_lacks_are_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """SuperGATConv samples them in Python for its self-supervised loss: 12 times the time of the rest."""
    monkeypatch.setattr(pyg.SuperGATConv, "negative_sampling", None)
    graph, conv = make_graph(23), pyg.SuperGATConv(7, 4, heads=2).double()
    layer = from_pyg(conv).train()
    assert layer.training
    x = torch.randn(23, 7, dtype=torch.float64)
    y = layer(GraphView.of(graph.in_edges), x)
    torch.testing.assert_close(y, conv.eval()(x, torch.stack(graph.in_edges.edges())))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GINEConv", {"edge_dim": 3}),
        ("GATConv", {"heads": 2, "edge_dim": 3}),
        ("GATv2Conv", {"heads": 2, "edge_dim": 3}),
        ("TransformerConv", {"heads": 2, "edge_dim": 3}),
        ("GENConv", {"norm": "layer", "edge_dim": 3}),
        ("GeneralConv", {"in_edge_channels": 3}),
        ("ResGatedGraphConv", {"edge_dim": 3}),
        ("NNConv", {"nn": torch.nn.Linear(3, 28)}),
        ("PNAConv", {"aggregators": ["mean"], "scalers": ["identity"], "deg": torch.arange(9), "edge_dim": 3}),
    ],
)
def test_edge_features_equal_pyg(kind: str, options: dict[str, Any]) -> None:
    graph = make_graph(23, edge_features=3)
    assert graph.edge_features is not None
    torch.manual_seed(0)
    sizes = (mlp(7, 4),) if kind == "GINEConv" else (7, 4)
    conv = getattr(pyg, kind)(*sizes, **options).double()
    layer = from_pyg(conv)
    x, features = torch.randn(23, 7, dtype=torch.float64), graph.edge_features.double()
    y = layer(GraphView.of(graph.in_edges, edge_features=features), x)
    edge_index = torch.stack(graph.in_edges.edges())
    assert y.shape == (23, layer.out_width)
    torch.testing.assert_close(y, conv(x, edge_index, edge_attr=features))
    assert not torch.allclose(y, conv(x, edge_index, edge_attr=features + 1))


class Custom(pyg.MessagePassing):
    """A custom layer. Its attribute `dim` means something else in convolutions of PyG."""

    def __init__(self, edge_width: int) -> None:
        super().__init__(aggr="sum")
        self.dim = 4
        self.of_row, self.of_edge = torch.nn.Linear(7, 4), torch.nn.Linear(edge_width, 4)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        y: Tensor = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        return y

    def message(self, x_j: Tensor, edge_attr: Tensor | None) -> Tensor:
        y: Tensor = self.of_row(x_j)
        return y if edge_attr is None else torch.tanh(y + self.of_edge(edge_attr))


class Requiring(Custom):
    """A `Custom` layer whose argument edge_attr has no default."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return super().forward(x, edge_index, edge_attr)


@pytest.mark.parametrize("kind", [Custom, Requiring])
def test_a_custom_layer_gets_the_edge_features_of_the_graph(kind: type[Custom]) -> None:
    torch.manual_seed(0)
    graph, conv = make_graph(23, edge_features=3), kind(3).double()
    assert graph.edge_features is not None
    x, features = torch.randn(23, 7, dtype=torch.float64), graph.edge_features.double()
    edges, layer = torch.stack(graph.in_edges.edges()), from_pyg(conv)
    y = layer(GraphView.of(graph.in_edges, edge_features=features), x)
    torch.testing.assert_close(y, conv(x, edges, features), rtol=1e-9, atol=1e-9)
    if kind is Custom:
        torch.testing.assert_close(layer(GraphView.of(graph.in_edges), x), conv(x, edges), rtol=1e-9, atol=1e-9)
    else:
        with pytest.raises(InputError, match="Requiring needs edge features, and the graph has none"):
            layer(GraphView.of(graph.in_edges), x)


class EdgeMLP(Requiring):
    """A layer whose only parameters take the rows of both endpoints and the edge features side by side."""

    def __init__(self, edge_width: int) -> None:
        pyg.MessagePassing.__init__(self, aggr="sum")
        self.mlp = torch.nn.Linear(2 * 16 + edge_width, 4)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = self.mlp(torch.cat([x_i, x_j, edge_attr], -1))
        return y


@pytest.mark.parametrize("edge_width", [1, 3, 9])
def test_the_width_of_edge_features_is_found_in_joined_rows(edge_width: int) -> None:
    trial = Trial.of(EdgeMLP(edge_width), needs_edge_attr=True, in_widths=[16])
    assert trial is not None
    assert trial.out_width == 4
    assert trial.sums == InEdgeSums()
    assert Trial.of(EdgeMLP(edge_width), needs_edge_attr=True) is not None


def test_unused_edge_features() -> None:
    """A convolution without edge_dim ignores edge features; GENConv adds them if they are as wide as its result."""
    graph = make_graph(23, edge_features=4)
    assert graph.edge_features is not None
    view = GraphView.of(graph.in_edges, edge_features=graph.edge_features)
    x, edge_index = torch.randn(23, 7), torch.stack(graph.in_edges.edges())
    gat, wide, narrow = pyg.GATv2Conv(7, 4), pyg.GENConv(7, 4, norm="layer"), pyg.GENConv(7, 5, norm="layer")
    torch.testing.assert_close(from_pyg(gat)(view, x), gat(x, edge_index))
    torch.testing.assert_close(from_pyg(wide)(view, x), wide(x, edge_index, edge_attr=graph.edge_features))
    torch.testing.assert_close(from_pyg(narrow)(view, x), narrow(x, edge_index))


def test_edge_weights_equal_pyg() -> None:
    graph = make_graph(23, weighted=True)
    conv, x, edge_index = pyg.GraphConv(7, 4), torch.randn(23, 7), torch.stack(graph.in_edges.edges())
    y = from_pyg(conv)(GraphView.of(graph.in_edges), x)
    torch.testing.assert_close(y, conv(x, edge_index, edge_weight=graph.in_edges.weight))
    assert not torch.allclose(y, conv(x, edge_index))


@pytest.mark.parametrize(
    ("kind", "options", "num_features", "message"),
    [
        ("GATv2Conv", {"edge_dim": 3}, 0, r"GATv2Conv needs edge features, and the graph has none: give the graph"),
        ("NNConv", {"nn": torch.nn.Linear(3, 35)}, 0, r"NNConv needs edge features"),
        (
            "TransformerConv",
            {"edge_dim": 3},
            2,
            r"takes 3 edge features, and the graph has 2: create it with",
        ),
        ("GINEConv", {}, 0, r"GINEConv needs edge features"),
        ("GINEConv", {}, 3, r"GINEConv takes 7 edge features, and the graph has 3: create it with edge_dim=3"),
    ],
)
def test_wrong_edge_features_are_refused(kind: str, options: dict[str, Any], num_features: int, message: str) -> None:
    """The check of a run, before it creates its folder, raises a one-line error."""
    graph = make_graph(23, edge_features=num_features)
    sizes = (mlp(7, 5),) if kind == "GINEConv" else (7, 5)
    model = Stack([from_pyg(getattr(pyg, kind)(*sizes, **options))])
    with pytest.raises(InputError, match=message) as caught:
        check_run("drawn", graph, model)
    assert "\n" not in str(caught.value)


def test_refusals() -> None:
    for conv, message in (
        (
            pyg.GCNConv(7, 4),
            r"GCNConv reads more of the graph than the in-edges.*in a PyG model .* forward may also sum over in-edges",
        ),
        (pyg.GATv2Conv(7, 4, dropout=0.5), r"dropout=0\.5, whose masks.*use dropout between layers"),
        (pyg.SAGEConv(7, 4, aggr="lstm"), r"LSTMAggregation is not supported, because its result depends on padding"),
        (pyg.GENConv(7, 4), r"contains a batch norm.*move it between layers"),
        (pyg.GINConv(torch.nn.Identity()), r"no attribute out_channels.*: add it, or use weft\.nn\.PyGConv"),
        (pyg.GINEConv(torch.nn.Sequential(torch.nn.Linear(7, 4), torch.nn.Dropout(0.3))), r"dropout=0\.3, whose masks"),
        (pyg.GINEConv(torch.nn.Sequential(torch.nn.Linear(7, 4), torch.nn.BatchNorm1d(4))), r"contains a batch norm"),
        (pyg.GINEConv(pyg.MLP([7, 4, 4], dropout=0.2)), r"dropout=0\.2, whose masks"),
    ):
        with pytest.raises(InputError, match=message):
            from_pyg(conv)
