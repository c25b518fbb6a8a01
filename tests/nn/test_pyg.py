"""PyG's own convolutions as layers: PyG's numbers on one device, and a sentence where they cannot be exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import make_graph

from weft.core.errors import InputError
from weft.nn import GraphView, from_pyg

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


def test_refusals() -> None:
    for conv, said in (
        (pyg.GCNConv(7, 4), r"GCNConv takes no pair.*use weft\.nn\.GCNConv"),
        (pyg.GATv2Conv(7, 4, dropout=0.5), r"dropout=0\.5 of its own.*use Stack's dropout"),
        (pyg.GENConv(7, 4), r"a batch norm of its own.*use Stack's norm"),
        (pyg.GINConv(torch.nn.Linear(7, 4)), r"names no out_channels: use weft\.nn\.PyGConv"),
    ):
        with pytest.raises(InputError, match=said):
            from_pyg(conv)
