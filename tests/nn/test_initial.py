"""Layers begin as PyG's of the same name do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.nn import GATConv, GATv2Conv, GCNConv, GINConv, RGCNConv, SAGEConv
from weft.nn.layers.conv import mlp

pyg = pytest.importorskip("torch_geometric.nn")

IN, OUT, HEADS, RELATIONS = 300, 40, 4, 5
PAIRS: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "GCNConv": (lambda: GCNConv(IN, OUT), lambda: pyg.GCNConv(IN, OUT), {"weight": "lin.weight", "bias": "bias"}),
    "SAGEConv": (
        lambda: SAGEConv(IN, OUT),
        lambda: pyg.SAGEConv(IN, OUT),
        {"weight": "lin_l.weight", "weight_self": "lin_r.weight", "bias": "lin_l.bias"},
    ),
    "GINConv": (
        lambda: GINConv(IN, OUT),
        lambda: pyg.GINConv(mlp(IN, OUT), train_eps=True),
        {"eps": "eps", "mlp.0.weight": "nn.0.weight", "mlp.0.bias": "nn.0.bias", "mlp.2.weight": "nn.2.weight"},
    ),
    "GATConv": (
        lambda: GATConv(IN, HEADS * OUT, heads=HEADS, edge_width=3),
        lambda: pyg.GATConv(IN, OUT, heads=HEADS, edge_dim=3),
        {
            "weight": "lin.weight",
            "attention_src": "att_src",
            "attention_dst": "att_dst",
            "attention_edge": "att_edge",
            "weight_edge": "lin_edge.weight",
            "bias": "bias",
        },
    ),
    "GATv2Conv": (
        lambda: GATv2Conv(IN, HEADS * OUT, heads=HEADS),
        lambda: pyg.GATv2Conv(IN, OUT, heads=HEADS),
        {"weight": "lin_l.weight", "weight_right": "lin_r.weight", "attention": "att", "bias": "bias"},
    ),
    "RGCNConv": (
        lambda: RGCNConv(IN, OUT, num_relations=RELATIONS, bases=2),
        lambda: pyg.RGCNConv(IN, OUT, RELATIONS, num_bases=2),
        {"weight": "weight", "mixture": "comp", "weight_self": "root", "bias": "bias"},
    ),
}


def drawn(make: Any, name: str, times: int = 30) -> Tensor:
    return torch.cat([make().get_parameter(name).detach().flatten() for _ in range(times)])


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (*_, names) in PAIRS.items() for name in names])
def test_parameters_begin_as_pygs(kind: str, name: str) -> None:
    """As uniform within the same bounds, by the largest number and the spread of many."""
    torch.manual_seed(0)
    own, theirs, names = PAIRS[kind]
    some, others = drawn(own, name), drawn(theirs, names[name])
    assert some.numel() == others.numel()
    for measure in (Tensor.std, lambda one: one.abs().max(), lambda one: one.abs().mean()):
        torch.testing.assert_close(measure(some), measure(others), rtol=0.12, atol=1e-6)


def test_every_parameter_is_compared() -> None:
    """But those that PyG's GATv2Conv has more: biases of its maps, which begin at zero."""
    for kind, (own, _, names) in PAIRS.items():
        left = {name for name, _ in own().named_parameters()} - names.keys()
        assert left <= ({"mlp.2.bias"} if kind == "GINConv" else set()), kind


def test_batch_norm_keeps_pytorchs_statistics() -> None:
    from weft.data import Adjacency
    from weft.nn import BatchNorm, GraphView

    none = torch.empty(0, dtype=torch.int64)
    view = GraphView.of(Adjacency.from_edges(none, none, num_sources=9, num_targets=9))
    own, theirs, x = BatchNorm(4), nn.BatchNorm1d(4), torch.randn(9, 4)
    for _ in range(3):
        torch.testing.assert_close(own(view, x), theirs(x))
    assert own.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], value)
