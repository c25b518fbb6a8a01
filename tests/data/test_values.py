"""Regression labels are recognized by their fractions, and preserved by all readers and writers; NaN is unlabelled."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.data import Graph, load, require_trainable
from weft.data.tensor_checks import has_label, label_kind
from weft.utils.errors import InputError

SOURCE, TARGET = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 0])
VALUES = torch.tensor([0.5, -3.0, math.nan, 2.0, 7.25])
MASKS = {"train_mask": torch.tensor([1, 1, 0, 0, 0]).bool(), "val_mask": torch.tensor([0, 0, 0, 1, 1]).bool()}


def graph(y: torch.Tensor, **more: torch.Tensor) -> Graph:
    return Graph.from_edges(SOURCE, TARGET, num_vertices=5, x=torch.ones(5, 2), y=y, **{**MASKS, **more})


@pytest.mark.parametrize(
    ("y", "kind", "num_classes"),
    [
        (VALUES, "values", 1),
        (torch.stack([VALUES, VALUES], 1), "values", 2),
        (torch.tensor([0.0, 1, 2, 1, 0]), "classes", 3),
        (torch.tensor([0, 1, -1, 1, 0]), "classes", 2),
        (torch.eye(5)[:, :3], "labels", 3),
    ],
)
def test_kinds_of_labels(y: torch.Tensor, kind: str, num_classes: int) -> None:
    labelled = graph(y)
    assert (labelled.label_kind, labelled.num_classes, labelled.multilabel) == (kind, num_classes, kind == "labels")
    require_trainable(labelled)


def test_values_survive_files_and_pyg(tmp_path: Path) -> None:
    original = graph(VALUES)
    assert original.y is not None
    original.save(tmp_path / "store")
    np.savez(
        tmp_path / "g.npz",
        edge_index=torch.stack([SOURCE, TARGET]).numpy(),
        x=np.ones((5, 2), np.float32),
        y=VALUES.numpy(),
        **{name: mask.numpy() for name, mask in MASKS.items()},
    )
    pytest.importorskip("torch_geometric")
    for copied in (Graph.open(tmp_path / "store"), load(tmp_path / "g.npz"), Graph.from_pyg(original.to_pyg())):
        assert copied.label_kind == "values"
        assert torch.equal(copied.y.nan_to_num(9), original.y.nan_to_num(9))  # type: ignore[union-attr]
        assert copied.labelled("train").tolist() == MASKS["train_mask"].tolist()  # type: ignore[union-attr]


def test_other_types_of_a_typed_graph_have_no_value() -> None:
    pyg = pytest.importorskip("torch_geometric.data")
    data = pyg.HeteroData()
    data["a"].x, data["b"].x, data["a"].y = torch.ones(2, 3), torch.ones(2, 3), torch.tensor([0.5, 2.0])
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1], [1, 0]])
    y = Graph.from_pyg(data).y
    assert y is not None
    assert has_label(y).tolist() == [True, True, False, False]


def test_a_split_of_a_file_without_masks_leaves_out_the_unlabelled(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=torch.stack([SOURCE, TARGET]).numpy(), y=VALUES.numpy())
    loaded = load(tmp_path / "g.npz")
    in_split = loaded.train_mask | loaded.val_mask | loaded.test_mask  # type: ignore[operator]
    assert in_split.tolist() == [True, True, False, True, True]


def test_errors() -> None:
    with pytest.raises(InputError, match=r"val_mask\[2\] selects an unlabelled vertex \(y = NaN\)"):
        require_trainable(graph(VALUES, val_mask=torch.arange(5) == 2))
    with pytest.raises(InputError, match=r"y\[2, 0\] is inf: values are finite"):
        graph(torch.tensor([[0.5], [1], [math.inf], [2], [3]]))
    with pytest.raises(InputError, match=r"y\[0\] is 1.5e\+300, which torch.float32 cannot hold"):
        graph(torch.tensor([1.5e300, 0.5, 0, 0, 0], dtype=torch.float64))
    assert torch.equal(graph(torch.full((5,), 0.1, dtype=torch.float64)).y, torch.full((5,), 0.1))  # type: ignore[arg-type]
    assert label_kind(torch.tensor([math.inf, math.nan, 1.0])) == "classes"
