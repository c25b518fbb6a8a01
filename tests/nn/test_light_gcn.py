"""LightGCN equals a model of PyG's LGConv, and is refused where it cannot work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import LGConv

import weft
from tests.data.test_links import make
from weft.data import with_inverse_relations
from weft.nn import GraphView, Inputs, LightGCN, Topology, typed_rows
from weft.utils.errors import InputError


def test_equals_pyg() -> None:
    """Rows and gradients equal the mean of the layers of LGConv, on a graph with duplicate edges and lone vertices."""
    graph = with_inverse_relations(make("bipartite"))
    model = LightGCN(graph.typed, 5, layers=3).double()
    assert model.input.embedding is not None
    weight = model.input.embedding.weight
    inputs = Inputs(typed=typed_rows(graph, slice(None), "cpu", torch.float64))
    rows = model([GraphView(Topology(graph.in_edges), inputs=inputs)] * 3, torch.empty(60, 0))
    edge_index, conv = torch.stack(graph.in_edges.edges()), LGConv()
    layers = [weight]
    for _ in range(3):
        layers.append(conv(layers[-1], edge_index))
    expected = torch.stack(layers).mean(0)
    torch.testing.assert_close(rows, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(rows.square().sum(), weight)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), weight)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {}, "no vertex of graph with an out-edge has an in-edge, .*: add --inverse-relations"),
        ({}, {"inverse_relations": True, "dropout": 0.1}, "--dropout has no effect under model lightgcn: leave it out"),
        ({}, {"inverse_relations": True, "bases": 2}, "--bases, --blocks and --one-hot only work with rgcn"),
        ({"x": torch.ones(60, 2)}, {"inverse_relations": True}, "trains a row for each vertex, but the graph has feat"),
    ],
)
def test_mistakes(changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:

    graph = replace(make("bipartite"), **changes)
    with pytest.raises(InputError, match=message):
        weft.train(graph, "lightgcn", task="link", out=tmp_path / "out", quiet=True, **options)
    assert not (tmp_path / "out").exists()
