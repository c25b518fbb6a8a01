"""Memory of the host for what a device with a limit does not hold."""

from __future__ import annotations

import math
import mmap
import os
import tempfile

import torch
from torch import Tensor

from weft.core.errors import RunError


def mapped_empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor in a file without a name, which the system may write out and which ends with the process or before.

    RunError where there is no room for it in the folder for temporary files.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(*shape, dtype=dtype)
    try:
        with tempfile.TemporaryFile(prefix="weft-") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=dtype).view(*shape)
    except OSError as error:
        raise RunError(
            f"{tempfile.gettempdir()}: no room for {num_bytes:,} bytes of vertex data ({error.strerror}): set TMPDIR "
            "to another folder"
        ) from error
