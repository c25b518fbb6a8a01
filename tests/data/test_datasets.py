"""`load` reads names and paths, adds random features and classes on request, and explains its errors."""

from __future__ import annotations

import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lib.graph_checks import assert_one_line, same_graph
from weft.data import Graph, load, require_trainable
from weft.data.io.published.downloads import LOADERS
from weft.utils.errors import InputError


def test_digits() -> None:
    np.random.seed(1)
    graph = load("digits")
    np.random.seed(2)
    same_graph(graph, load("digits", seed=5))
    assert (graph.num_vertices, graph.num_edges, graph.num_features, graph.num_classes) == (1797, 19858, 64, 10)
    assert graph.fingerprint == "1c01515574da8ad26ca9038d13f149007f5f97d050e5435017346bbb47d8c792"
    assert torch.equal(graph.in_edges.indices, graph.in_edges.transpose.indices)
    assert not graph.in_edges.has_loop.any()
    assert int(graph.in_edges.degree.min()) >= 8
    assert graph.x is not None
    assert (float(graph.x.min()), float(graph.x.max())) == (0.0, 1.0)
    assert graph.y is not None
    assert graph.train_mask is not None
    assert graph.y[graph.train_mask].bincount().tolist() == [20] * 10
    assert [int(mask.sum()) for mask in (graph.val_mask, graph.test_mask) if mask is not None] == [300, 1000]
    source, target = graph.in_edges.edges()
    assert float((graph.y[source] == graph.y[target]).float().mean()) > 0.9
    require_trainable(graph)


def small(folder: Path, name: str = "small", **arrays: Any) -> Path:
    np.savez(folder / f"{name}.npz", edge_index=np.array([[0, 1, 4], [1, 2, 0]]), **arrays)
    return folder / f"{name}.npz"


def test_names_of_files_in_weft_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small(tmp_path, "cora")  # takes precedence over the public dataset of that name
    small(tmp_path, "my_graph-2")
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    same_graph(load("cora"), load(path))
    assert load("my_graph-2").num_vertices == 5
    with pytest.raises(InputError) as error:
        load("my_graph-3")
    assert_one_line(error, "unknown dataset 'my_graph-3'", "did you mean 'my_graph-2'?")


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_DATA", raising=False)
    for name, nearest in (
        ("digit", "digits"),
        ("reditt", "reddit"),
        ("amazon-foto", "amazon_photo"),
        ("rmat", "rmat:"),
    ):
        with pytest.raises(InputError) as error:
            load(name)
        assert_one_line(error, f"unknown dataset '{name}'", f"did you mean '{nearest}'?")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = load("rmat:10,20")
    graph.save(tmp_path / "cora")
    same_graph(load(str(tmp_path / "cora")), graph)
    monkeypatch.chdir(tmp_path)
    same_graph(load("cora"), graph)  # A store in the working folder takes precedence over a public dataset.
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("hello")
    (tmp_path / "graph.xyz.gz").write_text("hello")
    for path, parts in (
        (tmp_path / "none.npz", ["none.npz", "no such file or folder"]),
        (tmp_path / "none", ["none", "no such file or folder"]),
        ("empty", ["empty", "manifest.json: missing, so this is no graph folder"]),
        (tmp_path / "notes.md", ["notes.md", "unknown kind of file '.md'", ".npz"]),
        (tmp_path / "graph.xyz.gz", ["unknown kind of file '.xyz'"]),
        (tmp_path, ["manifest.json", "missing"]),
    ):
        with pytest.raises(InputError) as error:
            load(path)
        assert_one_line(error, *parts)


def test_random_features_and_classes(tmp_path: Path) -> None:
    path = small(tmp_path)
    graph = load(path, random_features=6, random_classes=2)
    same_graph(graph, load(path, random_features=6, random_classes=2))
    assert graph.x is not None
    assert graph.x.shape == (5, 6)
    assert graph.num_classes == 2
    require_trainable(graph)
    other = load(path, random_features=6, random_classes=2, seed=1)
    assert not torch.equal(graph.x, other.x)  # type: ignore[arg-type]
    masks = [graph.train_mask, graph.val_mask, graph.test_mask]
    assert [int(mask.sum()) for mask in masks if mask is not None] == [3, 1, 1]
    x, y = np.ones((5, 2), np.float32), np.zeros(5, int)
    for arrays, option in (({"x": x}, "features"), ({"y": y}, "classes")):
        path = small(tmp_path, **arrays)
        with pytest.raises(InputError) as error:
            load(path, **{f"random_{option}": 3})
        assert_one_line(error, "small already has", f"leave out --random-{option}")


@pytest.mark.parametrize("name", LOADERS)
def test_a_download_that_cannot_be_reached(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = pytest.importorskip("torch_geometric.io.fs")
    monkeypatch.delenv("WEFT_DATA", raising=False)

    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(fs, "cp", refuse)
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(InputError) as error:
        load(name.replace("_", "-"), root=tmp_path)
    raw = tmp_path / name / LOADERS[name].raw
    assert_one_line(
        error, f"{name}: cannot fetch https://", "Name or service not known", f"put the raw files into {raw}"
    )
    assert raw.is_dir(), "PyG looks for raw files elsewhere"
    assert "{" not in str(error.value)


def test_a_broken_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_geometric")
    monkeypatch.delenv("WEFT_DATA", raising=False)
    raw = tmp_path / "amazon_photo" / "Photo" / "raw"
    raw.mkdir(parents=True)
    (raw / "amazon_electronics_photo.npz").write_bytes(b"<html>sorry</html>")
    with pytest.raises(InputError) as error:
        load("amazon_photo", root=tmp_path)
    assert_one_line(error, f"amazon_photo: delete {raw} to fetch its files again", "not a zip file")


def test_a_download_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weft_data: Callable[[str], Path]) -> None:
    """A raw file that was downloaded by hand is read; a graph without masks gets a random split."""
    pytest.importorskip("torch_geometric")
    with np.load(weft_data("amazon_photo"), allow_pickle=False) as file:
        source, target = file["edge_index"]
        arrays = {f"attr_{part}": file[f"x_{part}"] for part in ("data", "indices", "indptr", "shape")}
        labels = file["y"]
    monkeypatch.delenv("WEFT_DATA")
    order = np.argsort(source, kind="stable")
    indptr = np.searchsorted(source[order], np.arange(len(labels) + 1))
    raw = tmp_path / "amazon_photo" / "Photo" / "raw"
    raw.mkdir(parents=True)
    adjacency = {"adj_data": np.ones(len(source)), "adj_indices": target[order], "adj_indptr": indptr}
    shape = np.array([len(labels)] * 2)
    np.savez(raw / "amazon_electronics_photo.npz", **adjacency, adj_shape=shape, **arrays, labels=labels)
    graph = load("amazon_photo", root=tmp_path)
    assert isinstance(graph, Graph)
    assert (graph.num_vertices, graph.num_edges, graph.num_features, graph.num_classes) == (7650, 238162, 745, 8)
    require_trainable(graph)


def test_normalized_features_sum_to_one() -> None:
    graph = load("digits", normalize_features=True)
    assert graph.x is not None
    torch.testing.assert_close(graph.x.sum(1), torch.ones(graph.num_vertices))
    with pytest.raises(InputError, match="no features to normalize"):
        load("rmat:vertices=10,edges=20", normalize_features=True)
