"""Every layer equals its formula on a dense adjacency matrix, and the layer of PyG that has the same name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.lib.graphs import make_graph
from weft.data import Graph
from weft.nn import GATConv, GATv2Conv, GCNConv, GINConv, GraphView, SAGEConv, Topology

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
    lambda: GATConv(7, 6, heads=3, edge_width=2),
    lambda: GATv2Conv(7, 6, heads=3),
    lambda: GATv2Conv(7, 5, heads=2, concat=False, edge_width=2),
    lambda: GATv2Conv(7, 7, heads=1, update=False),
]


def dense(graph: Graph, *, weighted: bool = False) -> Tensor:
    """Return the dense adjacency matrix A: A[v, u] is the number, or the total weight, of edges u -> v."""
    matrix = torch.zeros(graph.num_vertices, graph.num_vertices, dtype=torch.float64)
    source, target = graph.in_edges.edges()
    weight = (
        graph.in_edges.weight.double() if weighted and graph.in_edges.weight is not None else torch.ones(len(source))
    )
    matrix.index_put_((target, source), weight.double(), accumulate=True)
    return matrix


def with_loops(matrix: Tensor) -> Tensor:
    """Add a loop of weight 1 to every vertex without a loop."""
    return matrix + torch.diag((matrix.diagonal() == 0).double())


def propagation(layer: nn.Module, graph: Graph) -> Tensor:
    """Return the propagation matrix of a layer without attention."""
    if isinstance(layer, GCNConv):
        matrix = with_loops(dense(graph, weighted=True))
        root = matrix.sum(1).rsqrt()
        return root[:, None] * matrix * root
    matrix = dense(graph)
    if isinstance(layer, SAGEConv):
        return matrix / matrix.sum(1).clamp(min=1)[:, None]
    return matrix


def expected(layer: nn.Module, graph: Graph, x: Tensor, steps: int) -> Tensor:
    if isinstance(layer, GATConv | GATv2Conv):
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


def attention(layer: GATConv | GATv2Conv, graph: Graph, x: Tensor, steps: int) -> Tensor:
    """Compute an attention layer from a list of edges, one head at a time; vertices without a loop get one."""
    source, target = graph.in_edges.edges()
    loops = (with_loops(dense(graph)) - dense(graph)).diagonal().nonzero().view(-1)
    features = graph.edge_features.double() if graph.edge_features is not None else x.new_zeros(len(source), 0)
    others = [(target == v) & (source != v) for v in range(graph.num_vertices)]
    means = torch.stack([features[edges].mean(0) if edges.any() else 0 * features[0] for edges in others])
    features = torch.where((source == target)[:, None], means[target], features)
    source, target = torch.cat([source, loops]), torch.cat([target, loops])
    features = torch.cat([features, means[loops]])

    h = x if layer.weight is None else x @ layer.weight
    mapped = features @ layer.weight_edge if layer.weight_edge is not None else h.new_zeros(len(features), h.shape[1])
    outputs = []
    for head, columns in enumerate(torch.arange(h.shape[1]).chunk(layer.heads)):
        rows, edge_terms = h[:, columns], mapped[:, columns]
        if isinstance(layer, GATConv):
            logits = rows[source] @ layer.attention_src[head] + rows[target] @ layer.attention_dst[head]
            logits = logits + edge_terms @ layer.attention_edge[head] if layer.attention_edge is not None else logits
            logits = torch.nn.functional.leaky_relu(logits, layer.slope)
        else:
            right = (x @ layer.weight_right)[:, columns]
            both = torch.nn.functional.leaky_relu(rows[source] + right[target] + edge_terms, layer.slope)
            logits = both @ layer.attention[head]
        power = x.new_zeros(len(x), len(x)).index_put((target, source), logits.exp(), accumulate=True)
        alpha = power / power.sum(1, keepdim=True)
        outputs.append(torch.linalg.matrix_power(alpha, steps) @ rows)
    joined = torch.cat(outputs, 1) if layer.concat else torch.stack(outputs).mean(0)
    return joined + layer.bias


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_the_dense_formula(make: Callable[[], nn.Module], steps: int, weighted: bool) -> None:
    torch.manual_seed(0)
    graph = make_graph(23, weighted=weighted, edge_features=2)
    layer = make().double()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    assert graph.x is not None
    x = graph.x.double().requires_grad_()
    view = GraphView(Topology(graph.in_edges.cast(torch.float64), None, graph.edge_features, torch.float64))
    y = layer(view, x, steps)
    wanted = expected(layer, graph, x, steps)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)

    seed = torch.randn_like(y)
    inputs = [x, *layer.parameters()]
    gradients = torch.autograd.grad(y, inputs, seed, allow_unused=True)
    for gradient, by_formula in zip(gradients, torch.autograd.grad(wanted, inputs, seed), strict=True):
        torch.testing.assert_close(gradient, by_formula, rtol=1e-10, atol=1e-10)


def test_equals_pyg() -> None:
    """GCN, SAGE, GIN and GAT equal PyG's layers with the same weights, on a directed graph with one self-loop."""
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


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("edge_width", [0, 3])
@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])
def test_attention_equals_pyg(kind: str, edge_width: int, concat: bool) -> None:
    """Attention layers with PyG's weights have PyG's results and gradients, on a graph with a self-loop."""
    pyg = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    sampled = make_graph(23, edge_features=3)
    source, target = sampled.in_edges.edges()
    keep = source != target  # PyG counts a repeated self-loop once
    keep[(~keep).nonzero()[0]] = True
    assert sampled.edge_features is not None
    graph = Graph.from_edges(source[keep], target[keep], num_vertices=23, edge_features=sampled.edge_features[keep])
    assert graph.edge_features is not None
    edge_index, features = torch.stack(graph.in_edges.edges()), graph.edge_features.double()
    theirs = getattr(pyg, kind)(7, 4, heads=2, concat=concat, edge_dim=edge_width or None).double()
    ours_kind = {"GATConv": GATConv, "GATv2Conv": GATv2Conv}[kind]
    ours = ours_kind(7, 8 if concat else 4, heads=2, concat=concat, edge_width=edge_width).double()
    pairs = {"bias": "bias"}
    if kind == "GATConv":
        pairs |= {"weight": "lin.weight", "attention_src": "att_src", "attention_dst": "att_dst"}
        pairs |= {"weight_edge": "lin_edge.weight", "attention_edge": "att_edge"} if edge_width else {}
    else:
        pairs |= {"weight": "lin_l.weight", "weight_right": "lin_r.weight", "attention": "att"}
        pairs |= {"weight_edge": "lin_edge.weight"} if edge_width else {}
        for part in (theirs.lin_l, theirs.lin_r):
            nn.init.zeros_(part.bias)

    def as_ours(name: str, tensor: Tensor) -> Tensor:
        return tensor[0] if name.startswith("attention") else tensor.t() if name.startswith("weight") else tensor

    parameters = dict(theirs.named_parameters())
    ours.load_state_dict({name: as_ours(name, parameters[other].detach()) for name, other in pairs.items()})
    x = torch.randn(23, 7, dtype=torch.float64, requires_grad=True)
    y = ours(GraphView.of(graph.in_edges, edge_features=features), x)
    expected_rows = theirs(x, edge_index, edge_attr=features if edge_width else None)
    torch.testing.assert_close(y, expected_rows)
    grad = torch.randn_like(y)
    names = list(pairs)
    our_gradients = torch.autograd.grad(y, [x, *(ours.get_parameter(name) for name in names)], grad)
    their_gradients = torch.autograd.grad(expected_rows, [x, *(parameters[pairs[name]] for name in names)], grad)
    torch.testing.assert_close(our_gradients[0], their_gradients[0])
    for name, gradient, expected_gradient in zip(names, our_gradients[1:], their_gradients[1:], strict=True):
        torch.testing.assert_close(
            gradient, as_ours(name, expected_gradient), msg=lambda text, name=name: f"{name}\n{text}"
        )
