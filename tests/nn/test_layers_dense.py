"""Every layer against its formula on a dense matrix, and against PyG's where PyG has the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parity import make_graph
from torch import Tensor, nn

from weft.data import Graph
from weft.nn import GATConv, GCNConv, GINConv, GraphView, SAGEConv

LAYERS: list[Callable[[], nn.Module]] = [
    lambda: GCNConv(7, 4),
    lambda: GCNConv(7, 12),
    lambda: GCNConv(7, 7, update=False),
    lambda: SAGEConv(7, 4),
    lambda: SAGEConv(7, 12),
    lambda: SAGEConv(7, 7, update=False),
    lambda: GINConv(7, 4),
    lambda: GINConv(7, 7, update=False),
    lambda: GATConv(7, 6, heads=3),
    lambda: GATConv(7, 5, heads=2, concat=False),
]


def dense(graph: Graph, *, weighted: bool = False) -> Tensor:
    """A[v, u]: the number, or the weight, of edges u -> v."""
    matrix = torch.zeros(graph.num_vertices, graph.num_vertices, dtype=torch.float64)
    source, target = graph.in_edges.edges()
    weight = (
        graph.in_edges.weight.double() if weighted and graph.in_edges.weight is not None else torch.ones(len(source))
    )
    matrix.index_put_((target, source), weight.double(), accumulate=True)
    return matrix


def with_loops(matrix: Tensor) -> Tensor:
    """One loop where there is none."""
    return matrix + torch.diag((matrix.diagonal() == 0).double())


def propagation(layer: nn.Module, graph: Graph) -> Tensor:
    """The matrix of a layer's middle phase, attention aside."""
    if isinstance(layer, GCNConv):
        matrix = with_loops(dense(graph, weighted=True))
        root = matrix.sum(1).rsqrt()
        return root[:, None] * matrix * root
    matrix = dense(graph)
    if isinstance(layer, SAGEConv):
        return matrix / matrix.sum(1).clamp(min=1)[:, None]
    return matrix


def expected(layer: nn.Module, graph: Graph, x: Tensor, steps: int) -> Tensor:
    if isinstance(layer, GATConv):
        return attention(layer, graph, x, steps)
    a = torch.linalg.matrix_power(propagation(layer, graph), steps) @ x
    if isinstance(layer, GINConv):
        y: Tensor = layer.mlp((1 + layer.eps) * x + a)
        return y
    assert isinstance(layer, GCNConv | SAGEConv)
    a = a if layer.weight is None else a @ layer.weight
    if isinstance(layer, SAGEConv):
        a = a + (x if layer.weight_self is None else x @ layer.weight_self)
    return a + layer.bias


def attention(layer: GATConv, graph: Graph, x: Tensor, steps: int) -> Tensor:
    assert layer.weight is not None
    h = (x @ layer.weight).view(len(x), layer.heads, -1)
    count = with_loops(dense(graph))
    outputs = []
    for head in range(layer.heads):
        logits = (h[:, head] @ layer.attention_dst[head])[:, None] + h[:, head] @ layer.attention_src[head]
        power = count * torch.nn.functional.leaky_relu(logits, layer.slope).exp()
        alpha = power / power.sum(1, keepdim=True)
        outputs.append(torch.linalg.matrix_power(alpha, steps) @ h[:, head])
    joined = torch.cat(outputs, 1) if layer.concat else torch.stack(outputs).mean(0)
    return joined + layer.bias


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_its_formula(make: Callable[[], nn.Module], steps: int, weighted: bool) -> None:
    torch.manual_seed(0)
    graph = make_graph(23, weighted=weighted)
    layer = make().double()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    assert graph.x is not None
    x = graph.x.double().requires_grad_()
    y = layer(GraphView.of(graph.in_edges.cast(torch.float64)), x, steps)
    wanted = expected(layer, graph, x, steps)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)

    seed = torch.randn_like(y)
    inputs = [x, *layer.parameters()]
    gradients = torch.autograd.grad(y, inputs, seed, allow_unused=True)
    for gradient, by_formula in zip(gradients, torch.autograd.grad(wanted, inputs, seed), strict=True):
        torch.testing.assert_close(gradient, by_formula, rtol=1e-10, atol=1e-10)


def test_equals_pyg() -> None:
    """GCN, SAGE, GIN and GAT with PyG's weights give PyG's rows, on a directed graph with single self loops."""
    pyg = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    source = torch.randint(0, 20, (60,))
    target = torch.randint(0, 20, (60,))
    keep = source != target
    source, target = torch.cat([source[keep], torch.tensor([4])]), torch.cat([target[keep], torch.tensor([4])])
    graph = Graph.from_edges(source, target, num_vertices=21)
    edge_index, x = torch.stack([source, target]), torch.randn(21, 7)
    view = GraphView.of(graph.in_edges)

    theirs = pyg.GCNConv(7, 4)
    ours = GCNConv(7, 4)
    ours.load_state_dict({"weight": theirs.lin.weight.t(), "bias": theirs.bias})
    torch.testing.assert_close(ours(view, x), theirs(x, edge_index))

    theirs, ours_sage = pyg.SAGEConv(7, 4), SAGEConv(7, 4)
    weights = {"weight": theirs.lin_l.weight.t(), "weight_self": theirs.lin_r.weight.t(), "bias": theirs.lin_l.bias}
    ours_sage.load_state_dict(weights)
    torch.testing.assert_close(ours_sage(view, x), theirs(x, edge_index))

    ours_gin = GINConv(7, 4)
    theirs = pyg.GINConv(ours_gin.mlp, train_eps=True)
    torch.testing.assert_close(ours_gin(view, x), theirs(x, edge_index))

    theirs, ours_gat = pyg.GATConv(7, 3, heads=2), GATConv(7, 6, heads=2)
    ours_gat.load_state_dict(
        {
            "weight": theirs.lin.weight.t(),
            "attention_src": theirs.att_src[0],
            "attention_dst": theirs.att_dst[0],
            "bias": theirs.bias,
        }
    )
    torch.testing.assert_close(ours_gat(view, x), theirs(x, edge_index))
