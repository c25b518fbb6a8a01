"""The two errors a person meets: a mistake in what was asked for, and a run that could not go on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """A mistake of the caller: one line that names what is wrong (file, field, value) and the remedy.

    The command line prints it and exits with 2.
    """


class RunError(RuntimeError):
    """A run that started and could not finish: a lost rank, a collective past its timeout.

    One line that names rank and phase. The command line prints it and exits with 1.
    """


class Stopped(KeyboardInterrupt):
    """A run that a signal ended, as a rule between two epochs and with a checkpoint. `signal` is its number.

    The command line prints the one line that says how to go on, and exits with 128 + signal.
    """

    def __init__(self, text: str, signal: int) -> None:
        super().__init__(text)
        self.signal = signal


def unknown(what: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not in a table, with the nearest one that is."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(names)}"
    return InputError(f"unknown {what} '{name}': {hint}")
