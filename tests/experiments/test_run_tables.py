"""Several runs as one table: `weft.runs`, `weft.sweep` and `weft.compare`; and `weft.report`."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.config.config import Config
from weft.experiments import sweep
from weft.training.run import Run, run

GRAPH = "sbm:vertices=60,degree=4,classes=3,features=5"


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sweep train without starting processes."""

    def run_in_process(config: Config, *objects: Any, in_subprocess: bool, out: Path, **options: Any) -> Run:
        assert in_subprocess
        return run(config, *objects, out=out, **options)

    monkeypatch.setattr(sweep, "run", run_in_process)


def test_a_sweep_is_a_table(tmp_path: Path) -> None:
    runs = weft.sweep(GRAPH, ["gcn", "sage"], hidden=[4, 8], epochs=3, out=tmp_path, quiet=True)
    names = [f"hidden={hidden},model={model}" for hidden in (4, 8) for model in ("gcn", "sage")]
    assert list(runs) == names
    columns = runs.columns
    assert list(columns)[:2] == ["model", "hidden"]
    assert (columns["hidden"], columns["model"]) == ([4, 4, 8, 8], ["gcn", "sage", "gcn", "sage"])
    assert "epochs" in columns
    assert "seed" not in columns
    assert columns["val_accuracy"] == [run.summary["val_accuracy"] for run in runs.values()]
    frame = runs.to_pandas()
    assert list(frame.index) == names
    assert frame.loc["hidden=8,model=gcn", "loss"] == runs["hidden=8,model=gcn"].summary["loss"]
    assert runs.best().summary["val_accuracy"] == max(columns["val_accuracy"])
    assert runs.best("loss").summary["loss"] == min(columns["loss"])
    with pytest.raises(weft.InputError, match="unknown score 'val_acuracy': did you mean 'val_accuracy'"):
        runs.best("val_acuracy")
    again = weft.runs(tmp_path)
    assert again.keys() == runs.keys()
    drawn = weft.sweep(GRAPH, lr="1e-3..1e-1", random=2, epochs=1, out=tmp_path / "drawn", quiet=True)
    assert sorted(drawn.columns["lr"]) == sorted(run.config.lr for run in drawn.values())
    with pytest.raises(weft.InputError, match=r"weft.sweep: unknown option 'learning_rate': use lr"):
        weft.sweep(GRAPH, learning_rate=[0.1], out=tmp_path)


def test_runs_below_a_folder(tmp_path: Path) -> None:
    with pytest.raises(weft.InputError, match="contains no run: give the folder of runs"):
        weft.runs(tmp_path)
    (tmp_path / "config.toml").write_text("[other]")  # of another program
    for name, seed in (("a", 0), ("group/<b>", 1)):
        weft.train(GRAPH, epochs=2, seed=seed, out=tmp_path / name, quiet=True)
    record = tmp_path / "a" / "metrics.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))  # without its summary
    runs = weft.runs(tmp_path)
    assert list(runs) == ["a", "group/<b>"]
    assert runs.columns["seed"] == [0, 1]
    assert runs.columns["epochs"] == [None, 2]
    assert runs.best() is runs["group/<b>"]
    head, *rows = ET.fromstring(runs._repr_html_())[1]
    assert [cell.text for cell in head][:2] == ["run", "seed"]
    assert [[cell.text for cell in row][:3] for row in rows] == [["a", "0", "-"], ["group/<b>", "1", rows[1][2].text]]


def test_a_comparison_is_a_table_and_a_report(tmp_path: Path) -> None:
    weft.train(GRAPH, epochs=2, out=tmp_path / "runs" / "first", quiet=True)
    shutil.copytree(tmp_path / "runs" / "first", tmp_path / "runs" / "second")
    runs = weft.runs(tmp_path / "runs")
    for subject in (
        runs,
        runs["first"],
        [runs["first"], tmp_path / "runs" / "second"],
        str(tmp_path / "runs" / "first"),
    ):
        page = weft.report(subject, tmp_path / "report.html", overwrite=True)
        assert "first" in page.read_text()
    with pytest.raises(weft.InputError, match="exists already"):
        weft.report(runs, tmp_path / "report.html")


def test_compare_returns_a_table(tmp_path: Path) -> None:
    runs = weft.compare(GRAPH, strategies=["single", "tensor"], epochs=2, out=tmp_path / "out", quiet=True)
    assert runs.columns["strategy"] == ["single", "tensor"]
    assert "<th" in runs._repr_html_()
