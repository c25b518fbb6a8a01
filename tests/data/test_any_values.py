"""Files and objects of any values give a graph or an error of one line, in a bounded time."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.lib.small_files import QUICK, THOROUGH, assert_graph_or_one_line, graph, write_npz, write_typed_npz
from weft.data import Graph, load
from weft.data.checks.tensor_checks import UNSIGNED
from weft.partition import PartitionBook, make_book
from weft.partition.book import checksum, read

pytestmark = pytest.mark.filterwarnings("ignore::weft.data.DataWarning")

DTYPES = ("?", "i1", "u2", ">i4", "i8", "u8", "f2", "f4", ">f8", "c8", "U1", "M8[s]", "V3")
SHAPES: tuple[tuple[int, ...], ...] = ((3,), (2,), (1,), (0,), (), (2, 3), (3, 2), (3, 3), (2, 0), (3, 1), (2, 2, 2))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Sample a small array of any dtype, sometimes with the smallest or largest value of the dtype."""
    dtype, shape = np.dtype(draw(st.sampled_from(DTYPES))), draw(st.sampled_from(SHAPES))
    array = np.resize(np.array(draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))), shape).astype(str)
    array = array.astype(dtype) if dtype.kind not in "MV" else np.zeros(shape, dtype)
    if array.size and dtype.kind in "iuf" and draw(st.booleans()):
        edge = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        array.reshape(-1)[0] = draw(st.sampled_from([edge.min, edge.max, np.nan if dtype.kind == "f" else edge.max]))
    return array


@st.composite
def values(draw: st.DrawFn) -> Any:
    """Sample a tensor of any dtype and layout, or another object in place of a tensor."""
    array = draw(arrays())
    if array.dtype.kind in "UMV" or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from([None, 3, -1, 1 << 62, "abc", [0, 1, 2], array, object(), torch.nn.Parameter()]))
    tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    changes = [
        lambda t: t,
        lambda t: t.to("meta"),
        lambda t: t.to_sparse() if t.dim() and t.dtype not in UNSIGNED else t,
        lambda t: t.mT if t.dim() > 1 else t,
    ]
    return draw(st.sampled_from(changes))(tensor)


def some(names: Sequence[str], value: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Sample values for up to three of the names."""
    return st.dictionaries(st.sampled_from(names), value, min_size=1, max_size=3)


def json_values() -> st.SearchStrategy[Any]:
    """Sample values that a JSON file can contain."""
    leaf = st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from([1 << 70, 1e400, "", "a", "v|a|v", "<f4"])
    return (
        leaf | st.lists(leaf, max_size=3) | st.dictionaries(st.sampled_from(["x", "shape", "dtype"]), leaf, max_size=2)
    )


def try_npz(folder: Path, trials: settings, write: Callable[[Path], object]) -> None:
    """Try .npz files with the right names and other arrays."""
    path = folder / "g.npz"
    write(path)
    with np.load(path) as file:
        valid = dict(file)

    @trials
    @given(changed=some((*valid, "train_masks", "x", "edge_weight", "test_edge_index", "valid_triples"), arrays()))
    def try_values(changed: dict[str, np.ndarray]) -> None:
        np.savez(path, **valid | changed)
        assert_graph_or_one_line(lambda: load(path))

    try_values()


def try_manifest(folder: Path, trials: settings) -> None:
    """Try manifests with other values."""
    graph().save(folder / "store")
    manifest_path = folder / "store" / "manifest.json"
    valid = json.loads(manifest_path.read_text())

    @trials
    @given(changed=some(tuple(valid), json_values()), of_file=some(("dtype", "shape", "sha256"), json_values()))
    def try_values(changed: dict[str, Any], of_file: dict[str, Any]) -> None:
        files = valid["files"] | {"x": valid["files"]["x"] | of_file}
        manifest_path.write_text(json.dumps(valid | {"files": files} | changed))
        assert_graph_or_one_line(lambda: load(folder / "store"))

    try_values()


def try_store(folder: Path, trials: settings) -> None:
    """Try stores with other arrays and a manifest that matches them."""
    graph().save(folder / "valid")

    @trials
    @given(changed=some([path.stem for path in sorted((folder / "valid").glob("*.npy"))], arrays()))
    def try_values(changed: dict[str, np.ndarray]) -> None:
        shutil.copytree(folder / "valid", folder / "store", dirs_exist_ok=True)
        manifest_path = folder / "store" / "manifest.json"
        manifest = json.loads(manifest_path.read_text())
        for key, array in changed.items():
            np.save(folder / "store" / f"{key}.npy", array)
            about = {
                "dtype": array.dtype.str,
                "shape": list(array.shape),
                "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            }
            manifest["files"][key] = about
        manifest_path.write_text(json.dumps(manifest))
        assert_graph_or_one_line(lambda: load(folder / "store"))

    try_values()


def try_book(folder: Path, trials: settings) -> None:
    """Try partition books with other parts and metadata, and a matching checksum."""
    make_book(graph(), 2, method="range").save(folder / "book")
    metadata, part = read(folder / "book")
    valid = json.loads(metadata["about"])

    @trials
    @given(value=values(), changed=st.dictionaries(st.sampled_from([*valid, "more"]), json_values(), max_size=2))
    def try_values(value: Any, changed: dict[str, Any]) -> None:
        other = value if isinstance(value, torch.Tensor) and not value.is_meta else part
        other = other.to_dense().contiguous()
        about = json.dumps(valid | changed)
        try:
            stated = metadata | {"about": about, "sha256": checksum(about, other)}
        except RuntimeError:  # A single number has no checksum.
            stated = metadata
        save_file({"part": other.detach()}, folder / "book", stated)
        assert_graph_or_one_line(lambda: PartitionBook.open(folder / "book", graph()))

    try_values()


FIELDS = (
    "source",
    "target",
    "num_vertices",
    "weight",
    "edge_features",
    "x",
    "y",
    "train_mask",
    "val_links",
    "test_links",
)
TYPED_FIELDS = (*FIELDS, "edge_type", "relations", "vertex_types", "type_offsets", "features", "name")


def try_edges(_: Path, trials: settings) -> None:
    """Try graphs from any values, with and without vertex types."""
    edges = {"source": torch.tensor([0, 1, 2]), "target": torch.tensor([1, 2, 1])}
    typed = {
        "edge_type": torch.tensor([0, 1, 0]),
        "relations": ("v|a|v", "v|b|v"),
        "vertex_types": ("v",),
        "type_offsets": (0, 3),
    }

    @trials
    @given(fields=some(FIELDS, values()), typed_fields=some(TYPED_FIELDS, values()))
    def try_values(fields: dict[str, Any], typed_fields: dict[str, Any]) -> None:
        assert_graph_or_one_line(lambda: Graph.from_edges(**edges | fields))
        assert_graph_or_one_line(lambda: Graph.from_edges(**edges | typed | typed_fields))

    try_values()


ATTRIBUTES = ("edge_index", "edge_weight", "edge_attr", "edge_type", "x", "y", "train_mask", "num_nodes", "relations")


def try_pyg(_: Path, trials: settings) -> None:
    """Try objects of PyG with any attributes."""
    pyg = pytest.importorskip("torch_geometric.data")
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 1]])

    @trials
    @given(fields=some((*ATTRIBUTES, "adj_t"), values()), of_type=some(ATTRIBUTES, values()))
    def try_values(fields: dict[str, Any], of_type: dict[str, Any]) -> None:
        data, typed = pyg.Data(edge_index=edge_index), pyg.HeteroData()
        typed["a"].num_nodes = 3
        typed["a", "r", "a"].edge_index = edge_index
        for field, value in fields.items():
            data[field] = value
        for field, value in of_type.items():
            (typed["a", "r", "a"] if field.startswith("edge") else typed["a"])[field] = value
        for graph_data in (data, typed):
            assert_graph_or_one_line(lambda graph_data=graph_data: Graph.from_pyg(graph_data))

    try_values()


TRIALS: dict[str, Callable[[Path, settings], None]] = {
    "arrays of npz": partial(try_npz, write=write_npz),
    "arrays of typed npz": partial(try_npz, write=write_typed_npz),
    "values in manifest": try_manifest,
    "arrays of store": try_store,
    "values in book": try_book,
    "from edges": try_edges,
    "from PyG": try_pyg,
}


@pytest.mark.parametrize("trial", TRIALS)
def test_any_values(trial: str, tmp_path: Path) -> None:
    TRIALS[trial](tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trial", TRIALS)
def test_any_values_thoroughly(trial: str, tmp_path: Path) -> None:
    TRIALS[trial](tmp_path, THOROUGH)
