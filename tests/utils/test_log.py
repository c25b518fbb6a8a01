"""Messages go through Python's logger `weft`: printed unless the program configures logging, and into --log-file."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.lib.running import finish, start
from weft.cli.main import main
from weft.training import progress
from weft.training.progress import ProgressShow
from weft.utils.log import LOGGER

GRAPH = "sbm:vertices=60,degree=4,classes=3,features=5"
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) rank (\d): (.*)")
WARNER = """
import warnings

import torch
import weft


@weft.register("loss")
def warned(logits, labels):
    warnings.warn("look out")
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")
"""


class Listed(logging.Handler):
    """Handler that collects the messages of a program that has configured logging."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


@pytest.fixture
def listed() -> Iterator[Listed]:
    handler = Listed()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def say_something() -> None:
    LOGGER.info("100 % of \x1b[31m")
    LOGGER.warning("odd")
    LOGGER.error("wrong")
    with ProgressShow(0, 1, quiet=False) as show:
        show.epoch(0, 0.5, {}, 10)


def test_messages_are_printed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    say_something()
    *lines, epoch = capsys.readouterr().err.splitlines()
    assert lines == [r"weft: 100 % of \x1b[31m", "weft: warning: odd", "weft: error: wrong"]
    assert epoch.startswith("epoch 1/1  loss 0.5000")


def test_handlers_of_the_program_get_them_instead(listed: Listed, capsys: pytest.CaptureFixture[str]) -> None:
    say_something()
    *lines, (level, epoch) = listed.lines
    assert lines == [("INFO", r"100 % of \x1b[31m"), ("WARNING", "odd"), ("ERROR", "wrong")]
    assert (level, epoch[:23]) == ("INFO", "epoch 1/1  loss 0.5000 ")
    assert capsys.readouterr().err == ""


def test_the_command_logs_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has the lines of standard error, also those of a mistake; a second command appends to it."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    path, out = tmp_path / "log.txt", tmp_path / "run"
    command = ["train", GRAPH, "--epochs", "2", "--out", str(out), "--log-file", str(path)]
    assert main(command) == 0
    assert main(command) == 2
    printed = [re.sub(r"^weft: (error: )?", "", line) for line in capsys.readouterr().err.splitlines()]
    logged = [match.groups() for match in map(LINE.fullmatch, path.read_text().splitlines()) if match]
    assert [text for _, _, text in logged] == printed
    assert {rank for _, rank, _ in logged} == {"0"}
    assert [level for level, _, _ in logged] == ["INFO"] * (len(logged) - 1) + ["ERROR"]
    assert main(["train", GRAPH, "--out", str(out)]) == 2
    assert len(path.read_text().splitlines()) == len(logged)


def test_local_ranks_log_to_it(tmp_path: Path) -> None:
    """The file has the lines of standard error, also Python's warnings in ranks."""
    path = tmp_path / "log.txt"
    (tmp_path / "warner.py").write_text(WARNER)
    options = ["--strategy", "tensor", "--workers", "2", "--epochs", "1", "--import", "warner", "--loss", "warned"]
    command = ["train", GRAPH, *options, "--out", tmp_path / "run", "--log-file", path]
    code, errors = finish(start(*command, prepare=partial(os.chdir, tmp_path)))
    logged = [match.groups() for match in map(LINE.fullmatch, path.read_text().splitlines()) if match]
    assert (code, len(logged)) == (0, len(errors.splitlines()))
    assert any(text.startswith("epoch 1/1 ") for _, _, text in logged)
    assert ("WARNING", "1", "look out") in logged


@pytest.mark.parametrize(
    ("name", "reason"),
    [("", "it is not a regular file|Is a directory"), ("none/log", "No such file"), ("link", "symbolic link")],
)
def test_a_file_that_cannot_be_written(
    name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert main(["train", GRAPH, "--log-file", str(tmp_path / name)]) == 2
    assert re.fullmatch(
        rf"weft: error: --log-file {tmp_path}\S*: .*({reason}).*: give a file that can be written\n",
        capsys.readouterr().err,
    )
    assert not (tmp_path / "target").exists()
