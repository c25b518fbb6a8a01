"""Files of real graphs have the published counts; incomplete and wrong files are handled."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lib.graph_checks import assert_one_line, same_graph
from tests.lib.pairwise import param
from weft.data import Graph, load, require_trainable
from weft.runtime.memory import limit as module
from weft.utils.errors import InputError

# name: vertices, stored edges, features, classes, (train, val, test) or None, relations, both directions stored
PUBLISHED = {
    "cora": (2708, 10556, 1433, 7, (140, 500, 1000), 0, True),
    "citeseer": (3327, 9104, 3703, 6, (120, 500, 1000), 0, True),
    "amazon_photo": (7650, 238162, 745, 8, (4590, 1530, 1530), 0, True),
    "coauthor_physics": (34493, 495924, 8415, 5, (20696, 6899, 6898), 0, True),
    "tolokers": (11758, 1038000, 10, 2, (5879, 2939, 2940), 0, True),
    "topo_cnr-2000": (325557, 3216152, 0, 0, None, 0, False),
    "topo_road_NE": (1524453, 3868020, 0, 0, None, 0, True),
    "topo_soc-Slashdot0902": (82168, 948464, 0, 0, None, 0, False),
    "topo_dblp-2010": (326186, 1615400, 0, 0, None, 0, True),
    "rdf_aifb": (8285, 29043, 0, 4, (140, None, 36), 45, False),
    "hetero_acm": (11246, 17426, 0, 3, (60, 1000, 1000), 2, False),
    "kg_wn18rr": (40943, 86835, 0, 0, None, 11, False),
    "bipartite_amazon-book": (95594, 652514, 0, 0, None, 1, False),
}


@pytest.mark.parametrize("name", [param(name, name=name, quick=name != "coauthor_physics") for name in PUBLISHED])
def test_published_counts(name: str, weft_data: Callable[[str], Path]) -> None:
    path = weft_data(name)
    vertices, edges, features, classes, split, relations, symmetric = PUBLISHED[name]
    graph = load(path)
    assert (graph.num_vertices, graph.num_edges, graph.num_features, graph.num_classes) == (
        vertices,
        edges,
        features,
        classes,
    )
    masks = (graph.train_mask, graph.val_mask, graph.test_mask)
    counts = tuple(None if mask is None else int(mask.sum()) for mask in masks)
    assert counts == ((None, None, None) if split is None else split)
    assert len(graph.relations) == relations
    assert torch.equal(graph.in_edges.indices, graph.in_edges.transpose.indices) == symmetric
    assert graph.name == name


def test_features_equal_the_file(weft_data: Callable[[str], Path]) -> None:
    from scipy.sparse import csr_matrix

    path = weft_data("cora")
    graph = load(path)
    with np.load(path, allow_pickle=False) as file:
        x = csr_matrix((file["x_data"], file["x_indices"], file["x_indptr"]), tuple(file["x_shape"]))
        source, target = (torch.from_numpy(ids).long() for ids in file["edge_index"])
    assert graph.x is not None
    assert np.array_equal(graph.x.numpy(), x.toarray())
    same_graph(graph, Graph.from_edges(source, target, x=graph.x, y=graph.y, **masks_of(graph), name="cora"))
    require_trainable(graph)


def masks_of(graph: Graph) -> dict[str, Any]:
    return {mask: getattr(graph, mask) for mask in ("train_mask", "val_mask", "test_mask")}


def test_typed_graph_places_the_target_type(weft_data: Callable[[str], Path]) -> None:
    graph = load(weft_data("hetero_acm"))
    assert graph.vertex_types == ("paper", "author", "subject")
    assert graph.type_offsets == (0, 4019, 11186, 11246)
    assert {name: tuple(x.shape) for name, x in graph.features.items()} == {
        "paper": (4019, 1902),
        "author": (7167, 1902),
    }
    assert graph.y is not None
    assert int((graph.y >= 0).sum()) == 4019
    assert bool((graph.y[4019:] == -1).all())
    written = graph.relation("paper|written_by|author")
    assert (written.num_sources, written.num_targets, written.num_edges) == (4019, 7167, 13407)
    with pytest.raises(InputError) as error:
        require_trainable(graph)
    assert_one_line(error, "vertex type subject", "--random-features")
    filled = load(weft_data("hetero_acm"), random_features=8)
    assert filled.features["subject"].shape == (60, 8)
    assert torch.equal(filled.features["paper"], graph.features["paper"])
    require_trainable(filled)


def test_ten_splits(weft_data: Callable[[str], Path]) -> None:
    path = weft_data("tolokers")
    with np.load(path, allow_pickle=False) as file:
        masks = file["val_masks"]
    graph = load(path, split=7)
    assert graph.val_mask is not None
    assert np.array_equal(graph.val_mask.numpy(), masks[7])
    with pytest.raises(InputError) as error:
        load(path, split=10)
    assert_one_line(error, path, "split 10", "10 splits")


def test_splits_of_different_number(tmp_path: Path) -> None:
    masks = {"train_masks": np.eye(3, dtype=bool), "val_masks": np.eye(3, dtype=bool)[1:2]}
    path = written(tmp_path, **EDGES, **masks)
    assert load(path).val_mask is not None
    with pytest.raises(InputError) as error:
        load(path, split=1)
    assert_one_line(error, path, "val_mask has shape [0]")


def test_seeded_split_covers_the_labelled_vertices(tmp_path: Path) -> None:
    y = np.arange(50) % 4 - 1
    path = written(tmp_path, edge_index=np.array([[0], [1]]), y=y)
    first, again, other = load(path), load(path), load(path, seed=1)
    same_graph(first, again)
    masks = [first.train_mask, first.val_mask, first.test_mask]
    total = sum(mask.int() for mask in masks if mask is not None)
    assert torch.equal(total, torch.from_numpy(y >= 0).int())
    assert not torch.equal(masks[0], other.train_mask)  # type: ignore[arg-type]


def written(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "g.npz", **arrays)
    return folder / "g.npz"


EDGES = {"edge_index": np.array([[0, 1], [1, 2]], dtype=np.int32)}
CSR = {"x_data": np.ones(2, np.float32), "x_indices": np.array([0, 4]), "x_indptr": np.array([0, 1, 1, 2])}
TYPED = {
    "node_types": np.array(["a", "b"]),
    "num_nodes": np.array([2, 3]),
    "edge_types": np.array(["a|r|b"]),
    "edge_index|a|r|b": np.array([[0, 1], [2, 0]]),
}


def test_small_files(tmp_path: Path) -> None:
    graph = load(written(tmp_path, **EDGES, **CSR, x_shape=np.array([3, 5]), y=np.eye(3, dtype=np.uint8)))
    assert graph.x is not None
    assert graph.x.tolist() == [[1, 0, 0, 0, 0], [0] * 5, [0, 0, 0, 0, 1]]
    assert graph.multilabel
    assert graph.train_mask is not None
    weighted = load(
        written(tmp_path, **EDGES, edge_weight=np.array([0.5, 2.0], np.float32), edge_type=np.array([0, 2]))
    )
    assert weighted.relations == ("vertex|0|vertex", "vertex|1|vertex", "vertex|2|vertex")
    assert weighted.in_edges.weight is not None
    assert weighted.in_edges.weight.tolist() == [0.5, 2.0]
    several = load(written(tmp_path, **TYPED, y=np.eye(3, dtype=np.uint8), target_type=np.array("b")))
    assert several.y is not None
    assert several.y[:2].sum() == 0
    assert torch.equal(several.y[2:], torch.eye(3))
    assert several.in_edges.indices.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"y": np.zeros(3)}, ["no array 'edge_index'", "it contains y"]),
        ({"edge_index": np.zeros((3, 2), int)}, ["edge_index has shape [3, 2]", "(2, E)"]),
        ({"edge_index": np.array([[0, -1], [1, 2]])}, ["edge_index[0][1] is -1", "negative"]),
        ({**EDGES, "num_nodes": np.array(2)}, ["edge_index[1][1] is 2", "2 vertices"]),
        ({**EDGES, "num_nodes": np.array([2, 3])}, ["num_nodes", "[2]", "1 whole number"]),
        ({**EDGES, "y": np.array(["a", "b", "c"])}, ["y is <U1", "save real numbers"]),
        ({**EDGES, "num_nodes": np.array(3), "y": np.zeros(4, int)}, ["y", "[4]", "3 vertices"]),
        ({**EDGES, "x": np.array([[1.0], [np.inf], [0.0]], np.float32)}, ["x[1, 0] is inf", "finite"]),
        ({**EDGES, **CSR}, ["no array 'x_shape'"]),
        ({**EDGES, **CSR, "x_shape": np.array([4, 5])}, ["x_indptr has 4 entries", "4 rows"]),
        ({**EDGES, **CSR, "x_shape": np.array([3, 4])}, ["x_indices[1] is 4", "4 "]),
        ({**EDGES, "edge_type": np.array([0, 9]), "num_relations": np.array(3)}, ["edge_type[", "9", "3 relations"]),
        ({**TYPED, "num_nodes": np.array([5])}, ["num_nodes", "[1]", "2 whole numbers"]),
        ({**TYPED, "edge_types": np.array(["a|r|c"])}, ["edge_types: 'a|r|c'", "a, b"]),
        ({**TYPED, "edge_types": np.array(["b|r|a"])}, ["no array 'edge_index|b|r|a'"]),
        ({**TYPED, "num_nodes": np.array([2, 2])}, ["edge_index|a|r|b[1][0] is 2", "2 vertices"]),
        ({**TYPED, "y": np.zeros(3, int), "target_type": np.array("c")}, ["unknown target_type 'c'"]),
        ({**TYPED, "y": np.zeros(4, int), "target_type": np.array("b")}, ["y", "[4]", "3 vertices of type b"]),
        ({**TYPED, "y": np.zeros(3, int)}, ["no array 'target_type'"]),
        (
            {**EDGES, "node_feat": np.ones((3, 1))},
            ["unknown array 'node_feat'", "x_indptr, x_shape, y", "leave it out"],
        ),
        ({**EDGES, "edge_weights": np.ones(2)}, ["unknown array 'edge_weights'", "did you mean 'edge_weight'"]),
        ({**TYPED, "x|c": np.ones((3, 1))}, ["unknown array 'x|c'", "did you mean 'x|b'"]),
        ({**EDGES, "num_nodes": np.array(-1)}, ["num_nodes holds [-1]", "from 0 on"]),
        ({**TYPED, "num_nodes": np.array(["2", "3"])}, ["num_nodes holds ['2', '3']", "2 whole numbers"]),
        ({**TYPED, "num_nodes": np.array([2, 1 << 50])}, ["num_vertices=1125899906842626", "of memory"]),
        ({**TYPED, "node_types": np.array("a")}, ["node_types has shape []", "list of names"]),
        ({**EDGES, "y": np.array(1)}, ["y is a single value"]),
        ({**EDGES, "y": np.ones(3, np.longdouble)}, ["y is float128", "64 bits"]),
        ({**EDGES, "edge_type": np.array([0, 1 << 31])}, ["edge_type", str(1 << 31), "2 edges", "without gaps"]),
        ({**EDGES, "edge_type": np.array([0, 1]), "num_relations": np.array(1 << 40)}, ["edge_type", "without gaps"]),
        ({**EDGES, "edge_type": np.array([0, np.nan])}, ["edge_type[1] is nan", "whole numbers"]),
        ({**EDGES, **CSR, "x_shape": np.array([3, 1 << 50])}, ["x of shape [3, 1125899906842624]", "of memory"]),
        ({**EDGES, **CSR, "x_shape": np.array([3])}, ["x_shape", "2 whole numbers"]),
        ({**EDGES, **CSR, "x_shape": np.array([3, 5]), "x_indptr": np.array([0, 2, 1, 2])}, ["x_indptr", "ascend"]),
        ({**EDGES, "test_triples": np.array([[0, np.nan, 1]])}, ["test_triples[0, 1] is nan", "whole numbers"]),
        ({**EDGES, "y": np.array([{}], dtype=object)}, ["Python objects", "never unpickles", "without objects"]),
    ],
)
def test_errors_name_the_array(arrays: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    path = written(tmp_path, **arrays)
    with pytest.raises(InputError) as error:
        load(path)
    assert_one_line(error, path, *parts)


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u4", "<u8", ">i8", ">i2"])
def test_other_integer_dtypes(dtype: str, tmp_path: Path) -> None:
    arrays = {**EDGES, **CSR, "x_shape": np.array([3, 5]), "y": np.array([2, 0, 1]), "edge_type": np.array([1, 0])}
    expected = load(written(tmp_path, **arrays))
    floats = {"x_data": arrays.pop("x_data").astype(">f8")}
    same_graph(
        load(written(tmp_path, **floats, **{key: array.astype(dtype) for key, array in arrays.items()})), expected
    )


def test_typed_labels_of_unsigned_integers(tmp_path: Path) -> None:
    graph = load(written(tmp_path, **TYPED, y=np.array([0, 1, 2], np.uint8), target_type=np.array("b")))
    assert graph.y is not None
    assert graph.y.tolist() == [-1, -1, 0, 1, 2]


def with_member(folder: Path, shape: tuple[int, ...], content: bytes, stated_bytes: int | None = None) -> Path:
    """Write a file whose member x.npy states a shape, and whose directory may state another size in bytes."""
    path, header = written(folder, **EDGES), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header.getvalue() + content)
    if stated_bytes is not None:
        data = bytearray(path.read_bytes())
        offset = data.rindex(b"PK\x01\x02") + 24
        data[offset : offset + 4] = stated_bytes.to_bytes(4, "little")
        path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("shape", "stated_bytes", "part"),
    [
        ((3, 1 << 40), None, "asks for 13194139533440"),
        ((3, 1), None, "asks for 140"),
        ((3, (1 << 30) // 3), (1 << 32) - 2, "cannot contain the"),
    ],
)
def test_wrong_stated_sizes_are_refused(
    shape: tuple[int, ...], stated_bytes: int | None, part: str, tmp_path: Path
) -> None:
    path = with_member(tmp_path, shape, bytes(4000), stated_bytes)
    with pytest.raises(InputError) as error:
        load(path)
    assert_one_line(error, path, part)


def test_arrays_that_are_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_member(tmp_path, (3, 1000), bytes(12000))
    assert load(path).num_features == 1000
    monkeypatch.setattr(module, "memory_limit_bytes", lambda: 9999)
    with pytest.raises(InputError) as error:
        load(path)
    assert_one_line(error, path, "its arrays would need 12.", "only 10.0 kB are available", "CSR")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "g.npz"
    for content in (b"", b"PK\x03\x04 cut short", b"\x80\x04K*."):
        path.write_bytes(content)
        with pytest.raises(InputError) as error:
            load(path)
        assert_one_line(error, path, "not a zip file", "numpy.savez")
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "one.npy").rename(path)
    with pytest.raises(InputError) as error:
        load(path)
    assert_one_line(error, path, "not a zip file")
