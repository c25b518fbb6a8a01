"""The two errors for users: a mistake in the input (InputError), and a run that cannot continue (RunError)."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MAX_CAUSE = 100
"""Number of characters of a library's message that are shown."""
MAX_NAMES = 40
"""Number of valid names that are listed."""
MIN_SIMILARITY = 0.65
"""Similarity by difflib from which a valid name is suggested."""

COMMAND_OR_FLAG = re.compile(r"((?:\bweft [a-z]+|\btorchrun|\bpip) [^:;,]*)|(?<!\w)--([a-z][\w-]*)")
"""A command with its flags, up to the next punctuation; or a flag, in its second group."""


class InputError(ValueError):
    """Mistake of the caller. The message is one line with the place (file, field, value), the mistake and the remedy.

    The command line prints it and exits with code 2. A notebook shows it without a traceback, and names arguments.

    Args:
        text: The message.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return [f"weft: {naming_arguments(str(self))}"]


class RunError(RuntimeError):
    """Run that started and cannot finish, such as after the loss of a rank or the timeout of a collective.

    The message is one line with the rank and the phase. The command line prints it and exits with code 1.

    Args:
        text: The message.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class Stopped(KeyboardInterrupt):
    """Run that a signal ended, normally between two epochs and after a checkpoint.

    The command line prints the message, which tells how to continue, and exits with code 128 + signal.

    Args:
        text: The message.
        signal: Number of the signal.
    """

    def __init__(self, text: str, signal: int) -> None:
        super().__init__(printable(text))
        self.signal = signal

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return [f"weft: {self}"]


def naming_arguments(text: str) -> str:
    """Return a message with the names of arguments in place of flags, except for flags of commands.

    Args:
        text: The message, such as "--batch-size 0: ...".
    """
    return COMMAND_OR_FLAG.sub(lambda match: match[1] or match[2].replace("-", "_"), text)


@contextmanager
def refusing_exit() -> Iterator[None]:
    """Turn `sys.exit` in a user's code, run in the `with` block, into an error, since the run would have no result.

    Raises:
        InputError: The code called `sys.exit`. The message names the line.
    """
    try:
        yield
    except SystemExit as error:
        place = [entry for entry in traceback.extract_tb(error.__traceback__) if not entry.filename.startswith("<")][-1]
        raise InputError(
            f"{place.filename}:{place.lineno} calls sys.exit({error.code!r}), which would end weft without a result: "
            "remove the call, or move it under if __name__ == '__main__'"
        ) from error


def unknown(what: str, name: str, names: Iterable[str]) -> InputError:
    """Return the error for a name that does not exist, with the most similar one that does.

    Args:
        what: Kind of thing that the name should be.
        name: The name.
        names: All valid names.
    """
    ascending = sorted(names)
    near = nearest(name, ascending)
    listed = ", ".join(ascending[:MAX_NAMES]) + (", ..." if len(ascending) > MAX_NAMES else "")
    hint = f"did you mean '{near}'?" if near else f"choose one of {listed}"
    return InputError(f"unknown {what} '{name}': {hint}")


def check_word(what: str, word: str, names: Iterable[str]) -> None:
    """Check that an argument has one of the allowed values.

    Args:
        what: Name of the argument.
        word: Its value.
        names: Allowed values.

    Raises:
        InputError: The value is not allowed. The message suggests the most similar allowed one.
    """
    if word not in names:
        raise unknown(what, str(word), names)


def nearest(name: str, names: Sequence[str]) -> str | None:
    """Return the valid name that a misspelt name probably means, or None.

    Args:
        name: The misspelt name.
        names: Valid names.
    """
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=MIN_SIMILARITY)), None)


def printable(text: str) -> str:
    """Return the text in one line, with line breaks, control characters and invalid bytes escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def readable(place: str | Path, remedy: str, *, max_cause: int = MAX_CAUSE) -> Iterator[None]:
    """Convert any error raised in the `with` block, in which a file is read, to InputError.

    Libraries may raise any exception for damaged content. Warnings raised as errors and lack of memory are not about
    the content, and pass unchanged.

    Args:
        place: The file, for the message.
        remedy: Remedy in the message.
        max_cause: Number of characters of the library's message that are shown.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        yield
    except (InputError, RunError, Warning, MemoryError):
        raise
    except OSError as error:
        if error.filename is None:
            raise InputError(f"{place}: cannot be read ({cause(error, max_cause)}): {remedy}") from error
        raise InputError(f"{error.filename}: {error.strerror}: check the path and its permissions") from error
    except Exception as error:
        raise InputError(f"{place}: cannot be read ({cause(error, max_cause)}): {remedy}") from error


def cause(error: BaseException, max_chars: int = MAX_CAUSE) -> str:
    """Return the start of an exception's message in one line, after its type unless that is ValueError.

    Args:
        error: The exception.
        max_chars: Number of characters that are returned at most.
    """
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    text = " ".join(f"{kind}{error}".split())
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."
