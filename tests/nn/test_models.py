"""Stacks, normalizations, dropout, and the order of a layer's linear transform and aggregate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.lib.graphs import make_graph
from weft.config.config import ModelOptions
from weft.nn import Attend, BatchNorm, GCNConv, GraphView, Inputs, RowLayer, Stack, Topology, from_options, make_model
from weft.nn.layers.activation import elu
from weft.nn.workload.outline import outline
from weft.utils.errors import InputError


def test_batch_norm_equals_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(23, 5, dtype=torch.float64)
    view = GraphView.of(make_graph(23).in_edges)
    ours, theirs = BatchNorm(5).double(), torch.nn.BatchNorm1d(5).double()
    for _ in range(3):
        torch.testing.assert_close(ours(view, x), theirs(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    ours.eval()
    spread = (ours.running_var + ours.eps).sqrt()
    torch.testing.assert_close(ours(view, x), (x - ours.running_mean) / spread)


def test_weights_depend_on_the_seed_alone() -> None:
    def weights(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        torch.manual_seed(seed + 100)  # the global state must not matter
        model = from_options(ModelOptions(), 7, 3, seed=seed, dtype=dtype)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert torch.equal(weights(1).double(), weights(1, torch.float64))
    assert not torch.equal(weights(1), weights(2))


def test_dropout_depends_on_its_key() -> None:
    adjacency = make_graph(23).in_edges
    x = torch.ones(23, 50)

    def masks(key: int) -> tuple[Tensor, Tensor]:
        view = GraphView.of(adjacency, key=key)
        return view.dropout(x, 0.5), view.dropout(x, 0.5)

    assert torch.equal(masks(1)[0], masks(1)[0])
    assert not torch.equal(*masks(1))
    assert not torch.equal(masks(1)[0], masks(2)[0])


@pytest.mark.parametrize(("in_width", "out_width"), [(7, 3), (7, 30)])
def test_the_cheaper_order_is_used(in_width: int, out_width: int) -> None:
    """Aggregates run on the narrower rows, and only once on constant features, with equal results."""
    graph = make_graph(23)
    x = torch.randn(23, in_width, dtype=torch.float64)
    layer = GCNConv(in_width, out_width).double()
    view = GraphView.of(graph.in_edges)
    y = layer(view, x)
    assert view.meter.take("setup").edges == graph.num_edges * min(in_width, out_width)

    cached = GraphView(Topology(graph.in_edges), inputs=Inputs(rows=x))
    first, again = layer(cached, x), layer(cached, x)
    assert cached.meter.take("setup").edges == graph.num_edges * in_width
    torch.testing.assert_close(first, y)
    assert torch.equal(first, again)


def test_residual_needs_equal_widths() -> None:
    stack = Stack([RowLayer(torch.nn.Linear(4, 4), 4), RowLayer(torch.nn.Linear(4, 2), 2)], residual=True)
    view = GraphView.of(make_graph(23).in_edges)
    x = torch.randn(23, 4)
    first, second = (layer.update for layer in stack.layers)
    torch.testing.assert_close(stack([view, view], x), second(torch.relu(first(x)) + x))


def test_outline_reads_a_model_without_data() -> None:
    operations, width = outline(
        make_model("gat", 7, 3, hidden=8, heads=4, decoupled=True, layers=5),
        num_vertices=10**9,
        num_features=7,
        training=True,
    )
    (operation,) = operations
    assert width == 3
    assert isinstance(operation.op, Attend)
    assert (operation.width, operation.op.heads, operation.steps) == (12, 4, 5)
    assert operation.backward


@pytest.mark.parametrize("model", ["gat", "gatv2"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_attention_weights_are_dropped_only_in_training(model: str, decoupled: bool) -> None:
    """Masks depend on the key. An evaluation equals that of the model without dropout."""
    graph, options = make_graph(23), {"hidden": 8, "heads": 2, "decoupled": decoupled, "dropout": 0.0}
    models = []
    for p in (0.5, 0.0):
        torch.manual_seed(0)
        models.append(make_model(model, 7, 3, attention_dropout=p, **options))
    assert graph.x is not None

    def rows(module: torch.nn.Module, key: int) -> torch.Tensor:
        views = [GraphView.of(graph.in_edges, key=key) for _ in range(module.num_stages)]
        result: torch.Tensor = module(views, graph.x)
        return result

    dropping, plain = models
    assert torch.equal(rows(dropping, 1), rows(dropping, 1))
    assert (rows(dropping, 1) - rows(dropping, 2)).abs().max() > 1e-3
    assert (rows(dropping, 1) - rows(plain, 1)).abs().max() > 1e-3
    assert torch.equal(rows(dropping.eval(), 1), rows(plain, 2))


def test_a_custom_layer_drops_the_same_attention_weights() -> None:
    """Views with equal keys generate equal masks; each call in a view has another mask."""
    graph, h = make_graph(23), torch.randn(23, 6, dtype=torch.float64)
    edges, logits = graph.in_edges, torch.randn(23, 2, dtype=torch.float64)
    views = [GraphView.of(edges, key=5) for _ in range(2)]
    first, second = (view.attend(h, logits, logits, slope=0.2, dropout=0.5) for view in views)
    assert torch.equal(first, second)
    assert not torch.equal(first, views[0].attend(h, logits, logits, slope=0.2, dropout=0.5))
    attention = torch.ones(2, 1, dtype=torch.float64)
    by_edges = GraphView.of(edges, key=5).attend_edges(h, logits, logits, attention, slope=0.2, dropout=0.5)
    torch.testing.assert_close(by_edges, first)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InputError, match="unknown model 'gcm': did you mean 'gcn'"):
        make_model("gcm", 7, 3)
    with pytest.raises(InputError, match="--hidden 10 is not a multiple of --heads 4: use 12"):
        make_model("gat", 7, 3, hidden=10)
    with pytest.raises(
        InputError, match="--edge-attention only works with gat and gatv2, and gin has no attention: leave it out"
    ):
        make_model("gin", 7, 3, edge_width=2)
    with pytest.raises(InputError, match="--attention-dropout only works with gat and gatv2, and sage"):
        make_model("sage", 7, 3, attention_dropout=0.5)
    with pytest.raises(InputError, match="--edge-attention: the graph has no edge features"):
        from_options(ModelOptions(model="gat", edge_attention=True), 7, 3, seed=0, dtype=torch.float32)


@pytest.mark.parametrize("model", ["gat", "gatv2"])
@pytest.mark.parametrize(
    ("num_features", "message"), [(0, "the graph has none: give"), (2, "create it with edge_width=2")]
)
def test_missing_edge_features_are_an_error_before_the_run(model: str, num_features: int, message: str) -> None:
    attending = make_model(model, 7, 3, hidden=8, edge_width=3)
    with pytest.raises(InputError, match=message):
        outline(attending, num_vertices=9, num_features=7, num_edge_features=num_features, training=True)


def test_edge_features_have_no_effect_without_edge_attention() -> None:
    graph = make_graph(23, edge_features=3)
    options = ModelOptions(model="gatv2", edge_attention=True, dropout=0.0)
    plain, attending = (
        from_options(chosen, 7, 3, seed=0, dtype=torch.float32, edge_width=3)
        for chosen in (replace(options, edge_attention=False), options)
    )
    assert graph.x is not None
    assert graph.edge_features is not None
    for model, same in ((plain, True), (attending, False)):
        first, second = (
            model([GraphView.of(graph.in_edges, edge_features=features)] * 2, graph.x)
            for features in (graph.edge_features, graph.edge_features.flip(0))
        )
        assert torch.equal(first, second) == same


def test_elu_equals_torch() -> None:
    x = torch.randn(50, 7, dtype=torch.float64, requires_grad=True)
    y, expected = elu(x), torch.nn.functional.elu(x)
    assert torch.equal(y, expected)
    grad = torch.randn_like(x)
    gradient, expected_gradient = (torch.autograd.grad(result, x, grad)[0] for result in (y, expected))
    torch.testing.assert_close(gradient, expected_gradient)
