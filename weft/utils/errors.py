"""The two errors a person meets: a mistake in what was asked for, and a run that could not go on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MAX_CAUSE = 100  # letters of a library's own message that are shown
MAX_NAMES = 40  # known names that are listed
NEAR = 0.65  # the likeness, by difflib, of a name that was probably meant


class InputError(ValueError):
    """A mistake of the caller: one line that names what is wrong (file, field, value) and the remedy.

    The command line prints it and exits with 2.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class RunError(RuntimeError):
    """A run that started and could not finish: a lost rank, a collective past its timeout.

    One line that names rank and phase. The command line prints it and exits with 1.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class Stopped(KeyboardInterrupt):
    """A run that a signal ended, as a rule between two epochs and with a checkpoint. `signal` is its number.

    The command line prints the one line that says how to go on, and exits with 128 + signal.
    """

    def __init__(self, text: str, signal: int) -> None:
        super().__init__(text)
        self.signal = signal

    def _render_traceback_(self) -> list[str]:
        """What IPython shows, in place of where the signal came."""
        return [f"weft: {self}"]


def unknown(what: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not in a table, with the nearest one that is."""
    names = sorted(known)
    near = nearest(name, names)
    listed = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    hint = f"did you mean '{near}'?" if near else f"choose one of {listed}"
    return InputError(f"unknown {what} '{name}': {hint}")


def check_word(what: str, word: str, known: Iterable[str]) -> None:
    """Raise InputError for a value of an argument that is none of the words it may be, with the nearest one."""
    if word not in known:
        raise unknown(what, str(word), known)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that was probably meant by another one, if any is."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=NEAR)), None)


def printable(text: str) -> str:
    """The text in one line: line breaks, control characters and bytes that are no text are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def readable(place: str | Path, remedy: str) -> Iterator[None]:
    """Makes one InputError of whatever libraries, or the system, raise at content that cannot be read.

    Damaged content may make them raise anything. What is no matter of the content passes: a warning that is an error,
    and too little memory.
    """
    try:
        yield
    except (InputError, RunError, Warning, MemoryError):
        raise
    except OSError as error:
        if error.filename is None:
            raise InputError(f"{place}: cannot be read ({cause(error)}): {remedy}") from error
        raise InputError(f"{error.filename}: {error.strerror}: check the path and who may read it") from error
    except Exception as error:
        raise InputError(f"{place}: cannot be read ({cause(error)}): {remedy}") from error


def cause(error: BaseException) -> str:
    """What a library said, as part of a line: its message's start, after the error's kind unless that says nothing."""
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    text = " ".join(f"{kind}{error}".split())
    return text if len(text) <= MAX_CAUSE else text[: MAX_CAUSE - 3] + "..."
