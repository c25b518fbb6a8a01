"""Commands do their work also if standard output or standard error cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.lib.broken_streams import FULL, close, end_reader, fill
from tests.lib.running import finish, losses, start
from weft.cli.main import main

GRAPH = "sbm:vertices=60,degree=4,classes=3,features=5"
NO_SPACE = "weft: warning: standard output could not be written (No space left on device), and is incomplete\n"

pytestmark = pytest.mark.skipif(not os.path.exists(FULL), reason="there is no /dev/full")


@pytest.mark.parametrize(
    ("workers", "prepare"),
    [
        (1, partial(close, 2)),
        (1, partial(close, 1)),
        (1, partial(fill, 2)),
        (1, partial(end_reader, 1, 2)),
        (2, partial(close, 0, 1, 2)),
        (2, partial(fill, 1, 2)),
    ],
)
def test_training_does_not_depend_on_its_output(workers: int, prepare: Callable[[], None], tmp_path: Path) -> None:
    options = ["--epochs", "3", "--eval-every", "1", "--workers", workers]
    if workers > 1:
        options += ["--strategy", "tensor"]
    code, _ = finish(start("train", GRAPH, *map(str, options), "--out", tmp_path / "run", prepare=prepare))
    assert code == 0
    assert len(losses(tmp_path / "run")) == 3


def test_a_warning_tells_that_output_is_incomplete(tmp_path: Path) -> None:
    run = start("train", GRAPH, "--epochs", "1", "--json", "--out", tmp_path / "run", prepare=partial(fill, 1))
    code, errors = finish(run)
    assert (code, errors.endswith(NO_SPACE)) == (0, True)


@pytest.mark.parametrize(
    ("prepare", "code", "error"),
    [
        (partial(close, 1), 0, ""),
        (partial(close, 2), 0, ""),
        (partial(fill, 1), 1, NO_SPACE),
        (partial(end_reader, 1), 1, ""),
    ],
)
def test_commands_that_only_print(prepare: Callable[[], None], code: int, error: str) -> None:
    """A full disk is an error of these, since the output is all that they make. Without a reader they end silently."""
    assert finish(start("config", GRAPH, prepare=prepare)) == (code, error)


def test_names_that_the_locale_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With LC_ALL=C and PYTHONUTF8=0, names of files are ASCII, and other names cannot be opened or recorded."""
    options = tmp_path / "run.toml"
    options.write_text('[data]\ngraph = "gr\u00fcn"\n', encoding="utf-8")
    arguments = [["data", "info", os.fsencode("gr\u00fcn").decode("ascii", "surrogateescape")]]
    arguments += [["train", "--config", str(options)]]
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    for command in arguments:
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "set LC_ALL=C.UTF-8, or PYTHONUTF8=1" in error
        assert error.count("\n") == 1


@pytest.mark.slow
def test_a_new_process_ends_without_an_error_of_its_own() -> None:
    """Python flushes standard output as it ends, and would fail with exit code 120."""
    shell = f"'{sys.executable}' -m weft config {GRAPH} >{FULL}"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, NO_SPACE)


def test_files_do_not_get_the_numbers_of_closed_streams(tmp_path: Path) -> None:
    """C++ code writes its messages to file descriptor 2, whatever it is."""
    opened = "import os; from weft.utils.standard_streams import guard_standard_streams as guard; guard(); "
    shell = (
        f"'{sys.executable}' -c \"{opened}os.write(5, str(os.open('/', 0)).encode())\" 5>'{tmp_path / 'n'}' 0<&- 2>&-"
    )
    subprocess.run(["bash", "-c", shell], check=True)
    assert int((tmp_path / "n").read_text()) > 2
