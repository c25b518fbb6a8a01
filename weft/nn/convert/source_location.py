"""Location of a call in the user's code, for error messages."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

WEFT, TORCH = Path(__file__).parent, Path(torch.__file__).parent
"""Folders of this converter and of PyTorch, whose lines are not the user's code."""

Line = tuple[str, int, str]
"""Path of a file, number of a line in it, and name of the function that contains the line."""


def line_of(frame: FrameType) -> str:
    """Return the innermost line of the model's code among the frames of a running call."""
    return _innermost(_lines(frame))


def line_of_error(error: Exception) -> str:
    """Return the line of the model's code that an error comes from."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _innermost((frame.filename, frame.lineno or 0, frame.name) for frame in frames)


def line_of_code(function: Callable[..., Any]) -> str:
    """Return the first line of a function, as "net.py:62 `def forward(self, x, edge_index):`"."""
    code = inspect.unwrap(function).__code__
    return _innermost([(code.co_filename, code.co_firstlineno, code.co_name)])


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _lines(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _innermost(lines: Iterable[Line]) -> str:
    """Return the first line of the user's code, or if there is none of PyG's, as "net.py:62 `code`".

    The lines go from the innermost call outward.
    """
    pyg_line: Line | None = None
    for line in lines:
        author = _author(line[0])
        if author == "user":
            return _described(line)
        if author == "weft" and line[2] == "forward":  # of tracing.Root, which calls the model
            break
        if author == "pyg":
            pyg_line = pyg_line or line
    return _described(pyg_line) if pyg_line else "the model"


def _described(line: Line) -> str:
    file, number, _ = line
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}" + (f" `{text}`" if text else "")


@cache
def _author(file: str) -> Literal["weft", "torch", "pyg", "user"]:
    """Return whose code a file contains. Tracing looks at the same few files for every call of a model."""
    path = Path(file)
    if WEFT in path.parents:
        return "weft"
    if TORCH in path.parents or file.startswith("<"):
        return "torch"
    return "pyg" if "torch_geometric" in path.parts else "user"
