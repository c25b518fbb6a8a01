"""Files of tensors in the safetensors format."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


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
