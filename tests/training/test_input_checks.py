"""Warnings and errors before a run starts: ignored edge weights, operations that a GPU has no kernel for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, weight_norm

import weft
from weft.config.config import Config
from weft.data import DataWarning, Graph
from weft.nn import GATConv, GCNConv, PyGConv, RowLayer, Stack, from_pyg, make_model
from weft.training.input_checks import check
from weft.training.rank import make_workload
from weft.utils.errors import InputError


@pytest.fixture
def weighted() -> Graph:
    graph = weft.load("digits")
    weight = torch.rand(graph.num_edges) + 0.5
    return dataclasses.replace(graph, in_edges=graph.in_edges.with_weight(weight))


def test_a_run_warns_once_that_weights_are_ignored(weighted: Graph, tmp_path: Path) -> None:
    options = {"quiet": True, "epochs": 1, "hidden": 8, "strategy": "communicated"}
    with pytest.warns(DataWarning, match="digits has edge weights, which are ignored by SAGEConv: use gcn") as caught:
        weft.train(weighted, "sage", out=tmp_path / "sage", **options)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert caught[0].filename == __file__
    weft.train(weighted, "gcn", out=tmp_path / "gcn", **options)  # another warning would be an error here


def check_run(name: str, graph: Graph, model: torch.nn.Module) -> None:
    """Run the checks that precede a run on one rank."""
    config = Config(graph=name)
    check(config, make_workload(config, graph, model), launched=False)


def ignored(graph: Graph, model: torch.nn.Module) -> str:
    with pytest.warns(DataWarning) as caught:
        check_run("digits", graph, model)
    (warning,) = caught
    return str(warning.message).partition(" ignored by ")[2].partition(":")[0]


def test_the_layers_that_ignore_weights_are_named(weighted: Graph) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    layers = [GCNConv(64, 8), GATConv(8, 8, heads=2), from_pyg(pyg.SAGEConv(8, 8)), GATConv(8, 10, heads=2)]
    assert ignored(weighted, Stack(layers, norm="batch")) == "GATConv and SAGEConv"
    assert ignored(weighted, make_model("gin", 64, 10, decoupled=True)) == "GINConv"
    assert ignored(weighted, Stack([RowLayer(torch.nn.Linear(64, 10), 10)])) == "the model"


def test_no_warning_if_weights_are_used_or_absent(weighted: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    layers: list[torch.nn.Module] = [PyGConv(pyg.GraphConv(64, 8), 8), GCNConv(8, 10)]
    check_run("digits", weighted, Stack(layers))
    check_run("digits", weighted, make_model("gcn", 64, 10, decoupled=True))
    check_run("digits", weft.load("digits"), make_model("sage", 64, 10))
    monkeypatch.setenv("RANK", "1")  # rank 0 of torchrun prints the warning
    check_run("digits", weighted, make_model("sage", 64, 10))


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"model": "gat"}, "GATConv"),
        ({"dropout": 0.5}, "--dropout 0.5"),
        ({"input_dropout": 0.2}, "--input-dropout 0.2"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
    ],
)
def test_a_gpu_without_triton_computes_only_sums(
    options: dict[str, Any], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("weft.training.input_checks.triton_backend", lambda: None)
    graph, config = weft.load("digits"), Config(graph="digits", device="cuda", dropout=0.0)
    check(config, make_workload(config, graph, make_model("gcn", 64, 10)), launched=False)
    with pytest.raises(InputError, match=f"{cause}: attention, maxima, dropout and bfloat16 on a GPU need Triton"):
        weft.train(graph, device="cuda", out=tmp_path / "run", quiet=True, **{"dropout": 0.0, **options})
    assert not (tmp_path / "run").exists()


class Conv(torch.nn.Module):
    """Model with a linear layer of PyG and one of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        pyg = pytest.importorskip("torch_geometric.nn")
        self.conv, self.linear = pyg.SAGEConv(64, 16), torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.conv(x, edge_index).relu())
        return y


def test_a_parametrized_layer_is_restored_or_refused_before_the_run(tmp_path: Path) -> None:
    model = Conv()
    parametrizations.weight_norm(model.linear)
    weft.train("digits", model, out=tmp_path / "run", quiet=True, epochs=1)
    parametrizations.weight_norm(model.conv.lin_l)
    with pytest.raises(InputError, match=r'Unexpected key.*"conv\.lin_l\.weight".*; PyG\'s Linear does not support it'):
        weft.train("digits", model, out=tmp_path / "none", quiet=True)
    with pytest.warns(FutureWarning):
        layer = weight_norm(GCNConv(64, 10))
    with pytest.raises(InputError, match=r"support the deepcopy protocol .* use torch\.nn\.utils\.parametrizations"):
        weft.train("digits", Stack([layer]), out=tmp_path / "none", quiet=True)
    assert not (tmp_path / "none").exists()
