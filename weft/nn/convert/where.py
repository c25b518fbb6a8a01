"""Where in a person's code a call stands."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

WEFT, TORCH = Path(__file__).parent, Path(torch.__file__).parent


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _is_theirs(file: str) -> bool:
    """Whether a file is neither weft's nor PyTorch's."""
    return not any(part in Path(file).parents for part in (WEFT, TORCH)) and not file.startswith("<")


def line_of(frame: FrameType) -> str:
    """The innermost line that is being run and is somebody's own."""
    found = next(((file, line) for file, line in _frames(frame) if _is_theirs(file)), None)
    return _said(*found) if found else "the model"


def _said(file: str, line: int) -> str:
    text = linecache.getline(file, line).strip()
    return f"{Path(file).name}, line {line}" + (f" ({text})" if text else "")


def blamed(error: Exception) -> str:
    """The line of the model that an error comes from."""
    lines = [
        (one.filename, one.lineno) for one in traceback.extract_tb(error.__traceback__) if _is_theirs(one.filename)
    ]
    return _said(lines[-1][0], lines[-1][1] or 0) if lines else "the model"


def first_line(error: Exception) -> str:
    """What an error says first."""
    return (str(error).splitlines() or [type(error).__name__])[0]
