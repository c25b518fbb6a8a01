"""Citation-like graphs: the same for any parts and threads, with the stated statistics at any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import weft
from weft.cli.main import main
from weft.data.io import citations
from weft.data.io.citations import PERIODS, TEST_RATIO, VALIDATION_RATIO, CitationGraph, citation_graph
from weft.runtime.native import _native
from weft.utils.errors import InputError

THOUSANDTH = "vertices=111k,edges=1.6m,features=16,classes=172"
"""A thousandth of ogbn-papers100M."""


def endpoints(graph: CitationGraph) -> tuple[Tensor, Tensor]:
    """Return the citing and the cited paper of all references."""
    parts = list(graph.edges())
    return torch.cat([part.source for part in parts]).long(), torch.cat([part.target for part in parts]).long()


def classes_of(graph: CitationGraph) -> Tensor:
    return graph.class_of_topic[torch.arange(graph.num_papers) % len(graph.class_of_topic)].long()


@pytest.mark.parametrize("scale", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_statistics_do_not_depend_on_the_size(scale: int) -> None:
    graph = citation_graph(f"vertices={111_000 * scale},edges={1_600_000 * scale},features=0,classes=172", 0)
    citing, cited = endpoints(graph)
    classes = classes_of(graph)
    assert (cited < citing).all(), "papers cite earlier papers"
    assert len(citing) == pytest.approx(graph.num_references, rel=0.02)
    assert (classes[citing] == classes[cited]).double().mean() == pytest.approx(0.76, abs=0.03)
    references = citing.bincount(minlength=graph.num_papers)
    assert (references == 0).double().mean() == pytest.approx(0.066, abs=0.005)
    citations = cited.bincount(minlength=graph.num_papers)
    assert (citations > 30).double().mean() == pytest.approx(0.082, abs=0.015)
    assert (citations > 100).double().mean() == pytest.approx(0.0091, abs=0.003)
    assert citations.max() > graph.num_papers**0.6 * 2, "the most cited paper has more citations in a larger graph"
    assert len((citing * graph.num_papers + cited).unique()) == len(citing), "no reference occurs twice"


def test_labels() -> None:
    graph = citation_graph("vertices=1m,edges=1m,features=0,classes=40,labelled=2%,flipped=25%", 3)
    y, masks = graph.labels()
    shares = [float(mask.double().mean()) for mask in masks if mask is not None]
    assert shares == pytest.approx([0.02, 0.02 * VALIDATION_RATIO, 0.02 * TEST_RATIO], rel=0.05)
    labelled = y >= 0
    assert torch.equal(labelled, torch.stack([mask for mask in masks if mask is not None]).any(0))
    assert (y == classes_of(graph))[labelled].double().mean() == pytest.approx(0.75, abs=0.01)
    times = [mask.nonzero() / graph.num_papers for mask in masks if mask is not None]
    assert times[0].max() < PERIODS[0] <= times[1].min() <= times[1].max() < PERIODS[1] <= times[2].min()
    assert (times[0] > PERIODS[0] / 2).double().mean() == pytest.approx(0.75, abs=0.02), "later papers more often"


def test_all_papers_are_labelled() -> None:
    y, masks = citation_graph("1k,5k,0,4,100%,0", 0).labels()
    assert (y >= 0).all()
    assert [int(mask.sum()) for mask in masks if mask is not None] == [890, 55, 55]


def test_features_are_the_mean_of_the_class_plus_noise() -> None:
    graph = citation_graph("vertices=40k,edges=40k,features=32,classes=4", 1)
    x, classes = torch.cat(list(graph.features())), classes_of(graph)
    means = torch.stack([x[classes == number].mean(0) for number in range(4)])
    noise = x - means[classes]
    assert noise.std() == pytest.approx(1, abs=0.01)
    assert noise.T.corrcoef().fill_diagonal_(0).abs().max() < 0.03
    assert torch.pdist(means).mean() == pytest.approx(citations.CLASS_DISTANCE, rel=0.2)


def test_parts_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = citation_graph(THOUSANDTH, 7)
    whole, x, (y, masks) = endpoints(graph), torch.cat(list(graph.features())), graph.labels()
    monkeypatch.setattr(citations, "PART_EDGES", 200_000)
    monkeypatch.setattr(citations, "PART_NUMBERS", 90_000)
    assert len(list(graph.edges())) > 3
    assert all(map(torch.equal, endpoints(graph), whole))
    assert torch.equal(torch.cat(list(graph.features())), x)
    again, parts = graph.labels()
    assert torch.equal(again, y)
    assert all(torch.equal(a, b) for a, b in zip(parts, masks, strict=True) if a is not None and b is not None)
    topics = graph.class_of_topic.argsort(stable=True).int()
    first_topics = torch.cat([torch.zeros(1, dtype=torch.int64), graph.class_of_topic.bincount().cumsum(0)])
    arguments = 7, graph.num_papers, 14.5, graph.class_of_topic, first_topics, topics, 1000, 2000
    assert all(map(np.array_equal, _native.cite(*arguments, 1), _native.cite(*arguments, 3)))


def test_seeds_differ() -> None:
    first, second = (endpoints(citation_graph(THOUSANDTH, seed))[1][:1000] for seed in (0, 1))
    assert not torch.equal(first, second)


def test_the_imported_graph_is_the_one_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writing it part by part, without a file of unsorted edges, gives the graph that is generated in memory."""
    recipe = "cites:vertices=2k,edges=20k,features=5,classes=7,seed=4"
    assert main(["data", "import", recipe, "--out", str(tmp_path / "graph")]) == 0
    stored, loaded = weft.Graph.open(tmp_path / "graph"), weft.load(recipe)
    assert stored.in_edges.fingerprint == loaded.in_edges.fingerprint
    for name in ("x", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(getattr(stored, name), getattr(loaded, name))
    assert main(["data", "import", recipe, "--out", str(tmp_path / "other"), "--split", "50,25,25"]) == 0
    assert main(["data", "import", recipe, "--out", str(tmp_path / "third"), "--undirected"]) == 2
    assert "--undirected has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "error"),
    [
        ("vertices=1,edges=1,features=0,classes=2", "vertices=1: give at least 2"),
        ("vertices=3g,edges=1,features=0,classes=2", "fewer than 2\\^31"),
        ("vertices=10,edges=0,features=0,classes=2", "edges=0: give at least 1"),
        ("vertices=10,edges=9,features=0,classes=1", "classes=1: give at least 2"),
        ("vertices=10,edges=9,features=0,classes=2,labelled=2", "labelled=2 is a share"),
        ("vertices=10,edges=9,features=0,classes=2,flipped=101%", "flipped=1.01 is a share"),
        ("vertices=10,edges=9,features=0", "'classes' is missing"),
    ],
)
def test_mistakes(recipe: str, error: str) -> None:
    with pytest.raises(InputError, match=error):
        citation_graph(recipe, 0)
