"""Lines contain no control characters, and a notebook cell is not a terminal."""

from __future__ import annotations

import os
import pty

import pytest

from weft.utils.log import LOGGER
from weft.utils.terminal import is_terminal, print_line


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    foreign = "a\x1b[31m\nb\u202ec\udc80é"
    print_line(foreign)
    LOGGER.info(foreign)
    shown = r"a\x1b[31m\nb\u202ec\udc80é"
    assert capsys.readouterr() == (f"{shown}\n", f"weft: {shown}\n")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"MPLBACKEND": "agg"}, True),
        ({"MPLBACKEND": "module://matplotlib_inline.backend_inline"}, False),
        ({"JPY_PARENT_PID": "1"}, False),
    ],
)
def test_a_command_in_a_cell_has_no_terminal(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that a notebook cell runs has no terminal, although IPython opens a pseudo-terminal for it."""
    for name in ("MPLBACKEND", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    with os.fdopen(ours), os.fdopen(theirs, "w") as terminal, open(os.devnull, "w") as file:
        assert is_terminal(terminal) == expected
        assert not is_terminal(file)
