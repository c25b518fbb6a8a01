"""Sweeps: each combination, or each one drawn, runs once; stopped runs resume, and failures are reported."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.lib.running import losses
from weft.cli.main import main
from weft.config.config import Config
from weft.config.value_range import as_range
from weft.experiments import sweep
from weft.training.run import Run, run

FILE = """
[data]
graph = "sbm:vertices=60,degree=4,classes=3,features=5"
[model]
hidden = [4, 8]
[training]
epochs = 3
seed = [0, 1]
dtype = "float64"
[run]
checkpoint_every = 1
"""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folder names of the runs that a sweep starts or resumes, each in this process."""
    names: list[str] = []

    def run_in_process(config: Config, *objects: Any, in_subprocess: bool, out: Path, **options: Any) -> Run:
        assert in_subprocess
        names.append(out.name)
        return run(config, *objects, out=out, **options)

    monkeypatch.setattr(sweep, "run", run_in_process)
    return names


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.toml"
    path.write_text(FILE)
    return path


def test_runs_once_and_resumes(file: Path, ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["sweep", str(file), "--out", str(out), "--json", "--quiet"]
    assert main(command) == 0
    assert ran == [f"hidden={hidden},seed={seed}" for hidden in (4, 8) for seed in (0, 1)]
    first = json.loads(capsys.readouterr().out)
    single = run(Config.read(out / ran[1] / "config.toml"), None, None, out=tmp_path / "alone")
    assert losses(single.folder) == losses(out / ran[1])
    assert first["points"][0]["runs"][1]["summary"]["loss"] == single.summary["loss"]

    stopped, deleted = out / ran[2], out / ran[3]
    shutil.rmtree(deleted)
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:-1]))  # as if killed before its last record
    shutil.rmtree(stopped / "checkpoints" / "epoch-00000003")
    ran.clear()
    assert main(command) == 0
    assert ran == [stopped.name, deleted.name]
    again = json.loads(capsys.readouterr().out)
    for before, after in zip(first["points"], again["points"], strict=True):
        assert before["options"] == after["options"]
        for name in ("loss", "test_accuracy", "val_accuracy"):
            assert before["numbers"][name] == after["numbers"][name]
    ran.clear()
    assert main(command) == 0
    assert ran == []
    capsys.readouterr()
    assert main(["sweep", str(file), "--out", str(out), "--lr", "0.5"]) == 2
    assert "--lr differs from the run in" in capsys.readouterr().err
    assert main(["sweep", str(file), "--out", str(out), "--hidden", "4"]) == 2
    assert f"--out {out} contains the run hidden=4,seed=0, which is not part of this sweep" in capsys.readouterr().err
    assert main(["sweep", str(file), "--out", str(tmp_path / "other"), "--hidden", "4"]) == 0
    assert ran == ["seed=0", "seed=1"]


def test_means_and_standard_deviations(
    file: Path, ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(file), "--out", str(tmp_path / "out"), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["options"] for point in points] == [{"hidden": 4}, {"hidden": 8}]
    for point in points:
        first, second = (record["summary"]["loss"] for record in point["runs"])
        assert point["numbers"]["loss"]["mean"] == pytest.approx((first + second) / 2, rel=1e-12)
        assert point["numbers"]["loss"]["std"] == pytest.approx(abs(first - second) / 2**0.5, rel=1e-12)
    assert main(["sweep", str(file), "--out", str(tmp_path / "out")]) == 0
    table = capsys.readouterr().out
    assert "hidden=4" in table
    assert f"{points[0]['numbers']['loss']['mean']:.4f} +- {points[0]['numbers']['loss']['std']:.4f}" in table
    assert len(ran) == 4


def test_a_run_that_fails_is_reported_and_tried_again(
    file: Path, ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(FILE.replace("hidden = [4, 8]", "hidden = 4").replace("epochs", "lr = [0.01, 1e300]\nepochs"))
    file.write_text(file.read_text().replace("1e300", "1e30").replace("float64", "float32"))
    command = ["sweep", str(file), "--out", str(tmp_path / "out")]
    assert main(command) == 1
    output = capsys.readouterr()
    assert "weft: lr=1e+30,seed=0: --lr 1e+30: the loss became" in output.err
    assert "0 of 2" in output.out
    ran.clear()
    assert main(command) == 1
    assert ran == ["lr=1e+30,seed=0", "lr=1e+30,seed=1"]


def test_random_search(file: Path, ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A larger number adds runs, and repeats none. Each combination has all seeds. Other draws are refused."""
    file.write_text(FILE.replace("epochs = 3", 'epochs = 1\nlr = "1e-4..1e-1"'))
    command = ["sweep", str(file), "--out", str(tmp_path / "out"), "--quiet", "--random"]
    assert main([*command, "2"]) == 0
    assert [name.rpartition(",")[2] for name in ran] == ["seed=0", "seed=1"] * 2
    few, ran[:] = [*ran], []
    assert main([*command, "3"]) == 0
    assert (len(ran), set(ran) & set(few)) == (2, set())
    assert main([*command, "2"]) == 2
    assert "which is not part of this sweep: choose another folder" in capsys.readouterr().err
    for name in (*few, *ran):
        config = Config.read(tmp_path / "out" / name / "config.toml")
        assert 1e-4 <= config.lr <= 1e-1
        assert config.hidden in (4, 8)
        assert name == f"hidden={config.hidden},lr={config.lr},seed={config.seed}"


def test_draws_fill_their_ranges() -> None:
    """Values are uniform, or log-uniform in a range from 1 to 10 or more; drawn anew with another seed."""
    values: dict[str, Any] = {"graph": "digits", "dropout": "0..0.5", "lr": "1e-4..1", "layers": "1..4"}
    specs = {spec.name: spec for spec in fields(Config)}
    values = {name: as_range(specs[name], value) for name, value in values.items()}
    points = [varied for _, varied in sweep.combinations(values, 400).values()]
    assert len(points) == 400
    for name, median in (("dropout", 0.25), ("lr", 0.01), ("layers", 2.5)):
        assert 0.4 < sum(point[name] < median for point in points) / len(points) < 0.6
    assert {point["layers"] for point in points} == {1, 2, 3, 4}
    assert sweep.combinations(values, 3).items() <= sweep.combinations(values, 400).items()
    assert not sweep.combinations(values, 3).keys() & sweep.combinations({**values, "seed": 1}, 3).keys()
    assert len(sweep.combinations({"graph": "digits", "heads": [2, 4], "model": "gat"}, 50)) == 2


@pytest.mark.parametrize(
    ("added", "flags", "line"),
    [
        (
            "[strategy]\nchunks = [1, 2]",
            [],
            "FILE: [strategy] chunks has no effect under strategy single: leave",
        ),
        ("[strategy]\nworkers = [1, 0]", [], "FILE: [strategy] workers 0: give at least 1"),
        ("", ["--heads", "2"], "--heads has no effect under model gcn: leave it out, or give --model gat or gatv2"),
        ('[task]\nmetrics = ["a/b", "a:b"]', [], "two runs would have the folder hidden=4,seed=0,metrics=a-b"),
        ('timeout = "9..99"', [], "FILE: [run] timeout 9.0..99.0: a range needs --random, the number of runs to draw"),
        ('timeout = "99..9"', [], "FILE: [run] timeout 99..9: give the smaller number first"),
        ('timeout = "9..x"', [], "FILE: [run] timeout 9..x: give a range of type float, such as 1..8"),
        ('[strategy]\nworkers = "0..4"', [], "FILE: [strategy] workers 0: give at least 1"),
        ("", ["--random", "0"], "--random 0: give at least 1"),
        ("", ["--random", "3", "--hidden", "4"], "--random 3 has no effect without a list or a range of values"),
    ],
)
def test_errors_before_the_first_run(
    file: Path,
    ran: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    added: str,
    flags: list[str],
    line: str,
) -> None:
    file.write_text(FILE + added)
    assert main(["sweep", str(file), "--out", str(tmp_path / "out"), *flags]) == 2
    assert line.replace("FILE", str(file)) in capsys.readouterr().err
    assert not ran
    assert not (tmp_path / "out").exists()


def test_a_sweep_overrides_its_base_config(file: Path, ran: list[str], tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text('[model]\nmodel = "sage"\nhidden = 32\n[training]\nepochs = 99')
    assert main(["sweep", str(file), "--config", str(base), "--out", str(tmp_path / "out")]) == 0
    config = Config.read(tmp_path / "out" / ran[0] / "config.toml")
    assert (config.model, config.hidden, config.epochs) == ("sage", 4, 3)
