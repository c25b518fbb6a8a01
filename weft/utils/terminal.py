"""Detection of terminals."""

from __future__ import annotations

import os
from typing import TextIO


def is_terminal(stream: TextIO) -> bool:
    """Return True if a stream writes to a terminal, where lines can change and have colours.

    A notebook cell is not a terminal, although a command in it (`!weft train ...`) gets a terminal of its own; the
    environment variables of Jupyter or IPython's kernel reveal it.
    """
    in_cell = "JPY_PARENT_PID" in os.environ or "inline" in os.environ.get("MPLBACKEND", "")
    return stream.isatty() and not in_cell
