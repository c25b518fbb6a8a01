"""Pruned runs have the losses and scores of full ones, and record which rows they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lib.graphs import make_graph, with_few_labels
from tests.lib.running import train
from weft.data import Graph


def few_labels() -> Graph:
    return with_few_labels(make_graph(150), 4)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("single", 1),
        pytest.param("hybrid", 2, marks=pytest.mark.slow),
        pytest.param("tensor", 3, marks=pytest.mark.slow),
        pytest.param("split", 2, marks=pytest.mark.slow),
    ],
)
def test_losses_and_scores_are_those_of_all_rows(strategy: str, workers: int, tmp_path: Path) -> None:
    few_labels().save(tmp_path / "graph")
    epochs = []
    for disable in ("", "reach"):
        options: dict[str, Any] = {"epochs": 3, "dtype": "float64", "disable": disable, "quiet": True}
        run = train(
            str(tmp_path / "graph"), strategy=strategy, workers=workers, out=tmp_path / f"run{disable}", **options
        )
        epochs.append([line for line in run.records if line["kind"] == "epoch"])
        reach = run.records[0]["placement"][0].get("reach", {})
        assert set(reach) == (
            set() if disable else {"evaluation"} if strategy == "split" else {"training", "evaluation"}
        )
    for line, whole in zip(*epochs, strict=True):
        scores = {name for name in whole if name.endswith("_accuracy")}
        assert scores
        for name in (*scores, "loss"):
            assert line[name] == pytest.approx(whole[name], rel=1e-9)


def test_the_record_says_why_all_rows_are_read(tmp_path: Path) -> None:
    run = train(few_labels(), out=tmp_path / "run", epochs=1, norm="batch")
    assert run.records[0]["placement"][0]["reach"]["training"] == "BatchNorm sums over all rows"
