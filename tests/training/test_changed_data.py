"""A run resumes and predicts on the data that it was trained on, and names the data that have changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import weft
from tests.lib.graphs import make_graph
from tests.lib.pairwise import param
from tests.lib.running import train
from weft.cli.main import main
from weft.data import Graph, changed_data, data_digests
from weft.data.store import digests
from weft.utils.errors import InputError

OPTIONS: dict[str, Any] = {"epochs": 2, "checkpoint_every": 1, "quiet": True}
CHANGES: dict[str, Callable[[Graph], Graph]] = {
    "y": lambda graph: replace(graph, y=graph.y.flip(0)),  # type: ignore[union-attr]
    "x": lambda graph: replace(graph, x=graph.x + 1),  # type: ignore[operator]
    "train_mask": lambda graph: replace(graph, train_mask=without_first(graph.train_mask)),
    "edge weights": lambda graph: replace(
        graph,
        in_edges=graph.in_edges.with_weight(graph.in_edges.weight * 2),  # type: ignore[operator]
    ),
}


def without_first(mask: Tensor | None) -> Tensor:
    """Return a mask without its first vertex."""
    assert mask is not None
    changed = mask.clone()
    changed[mask.nonzero()[0]] = False
    return changed


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Return a folder with a graph of weighted edges."""
    replace(make_graph(40, weighted=True), name="mine").save(tmp_path / "graph")
    return tmp_path / "graph"


@pytest.mark.parametrize(
    ("workers", "name"),
    [
        param(workers, name, name=f"{workers}-{name}", quick=workers == 1 or name == "y")
        for workers, name in product((1, 2), CHANGES)
    ],
)
def test_changed_data_are_refused(name: str, workers: int, stored: Path, tmp_path: Path) -> None:
    strategy = "hybrid" if workers > 1 else "single"
    options = {**OPTIONS, "out": tmp_path / "run", "strategy": strategy, "workers": workers}
    run = train(stored, **options)
    logits = weft.predict(run)
    assert len(train(stored, **{**options, "epochs": 3}, resume=True).history) == 3
    CHANGES[name](Graph.open(stored)).save(stored, overwrite=True)
    with pytest.raises(
        (InputError, AssertionError), match=f"--resume: the graph has changed since .* was trained \\({name}\\)"
    ):
        train(stored, **{**options, "epochs": 4}, resume=True)
    with pytest.raises(
        InputError, match=f"has changed since .* was trained \\({name}\\)\\. To predict on the new version: "
    ):
        weft.predict(run)
    assert weft.predict(run, stored).shape == logits.shape


def test_a_file_that_was_changed_in_its_place_is_named(stored: Path) -> None:
    labels = np.load(stored / "y.npy")
    np.save(stored / "y.npy", labels[::-1].copy())
    with pytest.raises(InputError, match=r"y\.npy: field 'sha256' of the data is not the manifest's"):
        weft.load(stored)


def test_unchanged_files_are_not_read_again(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with a newer modification time than in the manifest, such as a copy, is read again."""
    expected, hashed = data_digests(make_graph(40, weighted=True)), list[Any]()
    sha256 = digests.hashlib.sha256

    def counting_sha256(*data: bytes) -> Any:
        if not data:  # arrays are hashed in parts
            hashed.append(1)
        return sha256(*data)

    monkeypatch.setattr(digests, "hashlib", SimpleNamespace(sha256=counting_sha256))
    assert data_digests(weft.load(stored)) == expected
    assert not hashed
    os.utime(stored / "x.npy")
    assert data_digests(weft.load(stored)) == expected
    assert len(hashed) == 1


def test_verify_reads_files_that_seem_unchanged(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "info", str(stored), "--verify"]) == 0
    assert "checksums         all correct" in capsys.readouterr().out
    path = stored / "y.npy"
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert main(["data", "info", str(stored)]) == 0
    assert main(["data", "info", str(stored), "--verify"]) == 2
    assert "y.npy: field 'sha256'" in capsys.readouterr().err
    assert main(["data", "info", "digits", "--verify"]) == 2
    assert "--verify has no effect on digits" in capsys.readouterr().err


def test_a_tensor_that_is_changed_in_place_has_another_digest() -> None:
    graph = make_graph(40, weighted=True)
    before = data_digests(graph)
    assert graph.x is not None
    graph.x[0] += 1
    assert changed_data(graph, before) == ["x"]
    assert data_digests(graph)["x"] != before["x"]


def test_a_run_of_an_earlier_weft_warns_that_it_has_no_digests(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.training.loop.data_digests", lambda _: {})
    weft.train(stored, out=tmp_path / "run", **OPTIONS)
    monkeypatch.undo()
    weft.train(stored, out=tmp_path / "run", **{**OPTIONS, "epochs": 3}, resume=True)
    assert "without digests of the data" in capsys.readouterr().err
