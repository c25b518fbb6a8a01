"""Errors are one line of printable characters, and suggest similar names; unreadable files are such errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.data import DataWarning
from weft.utils.errors import MAX_CAUSE, MAX_NAMES, InputError, RunError, readable, unknown


@pytest.mark.parametrize("kind", [InputError, RunError, DataWarning])
def test_one_line(kind: type[InputError | RunError | DataWarning]) -> None:
    assert str(kind("a\nb\r\x1b[31m\x00 \u2028\udcff: \u00e9")) == r"a\nb\r\x1b[31m\x00 \u2028\udcff: " + "\u00e9"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("blocks", "choose one of fennel, metis, range"),
        ("fenel", "did you mean 'fennel'?"),
        ("", "choose one of fennel, metis, range"),
    ],
)
def test_only_similar_names_are_suggested(name: str, hint: str) -> None:
    assert str(unknown("method", name, ("range", "metis", "fennel"))) == f"unknown method '{name}': {hint}"


def test_dissimilar_names_are_listed() -> None:
    assert "did you mean" not in str(unknown("option", "loss", ("blocks", "dropout")))
    text = str(unknown("relation", "?", (str(i) for i in range(1000))))
    assert text.count(",") == MAX_NAMES
    assert text.endswith(", ...")


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (ValueError("no\n  header"), "g.npy: cannot be read (no header): save it again"),
        (KeyError("x"), "g.npy: cannot be read (KeyError: 'x'): save it again"),
        (RecursionError("deep"), "g.npy: cannot be read (RecursionError: deep): save it again"),
        (OSError("no seek"), "g.npy: cannot be read (OSError: no seek): save it again"),
        (PermissionError(13, "Permission denied", "/g"), "/g: Permission denied: check the path and its permissions"),
        (InputError("g.npy: is no graph"), "g.npy: is no graph"),
    ],
)
def test_unreadable_content_is_an_input_error(raised: Exception, message: str) -> None:
    with pytest.raises(InputError) as error, readable(Path("g.npy"), "save it again"):
        raise raised
    assert str(error.value) == message


def test_a_long_message_is_cut() -> None:
    with pytest.raises(InputError) as error, readable("g", "save it again"):
        raise ValueError("x" * 9999)
    assert str(error.value) == f"g: cannot be read ({'x' * (MAX_CAUSE - 3)}...): save it again"


@pytest.mark.parametrize("raised", [RunError("rank 1"), MemoryError(), UserWarning("odd"), KeyboardInterrupt()])
def test_other_exceptions_are_not_converted(raised: BaseException) -> None:
    with pytest.raises(type(raised)), readable("g", "save it again"):
        raise raised


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--batch-size 0: give at least 1", "batch_size 0: give at least 1"),
        ("unknown --order 'dfs': did you mean 'bfs'?", "unknown order 'dfs': did you mean 'bfs'?"),
        (
            "chunks has no effect: leave it out, or give --strategy tensor",
            "chunks has no effect: leave it out, or give strategy tensor",
        ),
        (
            "start it with torchrun --nproc-per-node 2: --workers has 2",
            "start it with torchrun --nproc-per-node 2: workers has 2",
        ),
        ("weft plan cora --workers 2: --hosts 3", "weft plan cora --workers 2: hosts 3"),
        ("a -- b, x--y and pip install --upgrade x", "a -- b, x--y and pip install --upgrade x"),
    ],
)
def test_a_notebook_shows_one_line_with_arguments(text: str, shown: str) -> None:
    assert InputError(text)._render_traceback_() == [f"weft: {shown}"]
    assert str(InputError(text)) == text
