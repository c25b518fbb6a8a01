"""Raw files of public data sets give the graph that PyG gives, and no file is unpickled."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.lib.graph_checks import assert_one_line, same_graph
from weft.data import Graph, load
from weft.data.io.published.downloads import LOADERS
from weft.data.io.published.pickled_arrays import PickledCsr, read_pickled
from weft.utils.errors import InputError

sparse = pytest.importorskip("scipy.sparse")
datasets = pytest.importorskip("torch_geometric.datasets")

FORMER_NAMES = {b"scipy.sparse._csr": b"scipy.sparse.csr", b"numpy._core.multiarray": b"numpy.core.multiarray"}
RANDOM = np.random.Generator(np.random.PCG64(0))


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Pickler that writes bytes as Python 2 wrote its strings."""

    dispatch: ClassVar[Any] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_bytes(self, value: bytes) -> None:
        self.write(
            b"T" + struct.pack("<i", len(value)) + value if self.bin else b"S" + repr(value)[1:].encode() + b"\n"
        )
        self.memoize(value)

    dispatch[bytes] = save_bytes


def write_pickle(path: Path, value: object, protocol: int = 2) -> None:
    """Write a value to a file like Python 2 with SciPy and NumPy of 2016."""
    file = io.BytesIO()
    Python2Pickler(file, protocol).dump(value)
    data = file.getvalue()
    for name, former in FORMER_NAMES.items():
        data = data.replace(name, former)
    path.write_bytes(data)


def features(num_rows: int) -> Any:
    """Return random features [num_rows, 5] as a CSR matrix."""
    return sparse.csr_matrix(RANDOM.integers(0, 2, (num_rows, 5)).astype(np.float32))


def write_planetoid(raw: Path, protocol: int = 2, prefix: str = "ind.citeseer") -> None:
    """Write a graph of 700 vertices of which 16 are for the test, and 4 in between have no features."""
    classes = np.eye(3, dtype=np.int32)
    test_ids = np.delete(np.arange(680, 700), [3, 7, 8, 12])
    graph = defaultdict(list, {v: [*RANDOM.integers(0, 700, v % 4).tolist(), v, 0, 0] for v in range(700)})
    files = {
        "x": features(60),
        "tx": features(16),
        "allx": features(680),
        "y": classes[RANDOM.integers(0, 3, 60)],
        "ty": classes[RANDOM.integers(0, 3, 16)],
        "ally": classes[RANDOM.integers(0, 3, 680)],
        "graph": graph,
    }
    for name, value in files.items():
        write_pickle(raw / f"{prefix}.{name}", value, protocol)
    (raw / f"{prefix}.test.index").write_text("".join(f"{v}\n" for v in RANDOM.permutation(test_ids)))


def write_npz(path: Path, **others: Any) -> None:
    """Write a graph of 30 vertices with duplicate edges and loops as CSR parts."""
    x = RANDOM.integers(0, 3, (30, 5)).astype(np.float32)
    adjacency, x = sparse.random(30, 30, 0.2, "csr", rng=RANDOM), sparse.csr_matrix(x)
    arrays = {
        f"{key}_{part}": np.array(getattr(matrix, part))
        for key, matrix in (("adj", adjacency), ("attr", x))
        for part in ("data", "indices", "indptr", "shape")
    }
    np.savez(path, **arrays, labels=RANDOM.integers(0, 4, 30), **others)


def write_graphsaint(raw: Path, labels: Callable[[int], Any]) -> None:
    """Write a graph of 30 vertices with labels and a split."""
    sparse.save_npz(raw / "adj_full.npz", sparse.random(30, 30, 0.2, "csr", rng=RANDOM))
    np.save(raw / "feats.npy", RANDOM.random((30, 5)))
    (raw / "class_map.json").write_text(json.dumps({str(v): labels(v) for v in range(30)}))
    roles = {"tr": [*range(10)], "va": [*range(10, 20)], "te": [*range(20, 29)]}
    (raw / "role.json").write_text(json.dumps(roles))


def write_reddit(raw: Path) -> None:
    """Write a graph of 30 vertices with a split, loops and duplicate edges."""
    row, col = RANDOM.integers(0, 30, (2, 200))
    np.savez(raw / "reddit_graph.npz", row=row, col=col, data=np.ones(200), shape=[30, 30], format="coo")
    y, roles = RANDOM.integers(0, 4, 30), RANDOM.integers(1, 4, 30)
    np.savez(raw / "reddit_data.npz", feature=RANDOM.random((30, 5)), label=y, node_types=roles)


NO_NUMBERS = {"idx_to_class": np.array({0: "a"}, dtype=object)}
"""Array that PyG does not read either."""
WRITERS: dict[str, Callable[[Path], None]] = {
    "amazon_photo": lambda raw: write_npz(raw / "amazon_electronics_photo.npz"),
    "citeseer": write_planetoid,
    "coauthor_cs": lambda raw: write_npz(raw / "ms_academic_cs.npz"),
    "cora_ml": lambda raw: write_npz(raw / "cora_ml.npz", **NO_NUMBERS),
    "flickr": lambda raw: write_graphsaint(raw, lambda vertex: vertex % 3),
    "reddit": write_reddit,
    "yelp": lambda raw: write_graphsaint(raw, lambda vertex: [vertex % 2, 1, vertex % 3 // 2]),
}


def raw_folder(name: str, root: Path) -> Path:
    """Create the folder of the raw files of a data set, and return it."""
    raw = root / name / LOADERS[name].raw
    raw.mkdir(parents=True)
    return raw


@pytest.fixture(autouse=True)
def no_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_DATA", raising=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", WRITERS)
def test_raw_files_give_the_graph_of_pyg(name: str, tmp_path: Path) -> None:
    WRITERS[name](raw_folder(name, tmp_path))
    graph, loader = load(name, root=tmp_path), LOADERS[name]
    assert not (tmp_path / name / "processed").exists()
    arguments = [] if loader.argument is None else [loader.argument]
    reference = Graph.from_pyg(getattr(datasets, loader.kind)(str(tmp_path / name), *arguments)[0], name=name)
    if reference.train_mask is None:
        reference = reference.with_split((0.6, 0.2, 0.2), seed=0)
    same_graph(graph, reference)


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_pickled_arrays(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "pickled"
    for array in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.eye(3, dtype=">i4")), np.array([True, False])):
        write_pickle(path, array, protocol)
        assert read_pickled(path).dtype == array.dtype
        np.testing.assert_array_equal(read_pickled(path), array)
        path.write_bytes(pickle.dumps(array, protocol).replace(b"numpy._core", b"numpy.core"))  # of Python 3
        np.testing.assert_array_equal(read_pickled(path), array)
    matrix, graph = features(4), defaultdict(list, {0: [1, 1 << 40], 300: [], 70_000: [2]})
    write_pickle(path, matrix, protocol)
    csr = read_pickled(path)
    assert isinstance(csr, PickledCsr)
    assert csr.shape == (4, 5)
    for part in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(csr.part(part), getattr(matrix, part))
    write_pickle(path, graph, protocol)
    assert read_pickled(path) == graph


class Exploit:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("name", ["x", "tx", "allx", "graph", "y", "ty", "ally"])
def test_a_pickle_that_calls_a_function_is_refused(name: str, tmp_path: Path) -> None:
    raw = raw_folder("cora", tmp_path)
    write_planetoid(raw, prefix="ind.cora")
    hostile = pickle.dumps(Exploit(tmp_path / "mark"), 2)
    (raw / f"ind.cora.{name}").write_bytes(hostile)
    if name != "x":  # the rows of x are also in allx
        with pytest.raises(InputError) as error:
            load("cora", root=tmp_path)
        assert_one_line(error, "it calls", "which arrays of numbers do not need", f"delete {raw}")
    assert not (tmp_path / "mark").exists()
    pickle.loads(hostile)
    assert (tmp_path / "mark").exists(), "the pickle is harmless"


def test_processed_copies_are_not_unpickled(tmp_path: Path) -> None:
    raw = raw_folder("amazon_photo", tmp_path)
    WRITERS["amazon_photo"](raw)
    processed = raw.with_name("processed")
    processed.mkdir()
    for name in ("data.pt", "pre_transform.pt", "pre_filter.pt"):
        torch.save(Exploit(tmp_path / "mark"), processed / name)
    assert load("amazon_photo", root=tmp_path).num_vertices == 30
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02",
        b"\x80\x02]q\xff",
        b"\x80\x02(.",
        b"\x80\x02cos\nsystem\nU\x02id\x85R.",
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00N.",
        b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x85R(K\x01K\x02\x85cnumpy\ndtype\nU\x02O8\x85R\x89U\x02abtb.",
        b"\x80\x02cnumpy\ndtype\n}U\x08__dict__K\x01sb.",
        b"\x80\x02r\xff\xff\xff\x7f.",
    ],
)
def test_other_content_is_refused(content: bytes, tmp_path: Path) -> None:
    raw = raw_folder("cora", tmp_path)
    write_planetoid(raw, prefix="ind.cora")
    (raw / "ind.cora.allx").write_bytes(content)
    with pytest.raises(InputError) as error:
        load("cora", root=tmp_path)
    assert_one_line(error, f"delete {raw}")
