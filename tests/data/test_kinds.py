"""All integer dtypes are accepted as ids; an error names the field that is not a tensor of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.lib.graph_checks import assert_one_line, same_graph
from weft.data import Graph
from weft.utils.errors import InputError

KNOWLEDGE: dict[str, Any] = {
    "relations": ("v|a|v", "v|b|v", "v|c|v"),
    "vertex_types": ("v",),
    "type_offsets": (0, 3),
}
NO_TENSORS = {
    "none": None,
    "ragged list": [[0], [1, 2], [2]],
    "list of texts": ["a", "b", "c"],
    "array of objects": np.array([0, None, 2]),
    "number": 3,
    "text": "abc",
    "scalar": torch.tensor(3),
    "complex": torch.tensor([0j, 1, 2]),
    "meta": torch.empty(3, dtype=torch.long, device="meta"),
    "too large": torch.tensor([0, 1, 2**64 - 1], dtype=torch.uint64),
    "three dimensions": torch.ones(3, 1, 1),
}
FIELDS = ("source", "target", "weight", "edge_features", "edge_type", "x", "y", "train_mask", "val_links")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    source, target = torch.tensor([0, 2, 1]), torch.tensor([1, 0, 2])
    expected = Graph.from_edges(source, target, edge_type=target, **KNOWLEDGE)
    same_graph(Graph.from_edges(source.to(dtype), target.to(dtype), edge_type=target.to(dtype), **KNOWLEDGE), expected)
    same_graph(Graph.from_edges(source.to(dtype), target, edge_type=target, **KNOWLEDGE), expected)


@pytest.mark.parametrize("value", NO_TENSORS)
@pytest.mark.parametrize("field", FIELDS)
def test_other_objects_are_refused(field: str, value: str) -> None:
    fields: dict[str, Any] = {"source": torch.tensor([0, 2, 1]), "target": torch.tensor([1, 0, 2]), **KNOWLEDGE}
    if value == "none" and field != "source":
        return
    with pytest.raises(InputError) as error:
        Graph.from_edges(**fields | {field: NO_TENSORS[value]})
    assert_one_line(
        error, {"source": "edge_index[0]", "target": "edge_index[1]", "weight": "edge_weight"}.get(field, field)
    )


@pytest.mark.parametrize("field", ["x", "y", "train_mask", "edge_features"])
def test_tensors_of_other_layouts_are_converted(field: str) -> None:
    value = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    value = value[:, 0] if field == "train_mask" else value
    source, target = torch.tensor([0, 2, 1]), torch.tensor([1, 0, 2])
    expected = Graph.from_edges(source, target, **{field: value})
    for other in (value.to_sparse(), value.clone().requires_grad_(), value.double(), value.to(torch.float8_e4m3fn)):
        same_graph(Graph.from_edges(source, target, **{field: other}), expected)


@pytest.mark.parametrize("num_vertices", [-1, 2.5, "3", [3], 1 << 60])
def test_impossible_numbers_of_vertices_are_refused(num_vertices: Any) -> None:
    with pytest.raises(InputError) as error:
        Graph.from_edges(torch.tensor([0]), torch.tensor([1]), num_vertices=num_vertices)
    assert_one_line(error, "num_vertices", num_vertices)


def test_the_code_in_the_error_converts_ids_to_a_mask() -> None:
    ids, num_vertices = torch.tensor([1, 4]), 5
    with pytest.raises(InputError) as error:
        Graph.from_edges(ids, ids, num_vertices=num_vertices, train_mask=ids)
    line = str(error.value).partition("from ids by ")[2].replace("train_mask", "ids")
    names: dict[str, Any] = {"torch": torch, "ids": ids, "num_vertices": num_vertices}
    exec(line, names)
    assert names["mask"].tolist() == [False, True, False, False, True]
