"""Graph: construction, validation with a clear error for each mistake, relations and derived properties."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.lib.graph_checks import CALM, assert_one_line, graphs
from weft.data import Adjacency, DataWarning, Graph, require_trainable
from weft.data.checks import tensor_checks
from weft.utils.errors import InputError


def ring(num_vertices: int = 5, **fields: object) -> Graph:
    """Return a graph with the edges v -> v + 1 and the given fields."""
    source = torch.arange(num_vertices)
    return Graph.from_edges(source, (source + 1) % num_vertices, num_vertices=num_vertices, **fields)  # type: ignore[arg-type]


def test_from_edges_sorts_edges_with_their_attributes() -> None:
    graph = Graph.from_edges(
        torch.tensor([2, 0, 1, 0]),
        torch.tensor([1, 1, 0, 1]),
        num_vertices=4,
        weight=torch.tensor([20.0, 1.0, 10.0, 2.0]),
        edge_features=torch.tensor([[20.0, 0.0], [1.0, 1.0], [10.0, 2.0], [2.0, 3.0]]),
        edge_type=torch.tensor([0, 1, 1, 0]),
        relations=("v|a|v", "v|b|v"),
        vertex_types=("v",),
        type_offsets=(0, 4),
    )
    assert graph.in_edges.indptr.tolist() == [0, 1, 4, 4, 4]
    assert graph.in_edges.indices.tolist() == [1, 0, 0, 2]
    assert graph.in_edges.weight is not None
    assert graph.in_edges.weight.tolist() == [
        10.0,
        2.0,
        1.0,
        20.0,
    ]  # The edge 0 -> 1 of relation a precedes that of relation b.
    assert graph.edge_features is not None
    assert graph.edge_features.tolist() == [[10.0, 2.0], [2.0, 3.0], [1.0, 1.0], [20.0, 0.0]]
    assert graph.num_edge_features == 2
    assert graph.edge_type is not None
    assert (graph.edge_type.tolist(), graph.edge_type.dtype) == ([1, 0, 1, 0], torch.int16)
    assert (graph.num_vertices, graph.num_edges, graph.num_features, graph.num_classes) == (4, 4, 0, 0)


def test_relation_numbers_endpoints_within_their_type() -> None:
    graph = Graph.from_edges(
        torch.tensor([0, 1, 2, 3, 4]),
        torch.tensor([3, 3, 4, 0, 2]),
        num_vertices=5,
        weight=torch.arange(5.0),
        edge_type=torch.tensor([0, 0, 0, 1, 1]),
        relations=("a|to|b", "b|back|a"),
        vertex_types=("a", "b"),
        type_offsets=(0, 3, 5),
    )
    to, back = graph.relation("a|to|b"), graph.relation("b|back|a")
    assert [ids.tolist() for ids in to.edges()] == [[0, 1, 2], [0, 0, 1]]
    assert [ids.tolist() for ids in back.edges()] == [[0, 1], [0, 2]]
    assert (to.num_sources, to.num_targets, back.num_sources, back.num_targets) == (3, 2, 2, 3)
    assert back.weight is not None
    assert back.weight.tolist() == [3.0, 4.0]
    with pytest.raises(InputError, match="did you mean 'a\\|to\\|b'"):
        graph.relation("a|too|b")


@CALM
@given(graph=graphs())
def test_relations_contain_every_edge(graph: Graph) -> None:
    if graph.edge_type is None:
        return
    edges = []
    for name in graph.relations:
        source, target = graph.relation(name).edges()
        first, _, last = name.split("|")
        edges += zip(
            (source + graph.type_range(first).start).tolist(),
            (target + graph.type_range(last).start).tolist(),
            [graph.relations.index(name)] * len(source),
            strict=True,
        )
    stored = zip(*(ids.tolist() for ids in graph.in_edges.edges()), graph.edge_type.tolist(), strict=True)
    assert sorted(edges) == sorted(stored)


def test_fingerprint_depends_only_on_the_topology() -> None:
    plain = ring()
    assert ring(x=torch.ones(5, 2)).fingerprint == plain.fingerprint
    assert ring(6).fingerprint != plain.fingerprint
    isolated = Graph.from_edges(*plain.in_edges.edges(), num_vertices=6)
    assert isolated.fingerprint != plain.fingerprint


def test_immutable() -> None:
    graph = ring()
    with pytest.raises(AttributeError):
        graph.x = torch.ones(5, 1)  # type: ignore[misc]
    with pytest.raises(TypeError):
        graph.features["a"] = torch.ones(5, 1)  # type: ignore[index]


def test_lossless_casts() -> None:
    graph = ring(
        x=torch.tensor([[1.5]] * 5, dtype=torch.float64),
        y=torch.tensor([0, 1, 2, 1, -1], dtype=torch.int8),
        train_mask=torch.tensor([1, 0, 0, 0, 0], dtype=torch.uint8),
        weight=torch.arange(5),
    )
    assert graph.x is not None
    assert graph.y is not None
    assert graph.train_mask is not None
    assert graph.in_edges.weight is not None
    dtypes = (graph.x.dtype, graph.y.dtype, graph.train_mask.dtype, graph.in_edges.weight.dtype)
    assert dtypes == (torch.float32, torch.int64, torch.bool, torch.float32)
    assert graph.num_classes == 3
    several = ring(y=torch.tensor([[1, 0, 0, 1]] * 5, dtype=torch.uint8))
    assert several.multilabel
    assert several.num_classes == 4


def with_entry(tensor: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    tensor[index] = value
    return tensor


MISTAKES = {
    "feature nan": ({"x": with_entry(torch.ones(5, 3), (2, 1), float("nan"))}, ["x[2, 1]", "nan", "replace"]),
    "feature inf": ({"x": with_entry(torch.ones(5, 3), (4, 0), float("inf"))}, ["x[4, 0]", "inf", "replace"]),
    "feature rows": ({"x": torch.ones(4, 3)}, ["x", "[4, 3]", "5 vertices", "one entry for each"]),
    "feature shape": ({"x": torch.ones(5)}, ["x", "[5]", "[vertices, features]"]),
    "feature too large": (
        {"x": torch.full((5, 1), 1e39, dtype=torch.float64)},
        ["x[0, 0]", "float64", "float32 cannot hold"],
    ),
    "label below -1": ({"y": torch.tensor([0, 1, -2, 0, 0])}, ["y[2]", "-2", "-1 is unlabelled"]),
    "label rows": ({"y": torch.zeros(6, dtype=torch.int64)}, ["y", "[6]", "5 vertices"]),
    "label of several": ({"y": with_entry(torch.zeros(5, 2).int(), (3, 1), 2)}, ["y[3, 1]", "2", "0 or 1"]),
    "label of several missing": ({"y": with_entry(torch.zeros(5, 2), (3, 1), math.nan)}, ["y[3, 1]", "nan", "0 or 1"]),
    "mask length": ({"val_mask": torch.ones(3, dtype=torch.bool)}, ["val_mask", "[3]", "5 vertices"]),
    "mask of splits": ({"val_mask": torch.ones(5, 10, dtype=torch.bool)}, ["val_mask", "[5, 10]", "val_mask[:, 0]"]),
    "weight columns": ({"weight": torch.ones(5, 2)}, ["edge_weight", "[5, 2]", "edge_weight[:, 0]"]),
    "mask of ids": ({"test_mask": torch.arange(5)}, ["test_mask[2]", "2", "from ids by mask =", "mask[test_mask] = "]),
    "mask of few ids": ({"test_mask": torch.tensor([0, 1])}, ["test_mask", "[2]", "from ids by mask ="]),
    "value of a regression": (
        {"y": with_entry(torch.arange(5) / 2, (3,), math.inf)},
        ["y[3] is inf", "NaN is unlabelled"],
    ),
    "label of an id": ({"y": torch.tensor([0, 1, 2**40, 0, 0])}, ["y", str(2**40), "5 vertices", "without gaps"]),
    "no features": ({"features": torch.ones(5, 1)}, ["features", "Tensor", "dict of vertex type"]),
    "no offsets": ({"vertex_types": ("v",), "type_offsets": (0, "5")}, ["type_offsets", "tuple of Integral"]),
    "no names": ({"relations": "v|a|v"}, ["relations", "tuple of str"]),
    "no name": ({"name": 5}, ["name is of type int"]),
    "weight nan": ({"weight": with_entry(torch.ones(5), (3,), float("nan"))}, ["edge_weight[3]", "nan", "finite"]),
    "weight length": ({"weight": torch.ones(4)}, ["edge_weight", "[4]", "5 edges"]),
    "edge feature nan": (
        {"edge_features": with_entry(torch.ones(5, 2), (3, 1), float("nan"))},
        ["edge_features[3, 1]", "nan", "replace"],
    ),
    "edge feature rows": ({"edge_features": torch.ones(4, 2)}, ["edge_features", "[4, 2]", "5 edges"]),
    "edge feature shape": ({"edge_features": torch.ones(5)}, ["edge_features", "[5]", "[edges, features]"]),
    "edge feature too large": (
        {"edge_features": torch.full((5, 1), 1e39, dtype=torch.float64)},
        ["edge_features[0, 0]", "float64", "float32 cannot hold"],
    ),
    "type length": ({"edge_type": torch.zeros(2), "relations": ("v|a|v",)}, ["edge_type", "[2]", "5 edges"]),
    "type alone": ({"edge_type": torch.zeros(5)}, ["edge_type and relations", "give both"]),
    "features alone": ({"features": {"v": torch.ones(5, 1)}}, ["features['v']", "no vertex type"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_name_the_field(mistake: str) -> None:
    fields, parts = MISTAKES[mistake]
    with pytest.raises(InputError) as error:
        ring(**fields)
    assert_one_line(error, *parts)


def test_large_features_are_checked_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_checks, "BLOCK_ENTRIES", 4)
    assert ring(x=torch.ones(5, 2)).num_features == 2
    with pytest.raises(InputError) as error:
        ring(x=with_entry(torch.ones(5, 2), (3, 1), float("-inf")))
    assert_one_line(error, "x[3, 1] is -inf")


TYPED = {"edge_type": torch.tensor([0, 0, 0, 1, 1]), "vertex_types": ("a", "b"), "relations": ("a|r|a", "b|s|b")}
TYPED_MISTAKES = {
    "type out of range": ({"edge_type": torch.tensor([0, 0, 2, 0, 0])}, ["edge_type[", "2", "2 relations"]),
    "ends": ({}, ["edge_type[", "'a|r|a'", "of type b", "correct"]),
    "offsets": ({"type_offsets": (0, 3, 4)}, ["type_offsets", "[0, 3, 4]", "ascend from 0"]),
    "offsets missing": ({"type_offsets": ()}, ["type_offsets", "2 vertex types"]),
    "relation": ({"relations": ("a|r|a", "b|s|c")}, ["'b|s|c'", "a, b", "rename"]),
    "relation twice": ({"relations": ("a|r|a", "a|r|a")}, ["repeat", "its own name"]),
    "feature rows": ({"features": {"b": torch.ones(3, 1)}}, ["features['b']", "2 vertices of type b"]),
    "feature nan": ({"features": {"a": torch.full((3, 1), float("nan"))}}, ["features['a'][0, 0]", "nan"]),
    "both": ({"features": {"a": torch.ones(3, 1)}, "x": torch.ones(5, 1)}, ["x and features"]),
}


@pytest.mark.parametrize("mistake", TYPED_MISTAKES)
def test_typed_errors_name_the_field(mistake: str) -> None:
    fields, parts = TYPED_MISTAKES[mistake]
    valid_ends = mistake != "ends"
    source, target = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([1, 2, 0, 4, 3] if valid_ends else [1, 3, 0, 4, 3])
    with pytest.raises(InputError) as error:
        Graph.from_edges(source, target, num_vertices=5, **{"type_offsets": (0, 3, 5), **TYPED, **fields})
    assert_one_line(error, *parts)


@pytest.mark.parametrize(
    ("source", "target", "num_vertices", "parts"),
    [
        ([0, 1, 5], [1, 2, 0], 5, ["edge_index[0][2] is 5", "5 vertices", "raise num_vertices"]),
        ([0, 1], [1, -1], 5, ["edge_index[1][1] is -1", "negative"]),
        ([0, -3], [1, 1], None, ["edge_index[0][1] is -3", "negative"]),
        ([0, 1], [1], None, ["2 sources", "1 targets", "one of each"]),
        ([0.0, 1.0], [1.0, 0.0], None, ["edge_index[0]", "float", "int64"]),
        ([0, 2**40], [1, 0], None, [str(2**40), "2 edges", "without gaps"]),
    ],
)
def test_edge_errors_name_the_entry(
    source: list[int], target: list[int], num_vertices: int | None, parts: list[str]
) -> None:
    with pytest.raises(InputError) as error:
        Graph.from_edges(torch.tensor(source), torch.tensor(target), num_vertices=num_vertices)
    assert_one_line(error, *parts)


def test_a_passed_adjacency_is_checked() -> None:
    indptr = torch.tensor([0, 1, 2])
    for broken, part in (
        (
            Adjacency(indptr=indptr, indices=torch.tensor([0, 2], dtype=torch.int32), num_sources=2),
            "in_edges.indices[1] is 2",
        ),
        (Adjacency(indptr=torch.tensor([0, 2, 1]), indices=torch.tensor([0, 1]), num_sources=2), "in_edges.indptr"),
        (Adjacency(indptr=indptr, indices=torch.tensor([0, 1]), num_sources=3), "3 sources and 2 targets"),
        (Adjacency(indptr=indptr.int(), indices=torch.tensor([0, 1]), num_sources=2), "in_edges.indptr is torch.int32"),
        (Adjacency(indptr=indptr, indices=torch.tensor([0.0, 1]), num_sources=2), "in_edges.indices is torch.float32"),
        (Adjacency(indptr=indptr, indices=torch.tensor([0, 1]), num_sources=2, weight=torch.ones(3)), "[3], not"),
    ):
        with pytest.raises(InputError) as error:
            Graph(in_edges=broken)
        assert_one_line(error, part)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"indptr": torch.tensor([0, 2, 1, 3])}, "transpose.indptr does not ascend"),
        ({"indptr": torch.tensor([0, 1, 3])}, "transpose.indptr is torch.int64 of shape [3]"),
        ({"indices": torch.tensor([0, 1, 3])}, "transpose.indices[2] is 3"),
        ({"edge_ids": torch.tensor([0, 1, 3])}, "transpose.edge_ids"),
        ({"edge_ids": torch.tensor([-1, 1, 2])}, "transpose.edge_ids"),
        ({"weight": torch.ones(2)}, "transpose.weight"),
    ],
)
def test_a_passed_transpose_is_checked(changed: dict[str, Tensor], part: str) -> None:
    in_edges = ring(3).in_edges
    broken = replace(in_edges, known_transpose=replace(in_edges.transpose, **changed))
    with pytest.raises(InputError) as error:
        Graph(in_edges=broken)
    assert_one_line(error, part)


@pytest.mark.parametrize(
    ("ids", "part"),
    [
        ([0, 1, 2, 3], "ids has shape [4], but the graph has 5 vertices"),
        ([0, 1, 2, 3, 5], "ids[4] is 5"),
        ([0, 3, 2, 3, 4], "ids holds 3 more than once"),
    ],
)
def test_ids_are_a_permutation(ids: list[int], part: str) -> None:
    assert replace(ring(), ids=torch.tensor([4, 0, 1, 3, 2])).ids is not None
    with pytest.raises(InputError) as error:
        replace(ring(), ids=torch.tensor(ids))
    assert_one_line(error, part)


def test_unusual_graphs_are_accepted() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert Graph.from_edges(none, none).num_vertices == 0
    assert Graph.from_edges(none, none, num_vertices=3, x=torch.ones(3, 2)).num_edges == 0
    loops = torch.tensor([1, 1, 1])
    graph = Graph.from_edges(loops, loops, num_vertices=3)
    assert graph.in_edges.has_loop.tolist() == [False, True, False]
    assert Graph.from_edges(loops, loops, y=torch.tensor([0, -1, 4, 0])).num_vertices == 4


def test_large_numbers_that_become_equal_in_float32_warn() -> None:
    times = torch.tensor([[1.5, 1_700_000_000 + second] for second in range(5)], dtype=torch.float64)
    with pytest.warns(
        DataWarning, match=r"x\[:, 1\]: 4 numbers above 2\*\*24 become equal .* subtract an offset"
    ) as caught:
        ring(x=times)
    assert len(caught) == 1
    ring(x=times - times[0])
    ring(x=torch.tensor([2.0**24 + 2 * number for number in range(5)], dtype=torch.float64)[:, None])


def test_overlapping_masks_warn_once() -> None:
    mask = torch.tensor([True, True, False, False, False])
    with pytest.warns(DataWarning, match="2 vertices lie in both train_mask and test_mask") as caught:
        ring(train_mask=mask, test_mask=mask)
    assert len(caught) == 1


def test_require_trainable() -> None:
    mask = torch.tensor([True, False, False, False, False])
    full = {"x": torch.ones(5, 2), "y": torch.zeros(5, dtype=torch.int64), "train_mask": mask}
    require_trainable(ring(**full))
    require_trainable(ring(**{**full, "x": None}), features=False)
    for changed, parts in (
        ({"x": None}, ["no features", "--random-features 256"]),
        ({"y": None}, ["no labels", "--random-classes 16"]),
        ({"train_mask": None}, ["train_mask is missing", "with_split"]),
        ({"train_mask": mask & False}, ["train_mask selects no vertex", "with_split"]),
        ({"y": torch.tensor([-1, 0, 0, 0, 0])}, ["train_mask[0]", "unlabelled", "clear"]),
    ):
        with pytest.raises(InputError) as error:
            require_trainable(ring(**{**full, **changed}))
        assert_one_line(error, *parts)


def test_trusted_values_are_not_checked() -> None:
    bad = torch.full((5, 1), float("nan"))
    with warnings.catch_warnings():
        graph = replace(ring(), x=bad, trusted=True)
    assert graph.x is bad
