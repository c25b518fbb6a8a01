"""`--config` and `weft config`: a file sets the same options as flags, flags override it, and it repeats a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.running import losses
from weft.cli.main import main
from weft.config.config import Config

SMALL = "sbm:vertices=60,degree=4,classes=3,features=5"
FLAGS = ["--hidden", "7", "--lr", "0.02", "--epochs", "3", "--dtype", "float64", "--model", "gat", "--heads", "1"]


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run a command and return what it prints."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_a_file_gives_the_run_of_its_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run, again = tmp_path / "run.toml", tmp_path / "again.toml"
    run.write_text(output_of(capsys, "config", SMALL, *FLAGS))
    again.write_text(output_of(capsys, "config", "--config", run))
    assert again.read_text() == run.read_text()
    by_flags, by_file, by_run = (tmp_path / name for name in ("flags", "file", "run"))
    output_of(capsys, "train", SMALL, *FLAGS, "--out", by_flags)
    output_of(capsys, "train", "--config", run, "--out", by_file)
    output_of(capsys, "train", "--config", by_flags / "config.toml", "--out", by_run)
    assert losses(by_flags) == losses(by_file) == losses(by_run)
    assert (by_flags / "config.toml").read_text().replace("flags", "run") == (by_run / "config.toml").read_text()
    output_of(capsys, "train", "--resume", "--epochs", "4", "--out", by_run)
    assert Config.read(by_run / "config.toml").hidden == 7
    assert len(losses(by_run)) == 4


def test_flags_go_before_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run, out = tmp_path / "run.toml", tmp_path / "out"
    run.write_text(output_of(capsys, "config", SMALL, *FLAGS))
    output_of(capsys, "train", "--config", run, "--epochs", "1", "--heads", "7", "--out", out)
    assert Config.read(out / "config.toml") == Config(
        graph=SMALL, hidden=7, lr=0.02, epochs=1, dtype="float64", model="gat", heads=7
    )


def test_compare_takes_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run, out = tmp_path / "run.toml", tmp_path / "out"
    run.write_text(output_of(capsys, "config", SMALL, "--epochs", "1", "--strategy", "split", "--fanout", "3"))
    output_of(capsys, "compare", "--config", run, "--strategies", "single,split", "--out", out)
    assert Config.read(out / "split" / "config.toml").fanout == "3"
    assert Config.read(out / "single" / "config.toml").epochs == 1


@pytest.mark.parametrize(
    ("text", "flags", "line"),
    [
        ("[strategy]\nchunks = 3", [], "FILE: [strategy] chunks has no effect under strategy single: leave it out"),
        ("[strategy]\nchunks = 3", ["--chunks", "2"], "--chunks has no effect under strategy single: leave it out"),
        ("[model]\nheads = 3", [], "FILE: [model] heads has no effect under model gcn: leave it out, or give --model"),
        ('[model]\nmodel = "gcnn"', [], "FILE: unknown [model] model 'gcnn': did you mean 'gcn'?"),
        ('strategy = "tnsor"', [], "FILE: unknown [strategy] strategy 'tnsor': did you mean 'tensor'?"),
        ('[task]\nmetrics = "accuracyy"', [], "FILE: unknown [task] metrics 'accuracyy': did you mean 'accuracy'?"),
        ("[strategy]\nworkers = 2", [], "strategy single runs on one rank: give [strategy] workers 1"),
    ],
)
def test_a_mistake_names_its_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, flags: list[str], line: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    commands = [["train", "--out", str(tmp_path / "out")], ["config"]]
    for command in commands if "no effect" in line else commands[:1]:  # other mistakes are found when a run starts
        assert main([*command, SMALL, "--config", str(file), *flags]) == 2
        errors = capsys.readouterr().err
        assert line.replace("FILE", str(file)) in errors
        assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()
