"""Memory of the host for what a device with a limit does not hold."""

from __future__ import annotations

import math
import os
import tempfile

import torch
from torch import Tensor

from weft.core.errors import RunError


def mapped_empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor in a file without a name, which the system may write out and which ends with the tensor.

    RunError where there is no room for it in the folder for temporary files.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(*shape, dtype=dtype)
    try:
        handle, path = tempfile.mkstemp(prefix="weft-")
        try:
            os.posix_fallocate(handle, 0, num_bytes)
            return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(*shape)
        finally:
            os.close(handle)
            os.unlink(path)
    except OSError as error:
        raise RunError(
            f"{tempfile.gettempdir()}: no room for {num_bytes:,} bytes of vertex data ({error.strerror}): set TMPDIR "
            "to another folder"
        ) from error
