"""Where in a person's code a call stands."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import torch

WEFT, TORCH = Path(__file__).parent, Path(torch.__file__).parent

Line = tuple[str, int, str]
"""A file, a line in it, and the function that has it."""


def line_of(frame: FrameType) -> str:
    """The innermost line of the model that is being run."""
    return _innermost(_lines(frame))


def blamed(error: Exception) -> str:
    """The line of the model that an error comes from."""
    found = reversed(traceback.extract_tb(error.__traceback__))
    return _innermost((one.filename, one.lineno or 0, one.name) for one in found)


def first_line(error: Exception) -> str:
    """What an error says first."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _lines(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _innermost(lines: Iterable[Line]) -> str:
    """Of lines from the innermost outward, the first of the model: a person's, or if there is none, PyG's."""
    of_pyg = ""
    for file, line, name in lines:
        if WEFT in Path(file).parents:
            if name == "forward":  # of trace.Root, which has called the model
                break
        elif TORCH not in Path(file).parents and not file.startswith("<"):
            said = f"{Path(file).name}, line {line}"
            text = linecache.getline(file, line).strip()
            said += f" ({text})" if text else ""
            if "torch_geometric" not in Path(file).parts:
                return said
            of_pyg = of_pyg or said
    return of_pyg or "the model"
