"""Lines for people on standard output and standard error, and detection of terminals."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from weft.utils.errors import printable
from weft.utils.standard_streams import lossy


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print text in one line, with control characters escaped. What cannot be written is discarded.

    Names of graphs, columns and files come from others. Unescaped, they could change what a terminal shows.

    Args:
        text: The text.
        stream: Stream to print to. Default: standard output.
    """
    print(printable(text), file=lossy(stream or sys.stdout), flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if a stream writes to a terminal, where lines can change and have colours.

    A notebook cell is not a terminal, although a command in it (`!weft train ...`) gets a terminal of its own; the
    environment variables of Jupyter or IPython's kernel reveal it.
    """
    in_cell = "JPY_PARENT_PID" in os.environ or "inline" in os.environ.get("MPLBACKEND", "")
    return lossy(stream).isatty() and not in_cell
