"""Reordered graphs have the defined vertex order, and all attributes of vertices and edges are reordered, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given

from tests.lib.graph_checks import CALM, assert_one_line, graphs, same_graph
from weft.data import Graph, load, reorder
from weft.data.checks.rules import check_values
from weft.data.checks.tensor_checks import MASKS
from weft.data.vertex_order import ORDERS
from weft.utils.errors import InputError


def two_components() -> Graph:
    """Return a graph with the edges 0 -> 4 -> {1, 7}, 1 -> 2, 3 -> 7, and 6 -> {5, 6}; vertex 8 has none."""
    return Graph.from_edges(
        torch.tensor([0, 4, 4, 1, 3, 6, 6]), torch.tensor([4, 1, 7, 2, 7, 5, 6]), num_vertices=9, name="two"
    )


@pytest.mark.parametrize(
    ("kind", "ids"), [("bfs", [4, 0, 1, 7, 2, 3, 6, 5, 8]), ("degree", [4, 6, 1, 7, 0, 2, 3, 5, 8])]
)
def test_orders_of_a_small_graph(kind: str, ids: list[int]) -> None:
    graph = reorder(two_components(), kind)
    assert graph.ids is not None
    assert graph.ids.tolist() == ids


def neighbours(graph: Graph) -> list[set[int]]:
    """Return the neighbours of each vertex, by edges in either direction."""
    adjacent: list[set[int]] = [set() for _ in range(graph.num_vertices)]
    for source, target in zip(*(ids.tolist() for ids in graph.in_edges.edges()), strict=True):
        adjacent[source].add(target)
        adjacent[target].add(source)
    return adjacent


@CALM
@given(graph=graphs())
def test_bfs_numbers_neighbours_in_order(graph: Graph) -> None:
    """Neighbours of earlier vertices are numbered first; the first vertex of a component has its largest degree."""
    assume(len(graph.vertex_types) < 2)
    graph = reorder(graph, "bfs")
    degree = (graph.in_edges.degree + graph.in_edges.transpose.indptr.diff()).tolist()
    parents = []
    for vertex, adjacent in enumerate(neighbours(graph)):
        if any(other < vertex for other in adjacent):
            parents.append(min(adjacent))
        else:
            assert degree[vertex] == max(degree[vertex:])
            parents.append(vertex)
    assert parents == sorted(parents)


@pytest.mark.parametrize("kind", ORDERS)
@CALM
@given(graph=graphs())
def test_all_attributes_are_reordered(kind: str, graph: Graph) -> None:
    assume(len(graph.vertex_types) < 2)
    moved = reorder(
        reorder(graph, "degree"), kind
    )  # The ids of a graph that was reordered twice are still the original ones.
    check_values(moved)
    assert moved.ids is not None
    for field in ("x", "y", *MASKS):
        before, after = getattr(graph, field), getattr(moved, field)
        assert (before is None and after is None) or torch.equal(before[moved.ids], after)

    def edges(of: Graph, ids: torch.Tensor) -> list[tuple[float, ...]]:
        source, target = of.in_edges.edges()
        columns = [ids[source], ids[target]]
        columns += [column for column in (of.edge_type, of.in_edges.weight) if column is not None]
        columns += [] if of.edge_features is None else of.edge_features.unbind(1)
        return sorted(zip(*(column.tolist() for column in columns), strict=True))

    assert edges(moved, moved.ids) == edges(graph, torch.arange(graph.num_vertices))


def test_relations_of_one_vertex_type_are_reordered() -> None:
    graph = Graph.from_edges(
        torch.tensor([0, 0, 2, 1]),
        torch.tensor([1, 1, 1, 0]),
        weight=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        edge_type=torch.tensor([1, 0, 0, 1]),
        relations=("v|a|v", "v|b|v"),
        vertex_types=("v",),
        type_offsets=(0, 3),
        features={"v": torch.arange(3.0)[:, None]},
    )
    moved = reorder(graph, "degree")
    assert moved.ids is not None
    assert moved.edge_type is not None
    assert moved.in_edges.weight is not None
    assert moved.ids.tolist() == [1, 0, 2]
    assert moved.features["v"][:, 0].tolist() == [1.0, 0.0, 2.0]
    assert [ids.tolist() for ids in moved.in_edges.edges()] == [[1, 1, 2, 0], [0, 0, 0, 1]]
    assert moved.edge_type.tolist() == [0, 1, 0, 1]
    assert moved.in_edges.weight.tolist() == [2.0, 1.0, 3.0, 4.0]


def test_random_data_depends_on_original_ids(tmp_path: Path) -> None:
    """Random features and classes of a vertex are equal before and after reordering."""
    options = {"random_features": 3, "random_classes": 4}
    load("rmat:20,60", order="bfs").save(tmp_path / "reordered")
    same_graph(load(tmp_path / "reordered", **options), load("rmat:20,60", order="bfs", **options))


def test_unsupported_orders_are_refused() -> None:
    typed = Graph.from_edges(
        torch.tensor([0]), torch.tensor([1]), vertex_types=("a", "b"), type_offsets=(0, 1, 2), name="typed"
    )
    with pytest.raises(InputError) as error:
        reorder(typed, "bfs")
    assert_one_line(error, "typed", "2 vertex types", "leave out --order bfs")
    assert reorder(typed, "none") is typed
    with pytest.raises(InputError, match="unknown order 'dfs': did you mean 'bfs'"):
        reorder(typed, "dfs")
