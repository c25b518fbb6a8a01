"""Progress lines and tables fit the terminal's width, and contain no escape codes outside of terminals."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import sys
import time

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from weft.reporting.print_table import fitting_tables, natural_width, print_table
from weft.reporting.run_table import sweep_table
from weft.training import progress
from weft.training.progress import EpochLine, ProgressShow, fit_parts, format_seconds, waiting

SCORES = {"train_accuracy": 0.25, "val_accuracy": 0.5, "test_accuracy": None, "test_auc": 0.75}


def rendered(line: EpochLine, width: int) -> str:
    """Return a progress line as a terminal of some width prints it."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")
    console.print(line)
    assert isinstance(console.file, io.StringIO)
    (text,) = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()
    assert len(text) <= width
    return text.rstrip()


@pytest.mark.parametrize(
    ("width", "rest"),
    [
        (30, ""),
        (60, "tensor  loss 0.1250  0 s left"),
        (80, "tensor  loss 0.1250  0 s left  val accuracy 0.5000"),
        (100, "tensor  loss 0.1250  0 s left  val accuracy 0.5000  test auc 0.7500"),
        (160, "tensor  loss 0.1250  0 s left  val accuracy 0.5000  test auc 0.7500  train accuracy 0.2500  0 s/epoch"),
    ],
)
def test_parts_that_do_not_fit_are_left_out_from_the_right(
    width: int, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    line = EpochLine(0, 20, "tensor")
    before = rendered(line, width)
    line.advance(7, 0.125, SCORES, 5_000_000)
    after = rendered(line, width)
    assert before.startswith("epoch  0/20 ")
    assert after.startswith("epoch  7/20 ")
    place = len("epoch  7/20 ")
    bars = {text[place : place + progress.BAR_WIDTH] for text in (before, after)}
    assert all(re.fullmatch(r"\S+", bar) for bar in bars)
    assert after[place + progress.BAR_WIDTH :].strip() == (f"{rest}  5.0 MB" if width == 160 else rest)


def test_the_remaining_time_follows_recent_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    line = EpochLine(0, 100)
    assert line.parts() == ["0 s"]
    for epoch in range(50):
        now[0] += 30 if not epoch else 2
        line.advance(epoch + 1, 0.5, {}, 10)
    assert line.parts() == ["loss 0.5000", "1:40 left", "2 s/epoch", "10 B"]
    now[0] += 1
    assert line.parts()[1] == "1:39 left"
    line.advance(100, 0.5, {}, 10)
    assert line.parts()[1] == "2:09 in all"


def test_seconds_and_parts() -> None:
    assert [format_seconds(value) for value in (0.9, 59, 61, 3661)] == ["0 s", "59 s", "1:01", "1:01:01"]
    assert [fit_parts(["ab", "cd", "e"], width) for width in (0, 2, 5, 6, 9)] == ["", "ab", "ab", "ab  cd", "ab  cd  e"]


def test_on_a_terminal_one_line_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "SECONDS_BEFORE_WAITING", 0)
    with os.fdopen(theirs, "w", buffering=1) as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with waiting("loading cora", quiet=False):
            time.sleep(0.3)
        with ProgressShow(0, 2, quiet=False) as show:
            show.say("rank 0: all")
            for epoch in range(2):
                show.epoch(epoch, 0.5, SCORES, 10)
        text = ""
        while select.select([ours], [], [], 0)[0]:
            text += os.read(ours, 1 << 16).decode(errors="replace")
        monkeypatch.undo()
    os.close(ours)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in re.split(r"[\r\n]+", text)]
    assert "loading cora  0 s" in lines
    assert "weft: rank 0: all" in lines
    assert any(line.startswith("epoch 2/2 ") and "loss 0.5000" in line for line in lines)


@pytest.mark.parametrize("quiet", [False, True])
def test_elsewhere_plain_lines(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Output to a file has plain lines, even if the environment requests colours, as on some CI machines."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with waiting("loading cora", quiet=quiet):
        time.sleep(0.2)
    with ProgressShow(0, 2, quiet=quiet, name="tensor") as show:
        show.epoch(1, 0.5, {"val_accuracy": 0.5}, 10)
    print_table(small_table(3))
    captured = capsys.readouterr()
    assert "\x1b" not in captured.err + captured.out
    expected = (
        r"weft: loading cora\nepoch 2/2  tensor  loss 0\.5000  0 s in all  val accuracy 0\.5000  \S+ s/epoch  10 B\n"
    )
    assert re.fullmatch("" if quiet else expected, captured.err)


def test_quick_operations_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("loading cora", quiet=False):
        pass
    assert capsys.readouterr().err == ""


def small_table(columns: int) -> Table:
    table = Table(title="a title", box=box.SIMPLE_HEAD, pad_edge=False)
    for number in range(columns):
        table.add_column(f"column {number}", no_wrap=True)
    table.add_row(*(f"cell {number}" for number in range(columns)))
    table.add_section()
    table.add_row(*("x" for _ in range(columns)))
    return table


@pytest.mark.parametrize(("width", "parts"), [(200, 1), (80, 2), (40, 5), (5, 9)])
def test_a_table_is_divided_where_it_is_too_wide(width: int, parts: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    tables = fitting_tables(small_table(10), console)
    assert len(tables) == parts
    headers = [str(column.header) for table in tables for column in table.columns if column.header != "column 0"]
    assert headers == [f"column {number}" for number in range(1, 10)]
    for table in tables:
        assert table.columns[0].header == "column 0"
        assert list(table.columns[1].cells)[1] == "x"
        assert table.rows[0].end_section
        assert natural_width(table, console) <= width or len(table.columns) == 2


def test_a_table_shows_foreign_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {name: {"mean": 1.0, "std": None} for name in ("loss", "epochs", "epoch_seconds")}
    options = {"graph": "[/x] [red]:smile:", "model": "\x1b[31m\u202e\nx"}
    print_table(sweep_table([{"options": options, "numbers": numbers, "ended": 1, "runs": [None]}]))
    assert r"graph=[/x] [red]:smile:, model=\x1b[31m\u202e\nx" in capsys.readouterr().out


def test_a_live_line_shows_foreign_text_as_it_is() -> None:
    assert r"[/x] \x1b[31m" in rendered(EpochLine(0, 2, "[/x] \x1b[31m"), 80)


def test_a_table_of_one_column_stays() -> None:
    table = small_table(1)
    (part,) = fitting_tables(table, Console(width=3))
    assert [list(column.cells) for column in part.columns] == [["cell 0", "x"]]
