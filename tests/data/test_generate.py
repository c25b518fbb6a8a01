"""Generated graphs have exact counts, depend on the seed only, and have edges that correlate with classes."""

from __future__ import annotations

import pytest
import torch

from tests.lib.graph_checks import assert_one_line, same_graph
from weft.data import Graph, load, require_trainable
from weft.data.io import generate
from weft.utils.errors import InputError


def test_rmat_counts_and_seeds() -> None:
    recipe = "rmat:vertices=1000,edges=20k,features=8,classes=5,seed=3"
    graph = load(recipe)
    assert (graph.num_vertices, graph.num_edges, graph.num_features, graph.num_classes) == (1000, 20000, 8, 5)
    same_graph(graph, load(recipe))
    assert load(recipe.replace("seed=3", "seed=4")).fingerprint != graph.fingerprint
    assert load("rmat:1k,20k", seed=3).fingerprint == graph.fingerprint
    require_trainable(graph)


def test_rmat_does_not_depend_on_the_global_generator() -> None:
    torch.manual_seed(0)
    first = load("rmat:100,1k")
    torch.rand(3)
    same_graph(first, load("rmat:100,1k"))


@pytest.mark.parametrize("vertices", [1, 2, 3, 33, 64, 100])
def test_rmat_takes_any_vertex_count(vertices: int) -> None:
    graph = Graph.of(generate.rmat(vertices=vertices, edges=500))
    assert (graph.num_vertices, graph.num_edges) == (vertices, 500)


def test_rmat_spans_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "BLOCK_EDGES", 64)
    graph = Graph.of(generate.rmat(vertices=5000, edges=1000))
    source, target = graph.in_edges.edges()
    assert graph.num_edges == 1000
    assert len((source * 5000 + target).unique()) > 800  # Blocks sample different edges.
    assert generate.sbm(vertices=50, degree=20, classes=2).in_edges.num_edges == 1000


def test_rmat_quadrants() -> None:
    graph = Graph.of(generate.rmat(vertices=1 << 12, edges=400_000))
    source, target = graph.in_edges.edges()
    half = 1 << 11
    shares = [
        float(((source >= half) == high_source).logical_and((target >= half) == high_target).float().mean())
        for high_source in (False, True)
        for high_target in (False, True)
    ]
    assert shares == pytest.approx(generate.QUADRANTS, abs=0.004)


def test_undirected_is_symmetric() -> None:
    graph = load("rmat:vertices=100,edges=1000,undirected=1")
    assert graph.num_edges == 1000
    assert torch.equal(graph.in_edges.indices, graph.in_edges.transpose.indices)


def test_sbm() -> None:
    recipe = "sbm:vertices=3k,degree=20,classes=4,homophily=0.7,features=16"
    graph = load(recipe)
    assert (graph.num_vertices, graph.num_edges, graph.num_features, graph.num_classes) == (3000, 60000, 16, 4)
    same_graph(graph, load(recipe))
    assert load(recipe, seed=1).fingerprint != graph.fingerprint
    assert graph.y is not None
    assert graph.y.bincount().tolist() == [750] * 4
    source, target = graph.in_edges.edges()
    assert float((graph.y[source] == graph.y[target]).float().mean()) == pytest.approx(0.7, abs=0.01)
    assert not graph.in_edges.has_loop.any()
    assert torch.equal(graph.in_edges.indices, graph.in_edges.transpose.indices)
    require_trainable(graph)


def test_sbm_neighbours_help() -> None:
    """Nearest class means predict better than chance, and clearly better from means of neighbours."""
    graph = load("sbm:vertices=4k,degree=20,classes=8,features=32")
    assert graph.x is not None
    assert graph.y is not None
    source, target = graph.in_edges.edges()
    neighbours = (
        torch.zeros_like(graph.x).index_add_(0, target, graph.x[source]) / graph.in_edges.degree.clamp(min=1)[:, None]
    )

    def accuracy(x: torch.Tensor) -> float:
        assert graph.y is not None
        means = torch.stack([x[graph.y == label].mean(0) for label in range(8)])
        return float((torch.cdist(x, means).argmin(1) == graph.y).float().mean())

    alone, together = accuracy(graph.x), accuracy(neighbours)
    assert 0.3 < alone < 0.8
    assert together > alone + 0.1


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("rmat:vertice=3,edges=4", ["rmat key 'vertice'", "did you mean 'vertices'"]),
        ("sbm:vertices=3,edges=4", ["sbm key 'edges'"]),
        ("rmat:vertices=3", ["'edges' is missing", "rmat:vertices=100k,edges=1m"]),
        ("rmat:", ["vertices=", "no number"]),
        ("rmat:vertices=many,edges=4", ["vertices=many", "100k"]),
        ("rmat:vertices=-3,edges=4", ["vertices=-3", "no number from 0 on"]),
        ("rmat:vertices=nan,edges=4", ["vertices=nan", "no number from 0 on"]),
        ("rmat:vertices=2.5,edges=4", ["vertices=2.5", "whole number"]),
        ("rmat:vertices=0,edges=4", ["vertices=0", "at least 1"]),
        ("rmat:vertices=3,4", ["'4' has no key", "key=value"]),
        ("rmat:vertices=3,edges=5,undirected=1", ["edges=5 is odd", "even"]),
        ("rmat:1000g,5", ["1000000000000 vertices", "16000.00 GB of memory", "fewer"]),
        ("rmat:5,1000g", ["1000000000000 edges", "16000.00 GB of memory"]),
        ("rmat:10,20,100g", ["100000000000 features", "4000.00 GB of memory"]),
        ("rmat:10,20,0,11", ["11 classes for 10 vertices"]),
        ("sbm:10,1000g,2", ["10000000000000 edges", "of memory"]),
        ("sbm:vertices=10,degree=2,classes=1", ["classes=1", "two classes"]),
        ("sbm:vertices=10,degree=2,classes=2,homophily=2", ["homophily=2", "0 to 1"]),
    ],
)
def test_errors_name_the_wrong_key(recipe: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as error:
        load(recipe)
    assert_one_line(error, *parts)


def test_suffixes() -> None:
    assert generate.parse("rmat", "2.3m,1g,4K", {"vertices": None, "edges": None, "features": 0}) == {
        "vertices": 2_300_000,
        "edges": 1_000_000_000,
        "features": 4000,
    }
