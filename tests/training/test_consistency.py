"""Ranks that were started apart, as under torchrun, start from the same weights, or say what is not the same."""

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


def own_model(graph: Graph, seed: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return weft.nn.GCN(graph.num_features, out_width=graph.num_classes, hidden=8, norm="batch").double()


def train_own(group: Group, out: Path, strategy: str) -> dict[str, torch.Tensor]:
    """A run of a module that each rank has drawn for itself; the weights that it has afterwards."""
    graph = weft.load("digits")
    model = own_model(graph, seed=group.rank)
    weft.train(graph, model, out=out, strategy=strategy, workers=group.size, epochs=4, quiet=True)
    return dict(model.state_dict())


@pytest.mark.parametrize("strategy", ["tensor", "hybrid"])
def test_ranks_start_from_rank_0s_weights(tmp_path: Path, strategy: str) -> None:
    first, second = on_ranks(2, train_own, tmp_path / "joined", strategy)
    for name, values in first.items():
        assert torch.equal(values, second[name]), name
    graph = weft.load("digits")
    weft.train(graph, own_model(graph, seed=0), out=tmp_path / "single", epochs=4, quiet=True)
    assert losses(tmp_path / "joined") == pytest.approx(losses(tmp_path / "single"), abs=1e-9)


def train_unlike(group: Group, out: Path, what: str) -> str:
    """What is said where rank 1 differs in one thing."""
    graph = weft.load("digits")
    options: dict[str, Any] = {"lr": 0.01, "hidden": 16}
    if group.rank and what == "edges":
        source, target = (one[:-100] for one in graph.in_edges.edges())
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
    ("what", "said"),
    [
        ("edges", "rank 1 has a graph of vertices and edges"),
        ("features", "rank 1 has rows x with digest"),
        ("lr", "rank 1 has --lr 0.02, but rank 0 has 0.01: "),
        ("hidden", "rank 1 has --hidden 17, but rank 0 has 16: "),
    ],
)
def test_what_is_not_the_same_is_said_by_every_rank(tmp_path: Path, what: str, said: str) -> None:
    first, second = on_ranks(2, train_unlike, tmp_path / "out", what)
    assert first == second
    assert said in first
    assert "\n" not in first
    assert not (tmp_path / "out").exists()


def train_where_it_is_not(group: Group, folder: Path, others: str) -> str:
    """What is said where rank 1 has no graph, and rank 0 another of `others`."""
    name = "nowhere.npz" if group.rank else others
    with pytest.raises(InputError) as caught:
        weft.train(folder / name, strategy="tensor", workers=group.size, epochs=2, out=folder / "out", quiet=True)
    return str(caught.value)


def test_what_one_host_lacks_is_said_by_every_rank(tmp_path: Path) -> None:
    """Before they wait for each other: rank 0 would not hear of it otherwise, and give up after --timeout."""
    weft.load("digits").save(tmp_path / "graph")
    mistake = f"{tmp_path}/nowhere.npz: no such file or folder: check the path"
    said = on_ranks(2, train_where_it_is_not, tmp_path, "graph")
    assert said == [f"on {socket.gethostname()} (rank 1): {mistake}"] * 2
    assert on_ranks(2, train_where_it_is_not, tmp_path, "nowhere.npz") == [mistake] * 2
    assert not (tmp_path / "out").exists()


def test_the_mistakes_of_several_hosts_are_one_line() -> None:
    told = [{"host": host, "error": mistake} for host, mistake in (("a", ""), ("b", "x"), ("b", "x"), ("c", "y"))]
    assert combined_errors(told) == "on b (ranks 1, 2): x; on c (rank 3): y"
    assert combined_errors(told[1:3]) == "x"
    assert combined_errors(told[:1]) == ""
