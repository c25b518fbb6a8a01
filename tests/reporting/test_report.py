"""Figures of a report equal the records; names are escaped, and damaged records are refused."""

from __future__ import annotations

import csv
import html
import json
import platform
import re
import shlex
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import weft
from tests.lib.running import train
from tests.reporting.folders import Elements, Line, make_run, rank_line, tables, text
from weft.cli.main import main
from weft.reporting import page as page_module
from weft.reporting import serve, write
from weft.reporting.records import KINDS, REQUIRED_FIELDS
from weft.reporting.serve import HOST, ReportServer
from weft.reporting.write import read_runs, report_page
from weft.utils.errors import InputError
from weft.utils.files.jsonl import Recorder

altair = pytest.importorskip("altair")
vl_convert = pytest.importorskip("vl_convert")
GRAPH = "sbm:vertices=300,degree=6,classes=3,features=8"
EXPORTED = (".svg", ".png", ".csv")
EVIL = '<img src=x onerror=alert(1)> & "quoted"'


@pytest.fixture(autouse=True)
def no_vega(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out Vega, which takes seconds to bundle and is only needed to draw figures."""
    monkeypatch.setattr(page_module, "vega", lambda: "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run of two ranks with a timeline and a partitioned graph."""
    out = tmp_path_factory.mktemp("runs") / "divided"
    train(GRAPH, workers=2, strategy="communicated", epochs=4, eval_every=2, timeline=1, out=out)
    return out


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[Line]:
    """Return the records of the run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def page_of(*folders: Path) -> str:
    return report_page(read_runs(folders))


def test_curves_equal_the_records(folder: Path, lines: list[Line]) -> None:
    figures, epochs = tables(page_of(folder)), [line for line in lines if line["kind"] == "epoch"]
    losses = [(row["split"], row["epoch"], row["loss"]) for row in figures["epochs"]]
    assert losses == [("train", row["epoch"] + 1, row["loss"]) for row in epochs] + [
        ("val", row["epoch"] + 1, row["val_loss"]) for row in epochs if "val_loss" in row
    ]  # people count epochs from 1
    assert len(losses) == 4 + 2  # 2 of 4 epochs are evaluated
    assert [row["seconds"] for row in figures["epoch-seconds"]] == [row["seconds"] for row in epochs]
    scores = {(row["epoch"], row["split"]): row["value"] for row in figures["scores-0"]}
    assert scores == {
        (row["epoch"] + 1, split): row[f"{split}_accuracy"]
        for row in epochs
        for split in ("train", "val", "test")
        if f"{split}_accuracy" in row
    }
    assert len(scores) == 6  # 2 of 4 epochs are evaluated


def test_the_header_says_where_a_run_comes_from(folder: Path, lines: list[Line], tmp_path: Path) -> None:
    start, page = lines[0], page_of(folder)
    header = text(page[page.index("<header>") : page.index("</header>")])
    assert start["host"] == platform.node()
    assert start["date"][:4] == str(time.localtime().tm_year)
    for name in ("date", "host", "processor", "commit", "command"):
        assert text(html.escape(start[name])) in header
    versions = f"weft {weft.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    assert versions in header
    run = train(GRAPH, epochs=1, out=tmp_path / "run")
    assert shlex.split(run.records[0]["command"]) == [Path(sys.executable).name, *sys.orig_argv[1:]]


def test_runs_of_earlier_versions_are_shown() -> None:
    page = page_of(*(Path(__file__).parents[1] / "fixtures" / "c72d10d" / name for name in ("run", "ranks")))
    assert "finished after" in text(page)


def test_seconds_equal_the_records(folder: Path, lines: list[Line]) -> None:
    figures, ranks = tables(page_of(folder)), [line for line in lines if line["kind"] == "rank"]
    shown = {"compute": "compute", "communication": "network", "waiting": "waiting"}
    for phase in ("train", "eval", "setup"):
        bars = {(row["label"], row["kind"]): row["seconds"] for row in figures[f"phase-{phase}"]}
        for rank in range(2):
            for kind in KINDS:
                seconds = [line[f"{kind}_seconds"] for line in ranks if (line["phase"], line["rank"]) == (phase, rank)]
                expected = sum(seconds) if phase == "setup" else statistics.median(seconds)
                assert bars[f"rank {rank}", shown[kind]] == expected
    courses = [(row["label"], row["epoch"], row["compute"], row["network"], row["waiting"]) for row in figures["ranks"]]
    trained = sorted((row for row in ranks if row["phase"] == "train"), key=lambda row: row["rank"])
    assert courses == [
        (f"rank {row['rank']}", row["epoch"] + 1, *(row[f"{kind}_seconds"] for kind in KINDS)) for row in trained
    ]


def test_counts_equal_the_records(folder: Path, lines: list[Line]) -> None:
    figures = tables(page_of(folder))
    trained = [line for line in lines if line["kind"] == "rank" and line["phase"] == "train"]
    traffic = {row["label"]: row["bytes"] for row in figures["traffic-0"] if row["kind"] == "counted"}
    last = [line for line in trained if line["epoch"] == 3]
    for tag in ("halo", "gradients"):
        assert traffic[f"sent: {tag}"] == sum(line["bytes_sent"][tag] for line in last) > 0
    assert traffic["sent: all tags"] == sum(sum(line["bytes_sent"].values()) for line in last)
    most = {row["label"]: row["bytes"] for row in figures["memory"]}
    for rank in range(2):
        assert most[f"rank {rank}"] == max(line["peak_memory_bytes"] for line in trained if line["rank"] == rank)
    loads = {(row["label"], row["load"]): row["value"] for row in figures["balance"]}
    assert [loads[f"rank {rank}", "edges x width"] for rank in range(2)] == [line["edges"] for line in last]
    shares = [row["share"] for row in figures["balance"] if row["load"] == "edges x width"]
    assert shares == pytest.approx(
        [line["edges"] / statistics.fmean(other["edges"] for other in last) for line in last]
    )


def test_the_graph_and_its_parts_are_counted(folder: Path) -> None:
    figures, graph = tables(page_of(folder)), weft.load(GRAPH)
    degree = graph.in_edges.degree.tolist()
    bars = {row["degree"]: row["vertices"] for row in figures["degrees"]}
    assert bars["0"] == degree.count(0)
    assert bars["1"] == degree.count(1)
    assert bars["4 to 7"] == sum(4 <= number <= 7 for number in degree)
    assert sum(bars.values()) == graph.num_vertices
    part = weft.partition.range_parts(graph.in_edges, 2)
    quality = weft.partition.Quality.measure(graph, part, 2, 0.0)
    parts = {(row["label"], row["load"]): row["value"] for row in figures["parts"]}
    for rank in range(2):
        assert parts[f"rank {rank}", "vertices"] == quality.vertices[rank]
        assert parts[f"rank {rank}", "in-edges"] == quality.in_edges[rank]
        assert parts[f"rank {rank}", "remote sources"] == quality.remote[rank]
    assert f"{quality.cut:,} of {graph.num_edges:,}" in text(page_of(folder))


def test_a_timeline_equals_the_file(folder: Path) -> None:
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    shown = tables(page_of(folder))["timeline-0"]
    expected = sorted(
        (row["name"], row["ts"] / 1e3, (row["ts"] + row["dur"]) / 1e3) for row in events if row["ph"] == "X"
    )
    assert sorted((row["name"], row["start"], row["stop"]) for row in shown) == expected
    lanes: dict[str, list[Line]] = {}
    for row in shown:
        lanes.setdefault(row["lane"], []).append(row)
    assert any(lane == "rank 1 compute (2)" for lane in lanes)
    for slices in lanes.values():  # Slices of a lane do not overlap.
        ordered = sorted(slices, key=lambda row: row["start"])
        assert all(first["stop"] <= second["start"] + 1e-9 for first, second in pairwise(ordered))


def test_planned_bytes_are_shown_next_to_counted_ones(tmp_path: Path) -> None:
    run = train(GRAPH, workers=2, strategy="tensor", epochs=2, out=tmp_path / "run")
    traffic: dict[str, dict[str, int]] = {"counted": {}, "planned": {}}
    for row in tables(page_of(run.folder))["traffic-0"]:
        traffic[row["kind"]][row["label"]] = row["bytes"]
    assert traffic["planned"] == traffic["counted"]
    assert {"sent: rows_to_cols", "sent: cols_to_rows", "sent: gradients", "sent: all tags"} <= traffic[
        "planned"
    ].keys()


def test_a_forecast_stands_beside_what_was_moved(tmp_path: Path) -> None:
    run = train(GRAPH, strategy="offload", chunks=2, epochs=2, out=tmp_path / "run")
    figures = tables(page_of(run.folder))
    forecast = run.records[0]["placement"][0]["forecast"]
    moved = {(row["label"], row["kind"]): row["bytes"] for row in figures["traffic-0"]}
    assert moved["to the device: all tags", "planned"] == forecast["to_device"]
    assert moved["to the device: all tags", "counted"] == forecast["to_device"]
    memory = {row["kind"]: row["bytes"] for row in figures["memory-estimates"]}
    assert memory == {f"{name}, estimated": forecast[name] for name in ("device", "host", "disk") if forecast[name]}


def test_records_have_the_required_fields(lines: list[Line]) -> None:
    """Records of a real run have all required fields. A run that ends normally records no events."""
    for kind in REQUIRED_FIELDS.keys() - {"event"}:
        of_kind = [line for line in lines if line["kind"] == kind]
        assert of_kind
        for line in of_kind:
            assert REQUIRED_FIELDS[kind].keys() <= line.keys()


def test_several_runs_are_compared(tmp_path: Path) -> None:
    first = make_run(tmp_path / "one", epochs=3)
    second = make_run(tmp_path / "two", epochs=5, scale=2.0, lr=0.5)
    page = page_of(first, second)
    losses = {(row["run"], row["epoch"]): row["loss"] for row in tables(page)["epochs"]}
    assert losses == {("one", e): 1 / e for e in range(1, 4)} | {("two", e): 2 / e for e in range(1, 6)}
    heads = [cell for row in page.split("<thead>")[1:2] for cell in row.split("</thead>")[0].split('scope="col">')[1:]]
    assert [cell.split("<")[0] for cell in heads] == ["one", "two"]
    assert "two, rank 1" in {row["label"] for row in tables(page)["balance"]}
    chart = json.loads(Elements(page).scripts["figure-loss"])
    assert chart["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["one", "two"]
    visible = text(page)
    assert "lr 0.01 0.5" in visible
    assert visible.count("weft train digits --model=gcn") == 2


def chart_of(page: str, figure: str) -> str:
    """Return a figure of a page as it is first shown, as SVG."""
    spec = json.loads(Elements(page).scripts[f"figure-{figure}"]) | {"width": 500}
    return str(vl_convert.vegalite_to_svg(spec | {"datasets": tables(page)}))


def strokes(svg: str) -> list[tuple[str, str]]:
    """Return color and dashes of each line of a chart."""
    paths = re.findall(r'<path aria-label="[^>]*>', svg)
    lines = [path for path in paths if 'aria-roledescription="line mark"' in path]
    return [tuple(re.findall(f'stroke{name}="([^"]*)"', line)[0] for name in ("", "-dasharray")) for line in lines]


def test_curves_that_coincide_are_both_visible(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "one"), make_run(tmp_path / "two"), make_run(tmp_path / "other", scale=2.0))
    assert "two coincides with one (largest difference 0)." in text(page)
    assert "other coincides" not in text(page)
    for figure in ("loss", "score-0"):
        lines = strokes(chart_of(page, figure))
        assert len(lines) == 3
        assert len({color for color, _ in lines}) == len({dashes for _, dashes in lines}) == 3


def test_every_curve_has_a_label_that_no_other_overlaps(tmp_path: Path) -> None:
    page = page_of(*(make_run(tmp_path / f"run{number}", scale=1 + number / 100) for number in range(6)))
    svg = chart_of(page, "loss")
    heights = sorted(float(height) for height, name in re.findall(r'translate\([\d.]+,([\d.-]+)\)"[^>]*>(run\d)<', svg))
    assert len(heights) == 6
    assert all(second - first >= 13.9 for first, second in pairwise(heights))


def test_the_best_epoch_is_marked(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", epochs=3))
    assert [row["best"] for row in tables(page)["epochs"]] == [False, False, True]
    assert "best epoch 3" in text(page)
    assert chart_of(page, "loss").count("best: true") == 1 + 1  # the diamond, and the point of the line
    unfinished = page_of(make_run(tmp_path / "unfinished", ended=False))
    assert not any(row["best"] for row in tables(unfinished)["epochs"])


def test_a_report_shows_validation_first(folder: Path) -> None:
    page = page_of(folder)
    svg = chart_of(page, "score-0")
    assert len(strokes(svg)) == 1
    assert ">val<" in svg
    assert not re.search(">(train|test)<", svg)
    select = next(param for param in json.loads(Elements(page).scripts["figure-score-0"])["params"] if "bind" in param)
    assert select["bind"]["options"] == ["val", "train", "test", "all"]


def test_losses_of_a_run_are_solid_and_dashed(folder: Path) -> None:
    page = page_of(folder)
    svg = chart_of(page, "loss")
    assert [dashes for _, dashes in strokes(svg)] == ["1,0", "7,4"]
    assert re.findall(">(train|val)<", svg) == ["train", "val"]
    assert "divided, val: " in text(page)


def test_the_confusion_matrix_equals_the_record(folder: Path, lines: list[Line]) -> None:
    page, best = page_of(folder), next(line for line in lines if line["kind"] == "best")
    assert best["epoch"] == lines[-1]["best_epoch"]
    figures, classes = tables(page), ["0", "1", "2"]
    for split in ("val", "test"):
        matrix = torch.tensor(best["splits"][split]["by_class"])
        cells = {(row["true"], row["predicted"]): row for row in figures["confusion-0"] if row["split"] == split}
        assert {pair: row["count"] for pair, row in cells.items()} == {
            (true, predicted): int(matrix[int(true), int(predicted)])
            for true in classes
            for predicted in classes
            if matrix[int(true), int(predicted)]
        }
        right, shown, true = matrix.diag(), matrix.sum(0), matrix.sum(1)
        assert right.sum() / matrix.sum() == pytest.approx(lines[-1][f"{split}_accuracy"])
        rows = {row["label"]: row for row in figures["by-class-0"] if row["split"] == split}
        for number, name in enumerate(classes):
            assert rows[name]["count"] == true[number]
            assert rows[name]["recall"] == pytest.approx(float(right[number] / true[number]), abs=1e-6)
            f1 = float(2 * right[number] / (shown[number] + true[number]))
            assert rows[name]["f1"] == pytest.approx(f1, abs=1e-6)
    assert "ROC and precision-recall curves need --metrics roc_auc or average_precision" in text(page)


BEST = {
    "by_class": [[40, 3], [2, 5]],
    "by_threshold": [{"class": None, "true_positives": [3, 5, 7], "false_positives": [0, 3, 43]}],
}
"""Counts of a split of two classes, with 43 and 7 rows."""


def make_ended_run(folder: Path, splits: dict[str, Any], *, class_names: list[str] | None = None) -> Path:
    """Write a run folder with counts of the best epoch."""
    recorder = Recorder(make_run(folder, ended=False) / "metrics.jsonl")
    schema = {"schema": {"class_names": class_names}} if class_names else {}
    begun = {"epoch": 3, "config": {}, "graph": schema, "num_parameters": 20, "ranks": 1, "placement": [{}]}
    recorder.write("config", **begun)
    recorder.write("best", epoch=2, splits=splits)
    recorder.write("summary", epochs=3, best_epoch=2, loss=0.3, ranks=[])
    recorder.close()
    return folder


def test_curves_over_thresholds(tmp_path: Path) -> None:
    run = make_ended_run(tmp_path / "fraud", {"val": BEST, "test": BEST}, class_names=["<b>fine</b>", "fraud"])
    page = page_of(run)
    assert [row["predicted"] for row in tables(page)["confusion-0"][:2]] == ["<b>fine</b>", "fraud"]
    assert "Split val: 45 of 50 vertices are predicted correctly (the diagonal)." in text(page)
    assert "The most frequent mistake is fraud instead of &lt;b&gt;fine&lt;/b&gt; (3)." in text(page)
    points = [row for row in tables(page)["thresholds"] if row["split"] == "val"]
    assert [row["recall"] for row in points] == [0, 0.428571, 0.714286, 1]
    assert [row["false_positive_rate"] for row in points] == [0, 0, 0.069767, 1]
    assert [row["precision"] for row in points] == [1, 1, 0.625, 0.14]
    assert "Best recall at a false positive rate of at most 10 %: fraud 0.714." in text(page)
    assert "Best precision at a recall of at least 50 %: fraud 0.625." in text(page)
    assert len(strokes(chart_of(page, "roc"))) == 2, "the curve, and random scores"
    assert len(strokes(chart_of(page, "precision-recall"))) == 1
    assert not re.search("ROC and precision-recall curves need", text(page))


def test_labels_have_scores_and_a_curve_each(tmp_path: Path) -> None:
    curves = [{**BEST["by_threshold"][0], "class": number} for number in range(3)]
    counts = {"by_label": [[4, 0, 2], [1, 0, 2], [0, 0, 4]], "by_threshold": curves}
    page = page_of(make_ended_run(tmp_path / "run", {"test": counts}))
    figures = tables(page)
    assert "confusion-0" not in figures
    assert [(row["precision"], row["recall"], row["f1"], row["count"]) for row in figures["by-class-0"]] == [
        (0.8, 1, 0.888889, 4),
        (None, None, None, 0),
        (0.5, 0.333333, 0.4, 6),
    ]
    assert len(strokes(chart_of(page, "roc"))) == 3 + 1
    assert {row["curve"] for row in figures["thresholds"]} == {"0", "1", "2"}


def test_many_runs_have_no_confusion_matrices(tmp_path: Path) -> None:
    page = page_of(*(make_ended_run(tmp_path / f"run{number}", {"val": BEST}) for number in range(5)))
    assert "Predictions of the best epoch: only for up to 4 runs" in text(page)
    page = page_of(*(tmp_path / f"run{number}" for number in range(2)))
    assert {row["curve"] for row in tables(page)["thresholds"]} == {"run0", "run1"}


def test_several_runs_have_one_curve_each(tmp_path: Path) -> None:
    """Runs of earlier versions lack the curve of all classes together, and have those of each class."""
    curves = [{**BEST["by_threshold"][0], "class": number} for number in (0, 1, "all")]
    labels = {"by_label": [[4, 0], [1, 0], [0, 0]]}
    new, old = (
        make_ended_run(tmp_path / name, {"val": labels | {"by_threshold": curves[:count]}})
        for name, count in (("new", 3), ("old", 2))
    )
    assert {row["curve"] for row in tables(page_of(new, old))["thresholds"]} == {"new", "old, 0", "old, 1"}
    assert {row["curve"] for row in tables(page_of(new))["thresholds"]} == {"0", "1", "all classes together"}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Write the runs of a sweep over two learning rates and two seeds, and a fifth run."""
    for number, (lr, seed) in enumerate([(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]):
        make_run(tmp_path / "sweep" / f"lr={lr},seed={seed}", scale=2 - number / 4, lr=lr, seed=seed)
    make_run(tmp_path / "sweep" / "lr=0.3,seed=0", lr=0.3, epochs=5, scale=0.5)
    return tmp_path / "sweep"


def test_seeds_are_shown_as_mean_and_band(sweep: Path) -> None:
    page = page_of(sweep)
    rows = {(row["run"], row["epoch"]): row for row in tables(page)["epochs"]}
    assert {run for run, _ in rows} == {"lr=0.1", "lr=0.2", "lr=0.3,seed=0"}
    for epoch in (1, 2, 3):
        losses = [2 / epoch, 1.75 / epoch]
        row = rows["lr=0.1", epoch]
        assert row["loss"] == statistics.fmean(losses)
        assert row["loss_low"] == pytest.approx(statistics.fmean(losses) - statistics.stdev(losses))
        assert row["loss_high"] == pytest.approx(statistics.fmean(losses) + statistics.stdev(losses))
    assert rows["lr=0.3,seed=0", 5]["loss_low"] is None
    assert rows["lr=0.3,seed=0", 5]["best"]
    svg = chart_of(page, "loss")
    assert svg.count('aria-roledescription="area mark"') == 2
    assert len(strokes(svg)) == 3
    assert "band of one standard deviation" in text(page)


def test_a_sweep_shows_the_best_setting_and_the_influence_of_options(sweep: Path) -> None:
    visible = text(page_of(sweep))
    settings = visible[visible.index("Settings by val accuracy") :]
    assert "The best run is lr=0.3,seed=0 (0.9500)" in settings
    ranks = [settings.index(name) for name in ("lr=0.3,seed=0 1 ", "lr=0.2 2 ", "lr=0.1 2 ")]
    assert ranks == sorted(ranks), "the best first"
    assert "lr 0.1 2 0.6875 +- 0.0295 0.7083" in settings
    assert "4 other runs" not in visible
    assert "1 other runs" in visible


def test_lower_scores_can_be_better(sweep: Path) -> None:
    for metrics in sweep.glob("*/metrics.jsonl"):
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        for line in lines:
            if "val_accuracy" in line:
                line["val_mae"] = 1 - line.pop("val_accuracy")
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    visible = text(page_of(sweep))
    assert "The best run is lr=0.3,seed=0 (0.0500)" in visible


def test_runs_of_other_names_are_grouped_by_their_configuration(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, seed=number) for number, name in enumerate(["a", "b", "c"])]
    assert {row["run"] for row in tables(page_of(*folders))["epochs"]} == {"a and 2 other seeds"}


def test_figures_are_written_without_a_browser(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "figures"
    command = ["report", str(folder), str(make_run(tmp_path / 'a "b", c')), "--figures", str(out)]
    assert main(command) == 0
    page = page_of(folder, tmp_path / 'a "b", c')
    names = [str(attributes["id"]).removeprefix("figure-") for attributes in Elements(page).of("figure")]
    assert f"{len(names)} figures in {out}" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {f"{name}{form}" for name in names for form in EXPORTED}
    for name in names:
        svg = ElementTree.parse(out / f"{name}.svg").getroot()
        assert svg.get("width") == "640"
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with (out / "score-0.csv").open() as file:
        scores = list(csv.DictReader(file))
    shown = [{name: str(row[name]) for name in scores[0]} for row in tables(page)["scores-0"]]
    assert scores == shown
    assert scores[0].keys() == {"run", "split", "epoch", "value", "best"}
    assert main(command) == 2
    assert "exists already: choose another --figures, or add --overwrite" in capsys.readouterr().err
    monkeypatch.setattr(write, "png", lambda _: b"drawn again")  # drawing takes a second
    assert main([*command, "--overwrite"]) == 0
    assert (out / "loss.png").read_bytes() == b"drawn again"


def test_figures_are_valid_vega_lite(folder: Path, tmp_path: Path) -> None:
    """Reports are written without this check, which takes as long as everything else."""
    few = make_ended_run(tmp_path / "few", {"val": BEST, "test": BEST}, class_names=["fine", "fraud"])
    by_label = {"by_label": [[4, 0, 2], [1, 0, 2], [0, 0, 4]]}
    pages = (page_of(folder), page_of(few), page_of(make_ended_run(tmp_path / "labels", {"test": by_label}), few))
    specs = [script for page in pages for name, script in Elements(page).scripts.items() if name.startswith("figure-")]
    assert len(specs) > 30
    for spec in specs:
        altair.Chart.from_dict(json.loads(spec))


def test_every_figure_has_buttons_that_save_it(folder: Path) -> None:
    page = Elements(page_of(folder))
    saved = {attributes["id"] for attributes in page.of("button") if "data-save" in attributes}
    assert saved == {
        f"{attributes['id']}{form.replace('.', '-')}" for attributes in page.of("figure") for form in EXPORTED
    }


def test_runs_of_equal_names_are_distinguished_by_paths(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / parent / "run") for parent in ("a", "b")]
    assert {row["run"] for row in tables(page_of(*folders))["epochs"]} == {str(folder) for folder in folders}
    with pytest.raises(InputError, match="is named twice"):
        read_runs([folders[0], folders[0] / ".." / "run"])


def test_names_are_escaped(tmp_path: Path) -> None:
    evil = make_run(tmp_path / EVIL, graph="</script><script>alert(2)</script>", model="gcn")
    recorder = Recorder(evil / "metrics.jsonl")
    recorder.write("epoch", epoch=3, loss=1.0, seconds=1.0, **{"val_</script><b>": 0.5})
    recorder.write("rank", **rank_line(3, 0) | {"bytes_sent": {"</script><i>": 7}})
    recorder.close()
    plain = make_run(tmp_path / "plain")
    page, usual = Elements(page_of(evil, plain)), Elements(page_of(plain))
    assert {name for name, _ in page.elements} == {name for name, _ in usual.elements}
    assert not [attrs for _, attrs in page.elements if any(name.startswith("on") for name in attrs)]
    assert EVIL in {row["run"] for row in tables(page_of(evil, plain))["epochs"]}
    assert "<img" not in page_of(evil, plain)


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "a\u202e\x1b[1m", graph="b\u202e\x1b"))
    assert {row["run"] for row in tables(page)["epochs"]} == {r"a\u202e\x1b[1m"}
    assert r"b\u202e\x1b" in page
    assert "\u202e" not in page
    assert "\x1b" not in page


def test_a_page_makes_no_requests(folder: Path) -> None:
    page = Elements(page_of(folder))
    assert not [
        attributes for _, attributes in page.elements if attributes.keys() & {"src", "srcset", "data", "action"}
    ]
    assert all(str(attributes["href"]).startswith("#") for attributes in page.of("a"))
    assert any("default-src 'none'" in str(attributes.get("content")) for attributes in page.of("meta"))


def test_every_figure_has_a_description_and_a_table(folder: Path) -> None:
    page = Elements(page_of(folder))
    ids = {attributes.get("id") for _, attributes in page.elements}
    figures = page.of("figure")
    assert len(figures) >= 10
    for attributes in figures:
        assert {attributes["aria-labelledby"], f"{attributes['id']}-table"} <= ids
        assert json.loads(page.scripts[str(attributes["id"])])["description"]
    levels = [int(name[1]) for name, _ in page.elements if name in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(second <= first + 1 for first, second in pairwise(levels))
    assert {"header", "nav", "main", "footer"} <= {name for name, _ in page.elements}
    # Ids are unique.
    assert len(ids - {None}) == sum("id" in attributes for _, attributes in page.elements)


def test_missing_sections_are_listed(tmp_path: Path) -> None:
    visible = text(page_of(make_run(tmp_path / "run", ranks=1)))
    left_out = visible[visible.rindex("Not shown") :]
    for title in ("Timelines of the ranks", "Load balance over the ranks", "Partition"):
        assert f"{title}:" in left_out
    assert "Loss and scores:" not in left_out
    assert "the strategy records no estimate" in visible


@pytest.mark.parametrize(
    ("begun", "message"), [(False, "interrupted: 0 of 3 epochs"), (True, "running: 0 of 3 epochs")]
)
def test_a_run_without_epochs(begun: bool, message: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", epochs=3, ended=False)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    if begun:
        (folder / "lock").touch()
    page = page_of(folder)
    assert message in text(page)
    assert not tables(page).keys() & {"epochs", "ranks", "memory", "balance"}
    assert "Loss and scores: no epoch is recorded yet" in text(page)


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ended=False)
    recorder = Recorder(folder / "metrics.jsonl")
    recorder.write("event", event="stopped", epoch=2, signal=15)
    recorder.close()
    assert "stopped after 3 epochs" in text(page_of(folder))
    assert "val accuracy, newest" in text(page_of(folder))


def test_a_truncated_record_is_ignored(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ended=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epoch": 3, "lo')
    assert len(tables(page_of(folder))["epochs"]) == 3


def test_nan_and_infinity_are_gaps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ended=False)
    recorder = Recorder(folder / "metrics.jsonl")
    recorder.write("epoch", epoch=3, loss=float("nan"), seconds=1.0, val_accuracy=float("inf"))
    recorder.close()
    figures = tables(page_of(folder))
    assert [row["loss"] for row in figures["epochs"]][2:] == [1 / 3, None]
    assert figures["scores-0"][-1]["value"] is None


def test_a_resumed_run_shows_the_ranks_of_its_last_start(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ranks=2, ended=False)
    recorder = Recorder(folder / "metrics.jsonl")
    begun: dict[str, Any] = {"epoch": 3, "config": {}, "graph": {}, "num_parameters": 20, "ranks": 1}
    recorder.write("config", **begun, placement=[{}])
    recorder.write("epoch", epoch=3, loss=0.1, seconds=1.0)
    recorder.write("rank", **rank_line(3, 0))
    recorder.close()
    figures = tables(page_of(folder))
    assert [row["epoch"] for row in figures["epochs"]] == [1, 2, 3, 4]
    assert [(row["label"], row["epoch"]) for row in figures["ranks"]] == [("rank 0", 4)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "line 2 is damaged"),
        ('{"kind": "epoch", "epoch": 1, "loss": 1.0}', "line 2 is damaged (a line of kind epoch has no 'seconds')"),
        ('{"kind": "epoch", "epoch": 1, "loss": "low", "seconds": 1}', "has 'loss' low, of the wrong type"),
        (
            json.dumps({"kind": "rank", **rank_line(0, 0), "bytes_sent": {"halo": "many"}}),
            "the records do not have the format",
        ),
        (json.dumps({"kind": "rank", **rank_line(0, 0), "stages": 3}), "the records do not have the format"),
    ],
)
def test_a_damaged_record_is_an_error_of_one_line(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = make_run(tmp_path / "run"), tmp_path / "report.html"
    metrics = folder / "metrics.jsonl"
    first, *rest = metrics.read_text().splitlines()
    metrics.write_text("\n".join([first, line, *rest]) + "\n")
    assert main(["report", str(folder), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_errors_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, taken = str(make_run(tmp_path / "run")), tmp_path / "taken.html"
    taken.write_text("mine")
    (tmp_path / "damaged" / "run").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged" / "run" / "config.toml").write_text("graph = ")
    for arguments, message in {
        (run,): "--out",
        (run, "--out", str(taken)): "--overwrite",
        (run, "--out", str(tmp_path / "page.pdf")): ".html",
        (run, "--out", str(tmp_path / "none" / "page.html")): "No such file or directory",
        (run, "--out", str(taken), "--serve"): "not allowed with",
        (run, "--figures", str(taken)): "--figures",
        (run, "--out", str(taken), "--port", "80"): "--port has no effect without --serve",
        (run, "--serve", "--overwrite"): "--overwrite has no effect with --serve",
        (run, "--serve", "--port", "65536"): "--port 65536",
        (str(tmp_path / "empty"), "--serve"): "contains no run",
        (str(tmp_path / "damaged"), "--serve"): "config.toml: cannot be read",
        (str(tmp_path / "damaged" / "run"), "--out", str(taken), "--overwrite"): "config.toml: cannot be read",
    }.items():
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert taken.read_text() == "mine"
    assert main(["report", run, "--out", str(taken), "--overwrite"]) == 0
    assert taken.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("missing", ["altair", "vl_convert"])
def test_a_missing_package_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()  # Use Vega.
    page_module.vega.cache_clear()
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["report", str(make_run(tmp_path / "run")), "--out", str(tmp_path / "page.html")]) == 2
    assert f"needs {missing}: pip install 'weft[report]'" in capsys.readouterr().err


def test_pytorch_is_not_imported(tmp_path: Path) -> None:
    code = "import sys; from weft.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [
        sys.executable,
        "-c",
        code,
        "report",
        str(make_run(tmp_path / "run")),
        "--out",
        str(tmp_path / "one.html"),
    ]
    assert subprocess.run(command, check=False).returncode == 0
    assert (tmp_path / "one.html").exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    """Start a server that follows a run which is not finished."""
    with ReportServer([make_run(tmp_path / "run", ended=False)], 0) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def get(server: ReportServer, path: str = "", **headers: str) -> tuple[int, str, str]:
    """Request a page; return status code, ETag and text."""
    request = urllib.request.Request(
        server.url + path, headers={name.replace("_", "-"): headers[name] for name in headers}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers["ETag"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", error.read().decode()


def test_a_served_report_follows_its_run(server: ReportServer) -> None:
    assert server.server_address[0] == HOST == "127.0.0.1"
    code, state, page = get(server)
    assert (code, len(tables(page)["epochs"])) == (200, 3)
    assert Elements(page).of("body") == [{"data-follow": state}]
    assert get(server, If_None_Match=state)[0] == 304
    metrics = server.folders[0] / "metrics.jsonl"
    recorder = Recorder(metrics)
    recorder.write("epoch", epoch=3, loss=0.1, lr=0.01, seconds=1.0)
    recorder.close()
    code, grown, page = get(server, If_None_Match=state)
    assert (code, tables(page)["epochs"][-1]["loss"]) == (200, 0.1)
    with metrics.open("a") as file:
        file.write('{"kind": "rank", "ep')
    code, torn, page = get(server)
    assert (code, len(tables(page)["epochs"])) == (200, 4)
    assert len({state, grown, torn}) == 3
    with metrics.open("a") as file:
        file.write('\n{"kind": "epoch"}\n')
    code, _, page = get(server)
    assert code == 500
    assert "is damaged" in page


def test_a_served_report_is_only_for_this_machine(server: ReportServer) -> None:
    assert get(server, Host="evil.example")[0] == 403
    assert get(server, Host=f"localhost:{server.server_port}")[0] == 200
    assert get(server, "metrics.jsonl")[0] == 404
    with pytest.raises(InputError, match=f"--port {server.server_port}: Address already in use"):
        ReportServer(server.folders, server.server_port)


def test_a_served_report_needs_the_token_of_its_address(server: ReportServer) -> None:
    assert len(server.path.strip("/")) == 43, "256 bits in Base64"
    with ReportServer(server.folders, 0) as other:
        assert other.path != server.path
    origin = server.url.removesuffix(server.path)
    for path in ("/", server.path[:-1], server.path.swapcase(), "/%C3%BC"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(origin + path)


def test_headers_of_a_served_report(server: ReportServer) -> None:
    """Other sites must not show the page in a frame, browsers not guess its type, links not pass on its address."""
    with urllib.request.urlopen(server.url) as answer:
        headers = answer.headers
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_browsers_leave_out_port_80(server: ReportServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get(server, Host=HOST)[0] == 403
    monkeypatch.setattr(serve, "HTTP_PORT", server.server_port)
    assert [get(server, Host=name)[0] for name in (HOST, "localhost", "evil.example")] == [200, 200, 403]


def test_clients_that_disconnect_cause_no_traceback(server: ReportServer, capfd: pytest.CaptureFixture[str]) -> None:
    request = f"GET {server.path} HTTP/1.1\r\nHost: {HOST}:{server.server_port}\r\n\r\n".encode()
    handled: list[Any] = []
    server.handle_error = lambda *arguments: handled.append(ReportServer.handle_error(server, *arguments))  # type: ignore[method-assign]
    deadline = time.monotonic() + 30
    while not handled and time.monotonic() < deadline:
        with socket.create_connection((HOST, server.server_port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset when closed
            client.sendall(request)
        time.sleep(0.05)
    assert handled
    assert capfd.readouterr().err == ""


def test_idle_connections_end(server: ReportServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve.MAX_SECONDS == 60
    monkeypatch.setattr(serve, "MAX_SECONDS", 0.1)
    with (
        socket.create_connection((HOST, server.server_port)) as silent,
        socket.create_connection((HOST, server.server_port)) as slow,
    ):
        slow.sendall(b"GET / HT")
        for client in (silent, slow):
            client.settimeout(20)
            assert client.recv(1) == b""


def test_an_unexpected_error_of_the_server_is_one_line(
    server: ReportServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "state", lambda: 1 // 0)
    with pytest.raises(OSError, match="closed connection"):
        get(server)
    assert capfd.readouterr().err.startswith("weft: error: unexpected error (ZeroDivisionError")


def test_serving_prints_the_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft", "report", str(make_run(tmp_path / "run")), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("report at http://127.0.0.1:")
        with urllib.request.urlopen(first.split()[2]) as answer:
            assert len(tables(answer.read().decode())["epochs"]) == 3
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0


@pytest.mark.timeout(30)
@pytest.mark.parametrize("rank", [10**9, 10**30])
def test_a_rank_of_any_number_ends(rank: int, tmp_path: Path) -> None:
    """A report has a part for each rank with records, not for each number below the largest."""
    folder = make_run(tmp_path / "run", ended=False)
    recorder = Recorder(folder / "metrics.jsonl")
    recorder.write("rank", **rank_line(2, rank))
    recorder.close()
    runs = read_runs([folder])
    assert runs[0].ranks == sorted([0, 1, rank])
    page = report_page(runs)
    assert {row["label"] for row in tables(page)["ranks"]} == {"rank 0", "rank 1", f"rank {rank}"}
