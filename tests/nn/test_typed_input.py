"""Relational layers equal their formula and PyG's layers; rows of several vertex types are in vertex order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.graphs import make_typed_graph
from weft.data import Graph, TypedShape
from weft.nn import GAT, GCN, RGCN, GraphView, Inputs, OneHotRGCNConv, RGCNConv, Stack, Topology, TypedInput, typed_rows
from weft.nn.aggregate.relations import RelationRows
from weft.utils.errors import InputError

KINDS: list[dict[str, Any]] = [{}, {"bases": 3}, {"blocks": 2}]


def view_of(graph: Graph) -> GraphView:
    return GraphView.of(graph.in_edges, edge_type=graph.edge_type, num_relations=len(graph.relations))


def matrices(layer: RGCNConv) -> list[Tensor]:
    """Return the weight matrix W_r of each relation."""
    weight: Tensor = layer.weight
    if layer.mixture is not None:
        weight = torch.einsum("rb,bkio->rkio", layer.mixture, weight)
    return [torch.block_diag(*blocks) for blocks in weight]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_dense_formula(kind: dict[str, Any]) -> None:
    torch.manual_seed(0)
    graph = make_typed_graph(23, "x")
    layer = RGCNConv(6, 4, num_relations=5, **kind).double()
    nn.init.uniform_(layer.bias)
    x = torch.randn(23, 6, dtype=torch.float64, requires_grad=True)
    source, target = graph.in_edges.edges()
    wanted = x @ layer.weight_self + layer.bias
    for number, matrix in enumerate(matrices(layer)):
        mine = graph.edge_type == number
        count = torch.zeros(23, 23, dtype=torch.float64)
        count.index_put_((target[mine], source[mine]), torch.ones(()).double(), accumulate=True)
        wanted = wanted + count / count.sum(1, keepdim=True).clamp(min=1) @ x @ matrix
    y = layer(view_of(graph), x)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    inputs, seed = [x, *layer.parameters()], torch.randn_like(y)
    gradients = zip(torch.autograd.grad(y, inputs, seed), torch.autograd.grad(wanted, inputs, seed), strict=True)
    for gradient, by_formula in gradients:
        torch.testing.assert_close(gradient, by_formula, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_pyg(kind: dict[str, Any]) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    graph, x = make_typed_graph(23, "x"), torch.randn(23, 6)
    ours = RGCNConv(6, 4, num_relations=5, **kind)
    theirs = pyg.RGCNConv(6, 4, 5, **{f"num_{name}": number for name, number in kind.items()})
    state = {"weight": theirs.weight.view_as(ours.weight), "weight_self": theirs.root, "bias": theirs.bias}
    ours.load_state_dict(state if ours.mixture is None else {**state, "mixture": theirs.comp})
    assert graph.edge_type is not None
    edges = torch.stack(graph.in_edges.edges())
    torch.testing.assert_close(ours(view_of(graph), x), theirs(x, edges, graph.edge_type.long()))


@pytest.mark.parametrize("bases", [0, 3])
def test_one_hot_equals_a_layer_on_the_unit_matrix(bases: int) -> None:
    torch.manual_seed(0)
    graph = make_typed_graph(23, "x")
    theirs = RGCNConv(23, 4, num_relations=5, bases=bases)
    ours = OneHotRGCNConv(4, num_relations=5, bases=bases)
    if theirs.mixture is not None:
        ours.mixture.data = theirs.mixture.data
    rows = theirs.weight[:, 0].permute(1, 2, 0).reshape(23, -1)  # by vertex, column, basis
    y = ours(view_of(graph), torch.cat([theirs.weight_self, rows], 1))
    torch.testing.assert_close(y, theirs(view_of(graph), torch.eye(23)))


def relations_of(pairs: RelationRows) -> Tensor:
    return torch.arange(len(pairs.counts)).repeat_interleave(torch.tensor(pairs.counts))


@pytest.mark.parametrize("bounds", [(0, 23), (0, 9, 9, 23)])
def test_pairs_are_sorted_by_part_relation_and_vertex(bounds: tuple[int, ...]) -> None:
    graph = make_typed_graph(23, "x")
    assert graph.edge_type is not None
    parts = [RelationRows.of(graph.in_edges, graph.edge_type, 5, bounds, home) for home in range(len(bounds) - 1)]
    _, target = graph.in_edges.edges()
    expected = {(int(v), int(r)) for v, r in zip(target, graph.edge_type, strict=True)}
    rows = [
        (home, relation, int(vertex) + bounds[home])
        for home, pairs in enumerate(parts)
        for relation, vertex in zip(relations_of(pairs), pairs.targets, strict=True)
    ]
    assert rows == sorted(rows)
    assert {(vertex, int(relation)) for _, relation, vertex in rows} == expected
    assert parts[0].in_edges.num_targets == len(rows) == graph.relations_in.num_edges
    assert [sum(pairs.counts) for pairs in parts] == torch.tensor(parts[0].bounds).diff().tolist()
    for pairs, part in zip(parts, pairwise(bounds), strict=True):
        assert pairs.counts == graph.count_relation_rows(slice(*part))
        assert pairs.counts == graph.count_relation_rows(torch.arange(*part).flip(0))
    assert graph.relations_in.degree.tolist() == [sum(v == vertex for v, _ in expected) for vertex in range(23)]


def test_rows_of_several_types_are_in_vertex_order() -> None:
    graph = make_typed_graph(23, "some")
    vertices = torch.tensor([22, 0, 13, 3, 17])
    rows = typed_rows(graph, vertices, "cpu", torch.float32)
    layer = TypedInput(graph.typed, 6)
    assert layer.embedding is not None
    layer.embedding.weight.data = layer.embedding.weight[torch.tensor([22, 17]) - graph.type_range("c").start].detach()
    y = layer(GraphView(Topology(graph.in_edges), inputs=Inputs(typed=rows)))
    torch.testing.assert_close(y[[0, 4]], layer.embedding.weight)
    torch.testing.assert_close(y[1], layer.maps[0](graph.features["a"][:1])[0])
    torch.testing.assert_close(y[2], layer.maps[1](graph.features["b"])[13 - graph.type_range("b").start])


def test_every_model_accepts_typed_vertices() -> None:
    typed = make_typed_graph(23, "some").typed
    assert typed == TypedShape(num_relations=5, featured=((11, 4), (4, 3)), num_embedded=8)
    for family in (GCN, GAT):
        model = family(0, 3, typed=typed, hidden=8)
        assert isinstance(model, Stack)
        assert model.layers[0].in_width == 8


def test_errors_say_what_to_do() -> None:
    typed = TypedShape(num_relations=4)
    with pytest.raises(InputError, match="rgcn needs a graph with relations"):
        RGCN(7, 3)
    with pytest.raises(InputError, match="--decoupled does not work with rgcn"):
        RGCN(7, 3, typed=typed, decoupled=True)
    with pytest.raises(InputError, match="--bases 2 and --blocks 2 exclude each other: give one"):
        RGCN(7, 3, typed=typed, bases=2, blocks=2)
    with pytest.raises(InputError, match="--hidden 7 is not a multiple of --blocks 2: use 8"):
        RGCN(7, 3, typed=typed, hidden=7, blocks=2)
    with pytest.raises(InputError, match="--bases, --blocks and --one-hot only work with rgcn"):
        GCN(7, 3, bases=2)
    with pytest.raises(InputError, match="blocks=2 does not divide the widths 7 and 4"):
        RGCNConv(7, 4, num_relations=3, blocks=2)
    with pytest.raises(InputError, match="edges have no types"):
        RGCNConv(7, 4, num_relations=3)(GraphView.of(make_typed_graph(23, "x").in_edges), torch.ones(23, 7))
