"""Tensors in a .safetensors file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes copies of tensors, which may share memory, with the mode of other files. OSError with the path."""
    try:
        save_file({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, path, metadata)
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else 0
        raise OSError(number, os.strerror(number) if found else str(error), str(path)) from error
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
