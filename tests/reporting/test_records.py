"""Records are read as columns, pandas tables and charts; docs/report.md documents every field."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import weft
from tests.lib.running import train
from tests.reporting.folders import make_run
from weft.reporting import epoch_columns, rank_columns
from weft.utils.errors import InputError

DOCS = Path(__file__).parents[2] / "docs" / "report.md"
GRAPH = "sbm:vertices=300,degree=6,classes=3,features=8"


@pytest.fixture
def run(tmp_path: Path) -> weft.Run:
    return weft.Run.open(make_run(tmp_path / "run", epochs=4, ranks=2))


def test_columns_equal_the_records(run: weft.Run) -> None:
    epochs, ranks = epoch_columns(run.records), rank_columns(run.records)
    assert list(epochs) == ["epoch", "loss", "lr", "seconds", "val_accuracy"]
    assert epochs["loss"] == [line["loss"] for line in run.history]
    assert ranks["bytes_sent.halo"] == [100, 101] * 4
    assert {len(column) for column in ranks.values()} == {8}


def test_missing_fields_are_none(run: weft.Run) -> None:
    lines = [*run.records, {"kind": "epoch", "version": 1, "epoch": 4, "loss": 1.0, "seconds": 1.0}]
    assert epoch_columns(lines)["val_accuracy"][-2:] == [run.history[-1]["val_accuracy"], None]


def test_pandas(run: weft.Run) -> None:
    pytest.importorskip("pandas")
    epochs, ranks = run.to_pandas(), run.to_pandas("ranks")
    assert epochs.index.tolist() == [0, 1, 2, 3]
    assert epochs["loss"].tolist() == [line["loss"] for line in run.history]
    assert ranks.loc[ranks["rank"] == 1, "bytes_sent.halo"].tolist() == [101] * 4
    with pytest.raises(InputError, match="unknown table 'rank': did you mean 'ranks'"):
        run.to_pandas("rank")


def test_missing_pandas_is_an_error(run: weft.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"needs pandas: pip install 'weft\[tables\]'"):
        run.to_pandas()


def test_a_plot_has_the_history(run: weft.Run, tmp_path: Path) -> None:
    pytest.importorskip("altair")
    plot = run.plot()
    loss, score = plot.chart.to_dict()["vconcat"]
    for name in ("epoch", "loss", "accuracy", "train", "val"):
        assert f">{name}</text>" in plot._repr_svg_(), "a notebook shows the figure"
    assert [row["loss"] for row in loss["data"]["values"]] == [line["loss"] for line in run.history]
    assert [row["value"] for row in score["data"]["values"]] == [line["val_accuracy"] for line in run.history]
    empty = make_run(tmp_path / "empty", epochs=1, ended=False)
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="has no finished epoch yet"):
        weft.Run.open(empty).plot()


def test_every_field_is_documented(tmp_path: Path) -> None:
    """The table of each kind of record documents every field of real runs."""
    folders = [
        train(GRAPH, workers=2, strategy="tensor", epochs=2, checkpoint_every=1, out=tmp_path / "tensor").folder,
        train(GRAPH, strategy="offload", chunks=2, epochs=1, until="val_accuracy=1", out=tmp_path / "offload").folder,
    ]
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^###? |\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL))
    documented = {kind: set(re.findall(r"^\| `(\w+)`", body, re.MULTILINE)) for kind, body in sections.items()}
    kinds = set()
    for folder in folders:
        for line in weft.Run.open(folder).records:
            kinds.add(line["kind"])
            for name in line.keys() - {"kind", "version"}:
                assert name in documented[line["kind"]] or re.fullmatch("(train|val|test)_accuracy", name), (
                    line["kind"],
                    name,
                )
    assert kinds == documented.keys() == {"config", "epoch", "rank", "event", "best", "summary"}
