"""Whether somebody sits at a terminal."""

from __future__ import annotations

import os
from typing import TextIO


def is_terminal(stream: TextIO) -> bool:
    """Whether what is written is shown by a terminal, in which lines can change and have colours.

    A cell of a notebook is none, although a command in it (`!weft train ...`) writes to a terminal of its own: there
    the environment is as Jupyter or IPython's kernel has made it.
    """
    in_cell = "JPY_PARENT_PID" in os.environ or "inline" in os.environ.get("MPLBACKEND", "")
    return stream.isatty() and not in_cell
