"""Inputs of graphs in Python: arrays, lists and columns in place of tensors, edge_index, and splits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.lib.graph_checks import assert_one_line, same_graph
from weft.data import DataWarning, Graph, reorder
from weft.utils.errors import InputError

SOURCE, TARGET = [0, 2, 1, 3], [1, 0, 2, 0]


def expected(**fields: Any) -> Graph:
    return Graph.from_edges(torch.tensor(SOURCE), torch.tensor(TARGET), **fields)


def test_arrays_lists_and_columns_are_accepted() -> None:
    x, y, mask = [[0.1, 2], [3, 4], [5, 6], [7, 8]], [0, 1, 0, -1], [True, False, False, False]
    tensors = {"x": torch.tensor(x), "y": torch.tensor(y), "train_mask": torch.tensor(mask), "weight": torch.ones(4)}
    graph = expected(**tensors)
    lists = {"x": x, "y": y, "train_mask": mask, "weight": [1.0] * 4}
    same_graph(Graph.from_edges(SOURCE, TARGET, **lists | {"weight": np.ones(4, np.float32)}), graph)
    arrays = {name: np.array(value) for name, value in lists.items()}
    arrays |= {"weight": np.ones(4, np.float32)[::-1], "x": np.array(x, ">f8")}
    arrays["y"].flags.writeable = False
    same_graph(Graph.from_edges(np.array(SOURCE), np.array(TARGET), **arrays), graph)
    same_graph(Graph.from_edges(np.array([SOURCE, TARGET], np.int16), **arrays), graph)
    same_graph(Graph.from_edges(torch.tensor([SOURCE, TARGET]), **tensors), graph)
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"source": SOURCE, "target": TARGET})
    columns = pandas.DataFrame({"a": np.array(x)[:, 0], "b": np.array(x)[:, 1]})
    same_graph(Graph.from_edges(frame["source"], frame["target"], **tensors | {"x": columns}), graph)


def test_masked_entries_are_refused() -> None:
    x = np.ma.array(np.ones((4, 2)), mask=[[0, 0], [0, 1], [0, 0], [0, 0]])
    with pytest.raises(InputError) as error:
        expected(x=x)
    assert_one_line(error, "x[1, 1] is masked, as are 1 of 8 entries", "x.filled(VALUE)")
    same_graph(expected(x=x.filled(1)), expected(x=np.ma.array(np.ones((4, 2)))))


def test_tensors_of_subclasses_become_tensors() -> None:
    class Named(torch.Tensor):
        pass

    pair, x = torch.tensor([SOURCE, TARGET]), torch.rand(4, 2)
    graph = Graph.from_edges(pair.as_subclass(Named), x=x.as_subclass(Named))
    same_graph(graph, Graph.from_edges(pair, x=torch.nn.Parameter(x)))
    assert type(graph.x) is type(graph.in_edges.indices) is torch.Tensor


def test_an_edge_index_has_two_rows() -> None:
    with pytest.raises(InputError) as error:
        Graph.from_edges(torch.tensor(SOURCE))
    assert_one_line(error, "edge_index has shape [4]", "[2, E]")


def test_undirected() -> None:
    source, target, weight = [0, 1, 2, 0, 2], [1, 0, 2, 1, 1], np.arange(5, dtype=np.float32)
    with pytest.warns(DataWarning, match="1 pairs of vertices have edges of different weights") as caught:
        graph = Graph.from_edges(source, target, weight=weight, undirected=True)
    assert len(caught) == 1
    edges = graph.in_edges.edges()
    assert graph.in_edges.weight is not None
    pairs = list(zip(*(ids.tolist() for ids in edges), strict=True))
    assert dict(zip(pairs, graph.in_edges.weight.tolist(), strict=True)) == {
        (0, 1): 0.0,
        (1, 0): 1.0,
        (2, 2): 2.0,
        (2, 1): 4.0,
        (1, 2): 4.0,
    }
    assert graph.num_edges == 5
    with pytest.warns(DataWarning, match="1 pairs of vertices"):
        twice = Graph.from_edges(*edges, weight=graph.in_edges.weight, undirected=True)
    same_graph(twice, graph)
    with pytest.raises(InputError) as error:
        Graph.from_edges(
            source,
            target,
            edge_type=[0] * 5,
            relations=("v|a|v",),
            vertex_types=("v",),
            type_offsets=(0, 3),
            undirected=True,
        )
    assert_one_line(error, "undirected", "inverse_relations")


def test_a_random_split_uses_labelled_vertices_in_any_order() -> None:
    y = torch.arange(200) % 3 - 1
    graph = Graph.from_edges([0], [1], y=y).with_split((0.5, 0.25, 0.25), seed=3)
    masks = [graph.labelled(split) for split in ("train", "val", "test")]
    assert [int(mask.sum()) for mask in masks if mask is not None] == [66, 33, 34]
    assert sum(mask.int() for mask in masks if mask is not None).tolist() == (y >= 0).int().tolist()  # type: ignore[union-attr]
    ordered = reorder(Graph.from_edges([0], [1], y=y), "degree").with_split((0.5, 0.25, 0.25), seed=3)
    assert ordered.ids is not None
    assert graph.train_mask is not None
    assert torch.equal(ordered.train_mask, graph.train_mask[ordered.ids])  # type: ignore[arg-type]
    assert not torch.equal(graph.train_mask, graph.with_split((0.5, 0.25, 0.25), seed=4).train_mask)  # type: ignore[arg-type]


def test_a_split_by_time_keeps_the_order_and_equal_times_together() -> None:
    year = torch.tensor([2019, 2017, 2018, 2017, 2020, 2018, 2017, 2016, 2019, 2020])
    graph = Graph.from_edges([0], [1], y=torch.zeros(10, dtype=torch.int64)).with_split((0.6, 0.2, 0.2), time=year)
    for name, years in (("train_mask", {2016, 2017, 2018}), ("val_mask", {2019}), ("test_mask", {2020})):
        assert set(year[getattr(graph, name)].tolist()) == years
    with pytest.raises(InputError) as error:
        graph.with_split((0.1, 0.4, 0.5), time=torch.zeros(10))
    assert_one_line(error, "no vertex is earlier than 0")


@pytest.mark.parametrize("fractions", [(60, 20, 20), (0.5, 0.5), (0.5, 0.6, -0.1), (0.5, 0.2, 0.2)])
def test_fractions_of_a_split_must_add_up_to_one(fractions: tuple[float, ...]) -> None:
    with pytest.raises(InputError) as error:
        expected().with_split(fractions)
    assert_one_line(error, "add up to 1")
