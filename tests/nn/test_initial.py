"""Initial parameters have the distribution of PyG's layers of the same name."""

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


def samples_of(make: Any, name: str, times: int = 30) -> Tensor:
    return torch.cat([make().get_parameter(name).detach().flatten() for _ in range(times)])


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (*_, names) in PAIRS.items() for name in names])
def test_initial_parameters_are_distributed_as_in_pyg(kind: str, name: str) -> None:
    """Many samples have the standard deviation, largest magnitude and mean magnitude of PyG's."""
    torch.manual_seed(0)
    make_ours, make_theirs, names = PAIRS[kind]
    ours, theirs = samples_of(make_ours, name), samples_of(make_theirs, names[name])
    assert ours.numel() == theirs.numel()
    for measure in (Tensor.std, lambda x: x.abs().max(), lambda x: x.abs().mean()):
        torch.testing.assert_close(measure(ours), measure(theirs), rtol=0.12, atol=1e-6)


def test_every_parameter_is_compared() -> None:
    """Only the second bias of GINConv's MLP is not compared."""
    for kind, (make, _, names) in PAIRS.items():
        left = {name for name, _ in make().named_parameters()} - names.keys()
        assert left <= ({"mlp.2.bias"} if kind == "GINConv" else set()), kind


def test_batch_norm_has_the_statistics_of_pytorch() -> None:
    from weft.data import Adjacency
    from weft.nn import BatchNorm, GraphView

    none = torch.empty(0, dtype=torch.int64)
    view = GraphView.of(Adjacency.from_edges(none, none, num_sources=9, num_targets=9))
    ours, theirs, x = BatchNorm(4), nn.BatchNorm1d(4), torch.randn(9, 4)
    for _ in range(3):
        torch.testing.assert_close(ours(view, x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
