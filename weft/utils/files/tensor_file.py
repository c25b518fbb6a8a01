"""Files of tensors in the safetensors format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.utils.files.file_reading import check_regular


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a file, with the default permissions of files.

    Args:
        tensors: Tensors by name; they may share memory, since copies are written.
        path: The file.
        metadata: Texts to store with the tensors.

    Raises:
        OSError: The file cannot be written. The error has the path.
    """
    try:
        save_file({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, path, metadata)
    except SafetensorError as error:
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = int(match[1]) if match else 0
        raise OSError(number, os.strerror(number) if match else str(error), str(path)) from error
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file of tensors for reading, as `safetensors.safe_open` does.

    Args:
        path: The file.

    Raises:
        OSError, InputError: It is no regular file; see `check_regular`.
        SafetensorError: It is damaged.
    """
    check_regular(path)
    with safe_open(path, "pt") as file:
        yield file


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file by name. Raises the same errors as `open_tensors`."""
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # the file is not a mapping
