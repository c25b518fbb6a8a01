"""Runs on typed graphs: embeddings moved between strategies, PyG's HeteroData, and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import weft
from tests.lib.graphs import make_typed_graph
from tests.lib.running import train
from weft.utils.errors import InputError

OPTIONS: dict[str, Any] = {
    "hidden": 6,
    "dtype": "float64",
    "dropout": 0.3,
    "lr": 0.05,
    "checkpoint_every": 2,
    "quiet": True,
}


def losses(run: weft.Run) -> list[float]:
    return [line["loss"] for line in run.records if line["kind"] == "epoch"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_embeddings_outlive_a_change_of_strategy_and_ranks(tmp_path: Path) -> None:
    """A resumed run is the same bits on one rank, and equal to 1e-9 under other strategies on other ranks."""
    graph = make_typed_graph(23, "some")
    whole = weft.train(graph, "rgcn", out=tmp_path / "whole", epochs=6, **OPTIONS)
    best = weights(tmp_path / "whole")
    assert best["input.embedding.weight"].shape == (8, 6)

    weft.train(graph, "rgcn", out=tmp_path / "one", epochs=3, **OPTIONS)
    again = weft.train(graph, "rgcn", out=tmp_path / "one", epochs=6, resume=True, **OPTIONS)
    assert losses(again) == losses(whole)

    store, placed = tmp_path / "graph", {"out": tmp_path / "many", **OPTIONS}
    graph.save(store)
    train(store, "rgcn", epochs=2, strategy="tensor", workers=3, **placed)
    again = train(store, "rgcn", epochs=6, strategy="cached", workers=2, resume=True, **placed)
    assert losses(again) == pytest.approx(losses(whole), rel=1e-9, abs=1e-9)
    for name, value in weights(tmp_path / "many").items():
        torch.testing.assert_close(value, best[name], rtol=1e-8, atol=1e-8)


def test_another_order_gives_the_same_run(tmp_path: Path) -> None:
    graph = make_typed_graph(23, "one")
    runs = {}
    for order in ("none", "bfs"):
        model = weft.nn.RGCN(0, graph.num_classes, typed=graph.typed, hidden=6, layers=2)
        model.load_state_dict(weights(tmp_path / "none") if runs else model.state_dict())
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
        runs[order] = weft.train(graph, model, out=tmp_path / order, epochs=3, order=order, lr=0.05, quiet=True)
        assert len(model.input.embedding.weight) == 23
    assert losses(runs["bfs"]) == pytest.approx(losses(runs["none"]), rel=1e-5)
    embedded = [weights(tmp_path / order)["input.embedding.weight"] for order in runs]
    torch.testing.assert_close(*embedded, rtol=1e-4, atol=1e-4)


def test_hetero_data_trains(tmp_path: Path) -> None:
    pyg = pytest.importorskip("torch_geometric.data")
    data, random = pyg.HeteroData(), torch.Generator().manual_seed(0)
    data["user"].x, data["user"].y = torch.randn(20, 5, generator=random), torch.arange(20) % 2
    data["user"].train_mask = torch.arange(20) < 15
    data["user"].test_mask = torch.arange(20) >= 15
    data["item"].num_nodes = 9
    bought = torch.stack([torch.arange(20), (torch.arange(20) % 2) * 4 + torch.arange(20) % 4])
    data["user", "bought", "item"].edge_index = bought
    data["item", "bought_by", "user"].edge_index = bought.flip(0)
    graph = weft.Graph.from_pyg(data)
    model = weft.nn.RGCN(graph.num_features, graph.num_classes, typed=graph.typed, hidden=8, dropout=0.0)
    run = weft.train(graph, model, out=tmp_path / "run", epochs=60, lr=0.05, quiet=True)
    assert run.summary["test_accuracy"] == 1.0  # an item is bought by users of one class


def test_a_model_for_other_types_is_refused(tmp_path: Path) -> None:
    graph = make_typed_graph(23, "some")
    plain = weft.nn.GCN(7, 5)
    other = weft.nn.RGCN(0, 5, typed=make_typed_graph(31, "some").typed)
    relations = weft.nn.RGCN(0, 5, typed=graph.typed._replace(num_relations=4))
    for model, error in ((plain, "typed=graph.typed"), (other, "other vertex types"), (relations, "for 4 relations")):
        with pytest.raises(InputError, match=error):
            weft.train(graph, model, out=tmp_path / "none", quiet=True)


def test_hybrid_probes_a_typed_graph(tmp_path: Path) -> None:
    graph = make_typed_graph(60, "some")
    run = weft.train(graph, "rgcn", out=tmp_path / "run", epochs=1, strategy="hybrid", measure=True, quiet=True)
    assert run.summary["loss"] > 0


@pytest.mark.slow
def test_real_graphs(weft_data: Callable[[str], Path], tmp_path: Path) -> None:
    """Losses on one rank and on three are equal; docs/typed.md has the accuracy over ten seeds."""
    options: dict[str, Any] = {"hidden": 16, "dropout": 0.0, "weight_decay": 0.0, "inverse_relations": True}
    options |= {"epochs": 10, "quiet": True, "dtype": "float64"}
    runs = [
        train(weft_data("rdf_aifb"), "rgcn", out=tmp_path / name, **placement, **options)
        for name, placement in (("one", {}), ("three", {"strategy": "tensor", "workers": 3}))
    ]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-9, abs=1e-9)
    assert runs[0].summary["test_accuracy"] > 0.85
