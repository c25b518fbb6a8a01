"""Runs of models written for PyG: given to `weft.train` as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import weft
from weft.core.errors import InputError

pyg = pytest.importorskip("torch_geometric.nn")

OPTIONS: dict[str, Any] = {"epochs": 4, "quiet": True, "dtype": "float64"}


class Net(nn.Module):
    def __init__(self, dropout: bool = True) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg.SAGEConv(64, 16), pyg.SAGEConv(16, 10)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.5 if dropout else 0.0)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.dropout(self.norm(self.conv1(x, edge_index)).relu()), edge_index)


class Drawn(Net):
    """Noise of its own."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(torch.nn.functional.rrelu(-x, training=True), edge_index)


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("strategy", ["tensor", "hybrid", pytest.param("split", marks=pytest.mark.slow)])
def test_trains_as_it_is_on_several_ranks(strategy: str, tmp_path: Path) -> None:
    """With the losses of one rank; the person's own module has the best weights, in the file under PyG's names."""
    model, options = net(), dict(OPTIONS)
    if strategy == "split":
        options |= {"batch_size": "all", "fanout": "all"}
    run = weft.train("digits", model, strategy=strategy, workers=2, out=tmp_path / "run", **options)
    alone = weft.train("digits", net(), strategy=strategy, out=tmp_path / "alone", **options)
    pairs = zip(_losses(run), _losses(alone), strict=True)
    assert all(abs(one - other) < 1e-9 for one, other in pairs)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == net().state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=0)
    assert not torch.equal(model.conv1.lin_l.weight, net().conv1.lin_l.weight)


def test_equals_a_script_of_pyg(tmp_path: Path) -> None:
    """Four epochs of Adam without dropout: losses, and the accuracy of the saved weights."""
    graph = weft.load("digits")
    model, own = Net(dropout=False).double(), Net(dropout=False).double()
    own.load_state_dict(model.state_dict())
    run = weft.train(graph, model, out=tmp_path / "run", **OPTIONS)
    x, edge_index = graph.x.double(), torch.stack(graph.in_edges.edges())
    optimizer = torch.optim.Adam(own.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        logits = own.train()(x, edge_index)
        loss = nn.functional.cross_entropy(logits[graph.train_mask], graph.y[graph.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(torch.tensor(_losses(run)), torch.tensor(losses), rtol=1e-9, atol=1e-9)


def test_noise_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gives other numbers when called again"):
        weft.train("digits", net(Drawn), out=tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()


def _losses(run: Any) -> list[float]:
    return [line["loss"] for line in run.records if line["kind"] == "epoch"]
