"""Ranks that were started separately, as by torchrun, begin with equal weights, or name what differs between them."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.lib.ranks import on_ranks
from tests.lib.running import losses
from weft.comm import Group
from weft.data import Adjacency, Graph
from weft.training.launch.joined_ranks import combined_errors
from weft.utils.errors import InputError


def make_model(graph: Graph, seed: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return weft.nn.GCN(graph.num_features, out_width=graph.num_classes, hidden=8, norm="batch").double()


def train_with_seed_of_rank(group: Group, out: Path, strategy: str) -> dict[str, torch.Tensor]:
    """Train a module whose initial weights differ between ranks; return its weights afterwards."""
    graph = weft.load("digits")
    model = make_model(graph, seed=group.rank)
    weft.train(graph, model, out=out, strategy=strategy, workers=group.size, epochs=4, quiet=True)
    return dict(model.state_dict())


@pytest.mark.parametrize("strategy", ["tensor", "hybrid"])
def test_ranks_start_from_rank_0s_weights(tmp_path: Path, strategy: str) -> None:
    first, second = on_ranks(2, train_with_seed_of_rank, tmp_path / "joined", strategy)
    for name, values in first.items():
        assert torch.equal(values, second[name]), name
    graph = weft.load("digits")
    weft.train(graph, make_model(graph, seed=0), out=tmp_path / "single", epochs=4, quiet=True)
    assert losses(tmp_path / "joined") == pytest.approx(losses(tmp_path / "single"), abs=1e-9)


def train_with_a_difference(group: Group, out: Path, what: str) -> str:
    """Train with data or options of which one differs on rank 1; return the error."""
    graph = weft.load("digits")
    options: dict[str, Any] = {"lr": 0.01, "hidden": 16}
    if group.rank and what == "edges":
        source, target = (ids[:-100] for ids in graph.in_edges.edges())
        count = graph.num_vertices
        graph = replace(graph, in_edges=Adjacency.from_edges(source, target, num_sources=count, num_targets=count))
    elif group.rank and what == "features":
        graph = replace(graph, x=graph.x + 1)
    elif group.rank:
        options[what] = 0.02 if what == "lr" else 17
    with pytest.raises(InputError) as caught:
        weft.train(graph, out=out, strategy="tensor", workers=group.size, epochs=2, quiet=True, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("edges", "rank 1 has a graph of vertices and edges"),
        ("features", "rank 1 has rows x with digest"),
        ("lr", "rank 1 has --lr 0.02, but rank 0 has 0.01: "),
        ("hidden", "rank 1 has --hidden 17, but rank 0 has 16: "),
    ],
)
def test_every_rank_names_what_differs(tmp_path: Path, what: str, expected: str) -> None:
    first, second = on_ranks(2, train_with_a_difference, tmp_path / "out", what)
    assert first == second
    assert expected in first
    assert "\n" not in first
    assert not (tmp_path / "out").exists()


def train_on_missing_graph(group: Group, folder: Path, others: str) -> str:
    """Train on a graph that rank 1 lacks, while the other ranks open `others`; return the error."""
    name = "nowhere.npz" if group.rank else others
    with pytest.raises(InputError) as caught:
        weft.train(folder / name, strategy="tensor", workers=group.size, epochs=2, out=folder / "out", quiet=True)
    return str(caught.value)


def test_every_rank_names_the_file_that_one_host_lacks(tmp_path: Path) -> None:
    """Ranks exchange errors before they wait for each other; otherwise rank 0 would fail only after --timeout."""
    weft.load("digits").save(tmp_path / "graph")
    mistake = f"{tmp_path}/nowhere.npz: no such file or folder: check the path"
    errors = on_ranks(2, train_on_missing_graph, tmp_path, "graph")
    assert errors == [f"on {socket.gethostname()} (rank 1): {mistake}"] * 2
    assert on_ranks(2, train_on_missing_graph, tmp_path, "nowhere.npz") == [mistake] * 2
    assert not (tmp_path / "out").exists()


def test_the_mistakes_of_several_hosts_are_one_line() -> None:
    reports = [{"host": host, "error": mistake} for host, mistake in (("a", ""), ("b", "x"), ("b", "x"), ("c", "y"))]
    assert combined_errors(reports) == "on b (ranks 1, 2): x; on c (rank 3): y"
    assert combined_errors(reports[1:3]) == "x"
    assert combined_errors(reports[:1]) == ""
