"""Modules whose rows depend on each other or on chance are detected anywhere in a model, and named."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional

import weft
from tests.lib.graphs import NUM_CLASSES, NUM_FEATURES, make_graph, make_typed_graph
from weft.nn import Stack, View, Workload, check_row_independence, from_pyg, idle_parameters, make_model
from weft.utils.errors import InputError

WIDTH = 8


class Layer(nn.Module):
    """A custom layer that contains an arbitrary function of rows."""

    def __init__(self, in_width: int, out_width: int, part: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.out_width = out_width
        self.map = nn.Linear(in_width, out_width)
        self.part = part if part is not None else nn.Identity()

    def forward(self, view: View, x: Tensor) -> Tensor:
        h = self.part(self.map(x))
        return view.propagate(h, reduce="mean") + view.targets(h)


class Noisy(nn.Module):
    """Adds noise to rows, also in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-6 * torch.rand_like(x)


class Counting(nn.Module):
    """Changes itself whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def work(part: Any = None, **options: Any) -> Workload:
    torch.manual_seed(1)
    layers = [Layer(NUM_FEATURES, WIDTH, part), Layer(WIDTH, NUM_CLASSES)]
    return Workload(Stack(layers, dropout=0.5, input_dropout=0.3, **options), make_graph(23))


COUPLED: dict[str, Any] = {
    "BatchNorm1d": nn.BatchNorm1d(WIDTH),
    "nested": nn.Sequential(nn.ReLU(), nn.BatchNorm1d(WIDTH)),
    "without running statistics": nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "pyg BatchNorm": pyg.BatchNorm(WIDTH),
    "GraphNorm": pyg.GraphNorm(WIDTH),
    "PairNorm": pyg.PairNorm(),
    "pyg InstanceNorm": pyg.InstanceNorm(WIDTH),
    "pyg LayerNorm": pyg.LayerNorm(WIDTH),
    "DiffGroupNorm": pyg.DiffGroupNorm(WIDTH, 2),
    "MeanSubtractionNorm": pyg.MeanSubtractionNorm(),
    "GraphSizeNorm": pyg.GraphSizeNorm(),
    "centred": lambda x: x - x.mean(0),
    "softmax over rows": lambda x: x.softmax(0),
    "largest": lambda x: x / x.amax(0),
    "number of rows": lambda x: x * len(x),
    "position": lambda x: x + torch.arange(len(x))[:, None],
    "sorted": lambda x: x.sort(0).values,
}
RANDOM: dict[str, Any] = {
    "Dropout": nn.Dropout(0.5),
    "nested Dropout": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)),
    "AlphaDropout": nn.AlphaDropout(0.1),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.1),
    "RReLU": nn.RReLU(),
    "functional": lambda x: functional.dropout(x, 0.5),
    "gumbel": lambda x: functional.gumbel_softmax(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "rand": Noisy(),
    "numpy": lambda x: x * float(np.random.random()),
    "random": lambda x: x * random.random(),
    "state": Counting(),
    "node dropout": lambda x: x * (torch.rand(len(x), 1) > 0.5),
}
INDEPENDENT: dict[str, Any] = {
    "Identity": nn.Identity(),
    "LayerNorm": nn.LayerNorm(WIDTH),
    "GroupNorm": nn.GroupNorm(2, WIDTH),
    "RMSNorm": nn.RMSNorm(WIDTH),
    "pyg LayerNorm of vertices": pyg.LayerNorm(WIDTH, mode="node"),
    "PReLU": nn.PReLU(),
    "Dropout of 0": nn.Dropout(0.0),
    "softmax of a row": lambda x: x.softmax(1),
    "MLP": pyg.MLP([WIDTH, WIDTH], norm=None),
}


@pytest.mark.parametrize("name", COUPLED)
def test_rows_that_depend_on_others_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="mixes vertices outside of message passing"):
        check_row_independence(work(COUPLED[name]), all_rows=False)
    check_row_independence(work(COUPLED[name]), all_rows=True)


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("all_rows", [False, True])
def test_random_calls_are_refused(name: str, all_rows: bool) -> None:
    with pytest.raises(InputError, match="returns different results when it is called again"):
        check_row_independence(work(RANDOM[name]), all_rows=all_rows)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_are_accepted(name: str) -> None:
    for norm in ("none", "layer", "batch"):
        check_row_independence(work(INDEPENDENT[name], norm=norm, residual=True), all_rows=False)


def test_the_innermost_module_is_named() -> None:
    with pytest.raises(InputError, match=r"^BatchNorm1d \(layers\.0\.part\.1\) "):
        check_row_independence(work(COUPLED["nested"]), all_rows=False)
    with pytest.raises(InputError, match=r"^Dropout \(layers\.0\.part\.1\) "):
        check_row_independence(work(RANDOM["nested Dropout"]), all_rows=False)
    with pytest.raises(InputError, match=r"^Layer \(layers\.0\) "):
        check_row_independence(work(RANDOM["functional"]), all_rows=False)


@pytest.mark.parametrize("model", [*weft.nn.MODELS, "rgcn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_of_weft_are_accepted(model: str, dtype: torch.dtype) -> None:
    relational = model == "rgcn"
    graph = make_typed_graph(23, "some") if relational else make_graph(23, weighted=True, edge_features=3)
    width = 0 if relational else NUM_FEATURES
    network = make_model(
        model, width, NUM_CLASSES, hidden=8, layers=3, norm="batch", input_dropout=0.3, typed=graph.typed
    ).to(dtype)
    check_row_independence(Workload(network, graph), all_rows=False)


@pytest.mark.parametrize("name", ["SAGEConv", "GATv2Conv", "TransformerConv", "GraphConv", "ResGatedGraphConv"])
def test_pyg_convolutions_are_accepted(name: str) -> None:
    layers = [from_pyg(getattr(pyg, name)(NUM_FEATURES, WIDTH)), from_pyg(getattr(pyg, name)(WIDTH, NUM_CLASSES))]
    check_row_independence(Workload(Stack(layers), make_graph(23, weighted=True, edge_features=3)), all_rows=False)


def test_a_model_that_needs_all_rows_runs_on_one_rank_only() -> None:
    table = torch.ones(23, WIDTH)
    with pytest.raises(InputError, match="cannot run on a subset of the rows"):
        check_row_independence(work(lambda x: x + table), all_rows=False)
    check_row_independence(work(lambda x: x + table), all_rows=True)


def test_random_states_are_restored() -> None:
    workload = work()
    before = torch.get_rng_state()
    check_row_independence(workload, all_rows=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_without_effect_are_listed() -> None:
    graph = make_graph(23)

    def stack(norm: str, **options: Any) -> Workload:
        layers = [from_pyg(pyg.SAGEConv(NUM_FEATURES, WIDTH, **options)), from_pyg(pyg.SAGEConv(WIDTH, NUM_CLASSES))]
        return Workload(Stack(layers, norm=norm), graph)

    assert idle_parameters(stack("batch")) == ["layers.0.lin_l.bias"]
    assert idle_parameters(stack("batch", bias=False)) == []
    assert idle_parameters(stack("layer")) == []
    assert idle_parameters(Workload(stack("batch").model.double(), graph)) == []
