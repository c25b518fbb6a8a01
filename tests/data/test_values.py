"""Labels that are floats are values of a regression, and preserved by all readers and writers; NaN is unlabelled."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.data import DataWarning, Graph, load, require_trainable
from weft.data.checks.tensor_checks import has_label, label_kind
from weft.data.io.graph_parts import gather_parts
from weft.data.tables.edge_list import edge_list_parts
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
        (torch.tensor([0, 1, -1, 1, 0]), "classes", 2),
        (torch.tensor([[0], [1], [-1], [1], [2]]), "classes", 3),
        (torch.tensor([[0], [1], [0], [1], [1]]), "classes", 2),
        (torch.tensor([True, False, True, False, False]), "classes", 2),
        (torch.eye(5)[:, :3], "labels", 3),
        (torch.eye(5)[:, :3].bool(), "labels", 3),
        (torch.eye(5)[:, :1], "labels", 1),
    ],
)
def test_kinds_of_labels(y: torch.Tensor, kind: str, num_classes: int) -> None:
    labelled = graph(y)
    assert (labelled.label_kind, labelled.num_classes, labelled.multilabel) == (kind, num_classes, kind == "labels")
    require_trainable(labelled)


@pytest.mark.parametrize("y", [torch.tensor([300.0, -1, 7, math.nan, 0]), torch.tensor([[0.0], [1], [2], [1], [5]])])
def test_whole_floats_are_values_and_readers_warn(y: torch.Tensor, tmp_path: Path) -> None:
    data = pytest.importorskip("torch_geometric.data")
    hetero = data.HeteroData()
    hetero["a"].y, hetero["a", "to", "a"].edge_index = y, torch.stack([SOURCE, TARGET])
    hetero["a"].num_nodes = 5
    np.savez(tmp_path / "g.npz", edge_index=torch.stack([SOURCE, TARGET]).numpy(), y=y.numpy())
    np.save(tmp_path / "y.npy", y.numpy())
    (tmp_path / "e.txt").write_text("0 1\n")
    count = int(y.isfinite().sum())
    readers: list[Callable[[], Graph]] = [
        lambda: graph(y),
        lambda: load(tmp_path / "g.npz"),
        lambda: Graph.of(gather_parts(edge_list_parts(tmp_path / "e.txt", labels=tmp_path / "y.npy"))),
        lambda: Graph.from_pyg(data.Data(edge_index=torch.stack([SOURCE, TARGET]), y=y)),
        lambda: Graph.from_pyg(hetero),
    ]
    for read in readers:
        with pytest.warns(DataWarning, match=f"y contains {count} whole numbers, but as torch.float32") as caught:
            read_graph = read()
        assert len(caught) == 1
        assert read_graph.label_kind == "values"
        assert torch.equal(read_graph.y.nan_to_num(9).reshape(-1), y.nan_to_num(9).reshape(-1))  # type: ignore[union-attr]
    read_graph.save(tmp_path / "store")
    assert Graph.open(tmp_path / "store").label_kind == "values"  # without a warning


def test_columns_of_whole_numbers() -> None:
    """Integers are classes; for whole numbers as floats, --label-kind decides."""
    edges = {"source": [0], "target": [1]}
    for kind, expected in (("classes", "classes"), ("values", "values")):
        read = Graph.from_tables({"y": [2.0, 0.0, math.nan, 1.0]}, edges, label="y", label_kind=kind)
        assert read.label_kind == expected
        assert read.labelled("train") is not None
        assert has_label(read.y).tolist() == [True, True, False, True]  # type: ignore[arg-type]
    many = np.arange(200.0)
    with pytest.raises(InputError, match=r"column 'y': contains whole numbers as floats, .* --label-kind values"):
        Graph.from_tables({"y": many}, edges, label="y")
    assert Graph.from_tables({"y": many.astype(int)}, edges, label="y").num_classes == 200
    assert Graph.from_tables({"y": many}, edges, label="y", label_kind="classes").num_classes == 200
    for options, message in (
        ({"label": "y", "label_kind": "classes"}, "column 'y': labels, row 1: has a fraction"),
        ({"label": ["y", "z"], "label_kind": "values"}, "--label-kind values needs one column"),
        ({"label": "y", "label_kind": "class"}, "did you mean 'classes'"),
    ):
        with pytest.raises(InputError, match=message):
            Graph.from_tables({"y": [0, 0.5], "z": [0, 1]}, edges, **options)  # type: ignore[arg-type]


def test_a_class_far_above_all_others_warns() -> None:
    with pytest.warns(DataWarning, match="2 vertices have class 255, no other class is above 1, .* set -1 there"):
        assert (
            graph(torch.tensor([0, 1, 255, -1, 255], dtype=torch.uint8).where(torch.arange(5) != 3, 1)).num_classes
            == 256
        )
    assert graph(torch.tensor([0, 20, 40, 60, 80])).num_classes == 81


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


def test_a_split_of_one_column_leaves_out_the_unlabelled(tmp_path: Path) -> None:
    y = np.array([[0], [1], [-1], [1], [2]])
    np.savez(tmp_path / "g.npz", edge_index=torch.stack([SOURCE, TARGET]).numpy(), y=y)
    loaded = load(tmp_path / "g.npz")
    assert (loaded.train_mask | loaded.val_mask | loaded.test_mask).tolist() == (y[:, 0] >= 0).tolist()  # type: ignore[operator]


def test_errors() -> None:
    with pytest.raises(InputError, match=r"val_mask\[2\] selects an unlabelled vertex \(y = NaN\)"):
        require_trainable(graph(VALUES, val_mask=torch.arange(5) == 2))
    with pytest.raises(InputError, match=r"y\[2, 0\] is inf: values are finite"):
        graph(torch.tensor([[0.5], [1], [math.inf], [2], [3]]))
    with pytest.raises(InputError, match=r"y\[0\] is 1.5e\+300, which torch.float32 cannot hold"):
        graph(torch.tensor([1.5e300, 0.5, 0, 0, 0], dtype=torch.float64))
    assert torch.equal(graph(torch.full((5,), 0.1, dtype=torch.float64)).y, torch.full((5,), 0.1))  # type: ignore[arg-type]
    assert label_kind(torch.tensor([math.inf, math.nan, 1.0])) == "values"
