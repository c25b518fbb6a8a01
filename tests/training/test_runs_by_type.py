"""Training of unchanged PyG models for HeteroData with `weft.train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.lib.graphs import NUM_CLASSES, make_named_relations, make_typed_graph
from weft.utils.errors import InputError

pytest.importorskip("torch_geometric.nn")

from benchmarks.pyg_models import SMALL, Hetero, to_hetero

OPTIONS: dict[str, Any] = {"epochs": 3, "quiet": True, "dtype": "float64"}


class Still(Hetero):
    """Model without dropout."""

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        self.training = False
        return super().forward(x_dict, edge_index_dict)


class Coupled(Still):
    """Model that subtracts the mean over all vertices of a type."""

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        return super().forward({name: x - x.mean(0) for name, x in x_dict.items()}, edge_index_dict)


class Counting(Still):
    """Model that multiplies by the number of vertices of a type."""

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        y = super().forward(x_dict, edge_index_dict)
        return y * y.shape[0]


def graph(kind: str = "x") -> weft.Graph:
    return make_named_relations(make_typed_graph(23, kind))


def net(kind: type[Hetero] = Hetero, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(SMALL, **options).double()


def losses(run: weft.Run) -> list[float]:
    return [line["loss"] for line in run.history]


def check_losses(run: weft.Run, reference: nn.Module) -> None:
    """Check that losses equal those of Adam in plain PyG, from the same weights."""
    data = graph().to_pyg()
    x_dict = {name: x.double() for name, x in data.x_dict.items()}
    optimizer, expected = torch.optim.Adam(reference.parameters(), lr=0.01, weight_decay=5e-4), []
    mask = data["a"].train_mask
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(reference(x_dict, data.edge_index_dict)[mask], data["a"].y[mask])
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    torch.testing.assert_close(torch.tensor(losses(run)), torch.tensor(expected), rtol=1e-9, atol=1e-9)


def test_equals_a_script_of_pyg(tmp_path: Path) -> None:
    """Without dropout, and with features of equal width for all types."""
    check_losses(weft.train(graph(), net(Still), out=tmp_path / "run", **OPTIONS), net(Still))


@pytest.mark.parametrize("kind", [pytest.param("x", marks=pytest.mark.slow), "some"])
def test_trains_and_predicts_on_several_ranks(kind: str, tmp_path: Path) -> None:
    """Losses equal those on one rank, with features of equal and of different widths.

    Logits are the model's, and zero for vertices of types for which it returns none.
    """
    widths = {"features": {"a": 4, "b": 3}} if kind == "some" else {}
    model, whole = net(**widths), graph(kind)
    run = weft.train(whole, model, strategy="tensor", workers=2, out=tmp_path / "two", **OPTIONS)
    alone = weft.train(whole, net(**widths), out=tmp_path / "one", **OPTIONS)
    torch.testing.assert_close(torch.tensor(losses(run)), torch.tensor(losses(alone)), rtol=1e-9, atol=1e-9)
    logits = weft.predict(run, whole, model=net(**widths), strategy="single", workers=1)
    data = whole.to_pyg()
    with torch.no_grad():
        x_dict = {name: x.double() for name, x in data.x_dict.items()}
        expected = model.eval()(x_dict, data.edge_index_dict)
    torch.testing.assert_close(logits[: len(expected)], expected, rtol=1e-9, atol=1e-9)
    assert not logits[len(expected) :].any()
    with pytest.raises(InputError, match="no convolution over all vertices"):
        weft.predict(run, whole, model=net(**widths), what="embeddings")


def test_logits_of_every_type() -> None:
    """A model by `to_hetero`, which returns a dict, has logits for every type; a model that lacks some is refused."""
    y = torch.arange(23) % NUM_CLASSES
    labelled = replace(graph(), y=y, train_mask=torch.arange(23) % 2 == 0, val_mask=torch.arange(23) % 2 == 1)
    weft.train(labelled, to_hetero().double(), **OPTIONS)
    with pytest.raises(
        InputError, match=r"returns rows of a, but .* has vertices of type b to train or score: return a dict"
    ):
        weft.train(labelled, net(), **OPTIONS)


@pytest.mark.parametrize("kind", [Coupled, Counting])
def test_rows_that_depend_on_others_of_their_type(kind: type[Hetero], tmp_path: Path) -> None:
    """A model that mixes the vertices of a type outside of message passing trains as in PyG on one rank only."""
    check_losses(weft.train(graph(), net(kind), **OPTIONS), net(kind))
    with pytest.raises(InputError, match=r"mixes vertices outside of message passing.* or --strategy single"):
        weft.train(graph(), net(kind), out=tmp_path / "run", strategy="communicated", workers=2, **OPTIONS)
    assert not (tmp_path / "run").exists()
