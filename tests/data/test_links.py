"""Held-out links carry no messages, and random negatives depend only on the link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lib.graph_checks import assert_one_line, same_graph
from weft.data import DataWarning, Graph, Links, load, negative_key, reorder, require_links, with_held_out_links
from weft.utils.errors import InputError
from weft.utils.random import key, keyed_words, mix64, signed

NAMES = ("directed", "symmetric", "knowledge", "bipartite")


def make(name: str) -> Graph:
    """Return a graph of 60 vertices; all but 'bipartite' have loops, duplicate edges and some reciprocal edges."""
    random = torch.Generator().manual_seed(4)
    source, target = torch.randint(0, 59, (2, 300), generator=random)
    if name == "bipartite":
        return Graph.from_edges(
            source // 3,
            20 + target // 2,
            num_vertices=60,
            edge_type=torch.arange(300) % 2,
            relations=("user|buys|item", "user|sees|item"),
            vertex_types=("user", "item"),
            type_offsets=(0, 20, 60),
        )
    loops = torch.arange(3)
    source, target = torch.cat([source, source[:5], loops]), torch.cat([target, target[:5], loops])
    if name == "symmetric":
        source, target = torch.cat([source, target]), torch.cat([target, source])
    if name != "knowledge":
        return Graph.from_edges(source, target, num_vertices=60)
    return Graph.from_edges(
        source,
        target,
        num_vertices=60,
        edge_type=torch.arange(len(source)) % 3,
        relations=tuple(f"vertex|{number}|vertex" for number in range(3)),
        vertex_types=("vertex",),
        type_offsets=(0, 60),
    )


def pairs(source: Tensor, target: Tensor) -> set[tuple[int, int]]:
    """Return edges as unordered pairs."""
    return {(min(u, v), max(u, v)) for u, v in zip(source.tolist(), target.tolist(), strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_no_held_out_edge_carries_messages(name: str) -> None:
    """Held-out links are in the graph in no direction or relation; no link is lost, and fractions are right."""
    graph = make(name)
    split = with_held_out_links(graph, 1)
    remaining = pairs(*split.in_edges.edges())
    held_out = [pairs(*links[:, :2].t()) for links in (split.val_links, split.test_links)]
    assert not held_out[0] & held_out[1]
    assert not (held_out[0] | held_out[1]) & remaining
    whole = pairs(*graph.in_edges.edges())
    assert held_out[0] | held_out[1] | remaining == whole
    num_links = sum(u != v for u, v in whole)
    assert [len(part) for part in held_out] == [round(0.05 * num_links), round(0.1 * num_links)]
    if name != "symmetric":
        edges = Links.of(graph).edges.unique(dim=0)
        parts = torch.cat([Links.of(split).edges.unique(dim=0), split.val_links, split.test_links])
        assert torch.equal(parts.unique(dim=0), edges)
    else:
        assert all(
            len(links) == len(part) for links, part in zip((split.val_links, split.test_links), held_out, strict=True)
        )
        assert Links.of(split).symmetric
    assert pairs(*with_held_out_links(graph, 2).test_links[:, :2].t()) != held_out[1]


def test_training_links() -> None:
    """Training links are unique, without loops; those of a symmetric graph have a random direction."""
    for name in ("directed", "symmetric"):
        links = Links.of(make(name))
        rows = [tuple(row) for row in links.train.tolist()]
        assert len(rows) == len(set(rows))
        assert all(u != v for u, v, _ in rows)
        linked = pairs(*links.train[:, :2].t())
        assert linked == {pair for pair in pairs(*links.edges[:, :2].t()) if pair[0] != pair[1]}
        if name == "symmetric":
            assert len(rows) == len(linked)
            assert 0.4 < sum(u < v for u, v, _ in rows) / len(rows) < 0.6


def named(links: Tensor, ids: Tensor | None) -> Tensor:
    """Return links with the original vertex ids."""
    return links if ids is None else torch.cat([ids[links[:, :2]], links[:, 2:]], 1)


def test_links_do_not_depend_on_the_vertex_order() -> None:
    for name in ("directed", "symmetric", "knowledge"):
        graph = with_held_out_links(make(name), 1)
        other = with_held_out_links(reorder(make(name), "bfs"), 1)
        same = reorder(graph, "bfs")
        links = [Links.of(ordered) for ordered in (graph, other, same)]
        sample_key = negative_key(7, 3)
        for rows in (
            [part.train for part in links],
            [part.test for part in links],
            [part.negatives(part.train, sample_key, 0) for part in links],
            [part.non_edges(part.test, sample_key) for part in links],
        ):
            first, *others = (named(part, source.ids).unique(dim=0) for part, source in zip(rows, links, strict=True))
            for part in others:
                assert torch.equal(part, first), name


@pytest.mark.parametrize("name", NAMES)
def test_negatives(name: str) -> None:
    """Negatives depend only on the link and have the right vertex types; with relations, one endpoint is unchanged."""
    links = Links.of(with_held_out_links(make(name), 1))
    sample_key = negative_key(7, 3)
    whole = links.negatives(links.train, sample_key, 1)
    some = torch.arange(0, len(whole), 7)
    assert torch.equal(links.negatives(links.train[some], sample_key, 1), whole[some])
    for other_key, number in ((sample_key, 0), (negative_key(7, 4), 1), (negative_key(8, 3), 1)):
        assert not torch.equal(links.negatives(links.train, other_key, number), whole)
    for side in (0, 1):
        first, stop = links.candidates[whole[:, 2], side].unbind(1)
        assert ((whole[:, side] >= first) & (whole[:, side] < stop)).all()
    unchanged = (whole[:, :2] == links.train[:, :2]).any(1)
    assert unchanged.all() == links.typed
    none = links.non_edges(links.train, sample_key)
    assert not torch.isin(links.codes(none), links.true_codes).any()
    assert (none[:, 0] != none[:, 1]).all()


def test_negatives_are_uniform() -> None:
    links = Links.of(make("directed"))
    many = torch.cat([links.negatives(links.train, negative_key(0, epoch), 0) for epoch in range(40)])
    for side in (0, 1):
        counts = torch.bincount(many[:, side], minlength=60)
        expected = len(many) / 60
        assert ((counts - expected).square() / expected).sum() < 110  # chi-square, 59 degrees: one in 10,000


def test_a_graph_with_every_edge_has_no_non_edge() -> None:
    source, target = torch.cartesian_prod(torch.arange(8), torch.arange(8)).t()
    links = Links.of(with_held_out_links(Graph.from_edges(source, target), 0))
    with pytest.raises(InputError, match="nearly every edge"):
        links.non_edges(links.test, 1)


def test_keyed_words_equal_scalar_keys() -> None:
    values = [0, 1, 5, (1 << 63) - 1, -3]
    words = keyed_words(key(3, 4), torch.tensor(values), 9)
    assert words.tolist() == [signed(mix64(mix64(key(3, 4) ^ (value % (1 << 64))) ^ 9)) for value in values]


def test_links_of_files_are_preserved(tmp_path: Path) -> None:
    """Files, stores and other vertex orders preserve links. Triples are (head, relation, tail)."""
    edges = {"edge_index": np.array([[0, 1, 2], [1, 2, 0]]), "edge_type": np.array([0, 1, 0])}
    np.savez(tmp_path / "kg.npz", **edges, valid_triples=np.array([[0, 1, 2]]), test_triples=np.array([[2, 0, 1]]))
    graph = load(tmp_path / "kg.npz")
    assert graph.val_links.tolist() == [[0, 2, 1]]
    assert graph.test_links.tolist() == [[2, 1, 0]]
    graph.save(tmp_path / "store")
    same_graph(load(tmp_path / "store"), graph)
    other = reorder(graph, "degree")
    assert torch.equal(other.ids[other.test_links[:, :2]], graph.test_links[:, :2])

    typed = {
        "node_types": np.array(["a", "b"]),
        "num_nodes": np.array([2, 3]),
        "edge_types": np.array(["a|r|b"]),
        "edge_index|a|r|b": np.array([[0, 1], [2, 0]]),
        "test_edge_index": np.array([[1], [2]]),
    }
    np.savez(tmp_path / "typed.npz", **typed)
    assert load(tmp_path / "typed.npz").test_links.tolist() == [[1, 4, 0]]


def test_official_links(weft_data: Callable[[str], Path]) -> None:
    graph = load(weft_data("kg_wn18rr"))
    links = Links.of(graph)
    assert [len(part) for part in (links.train, links.val, links.test)] == [86_835, 3_034, 3_134]
    assert len(links.true_codes) == 93_003
    assert links.num_relations == 11


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"test_triples": np.array([[0, 0, 9]])}, ["test_links's target[0] is 9", "3 vertices"]),
        ({"test_triples": np.array([[0, 2, 1]])}, ["test_links's relation[0] is 2", "0 to 1"]),
        ({"test_triples": np.array([[0, 1]])}, ["test_triples has shape [1, 2]", "head, relation, tail"]),
        ({"test_edge_index": np.array([[0], [1]])}, ["test_edge_index does not say which of 2", "test_triples"]),
    ],
)
def test_errors_name_the_array(arrays: dict[str, np.ndarray], parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "g.npz"
    np.savez(path, edge_index=np.array([[0, 1], [1, 2]]), edge_type=np.array([0, 1]), **arrays)
    with pytest.raises(InputError) as error:
        load(path)
    assert_one_line(error, path, *parts)


def test_held_out_links_that_are_edges_warn() -> None:
    graph = Graph.from_edges(
        torch.tensor([0, 1]), torch.tensor([1, 2]), test_links=torch.tensor([[0, 1, 0], [2, 0, 0]])
    )
    with pytest.warns(DataWarning, match="1 held-out links are edges too"):
        require_links(graph)


def test_too_few_links() -> None:
    with pytest.raises(InputError, match="has 3 links, too few to hold out"):
        with_held_out_links(Graph.from_edges(torch.arange(3), torch.arange(1, 4)), 0)
