"""A table in a .npy or .safetensors file to which several processes of a host write rows, so none needs it whole."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
"""Alignment in bytes of the data in a .safetensors file."""


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """Location and layout of a table in a file. Rows are undefined until they are written."""

    path: str
    """Path of the file."""
    shape: tuple[int, ...]
    """[N, C], or [N]."""
    dtype: str
    """NumPy's name of the dtype."""
    offset: int
    """Number of bytes before the first row."""

    @classmethod
    def create(cls, path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, suffix: str) -> TableFile:
        """Create a file with space for a table.

        Args:
            path: The new file.
            name: Name of the tensor in the file.
            shape: [N, C], or [N].
            dtype: Dtype of the table.
            suffix: Format, '.npy' or '.safetensors'.

        Raises:
            OSError: If there is too little free space.
        """
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        header = HEADERS[suffix](name, shape, kind)
        with path.open("xb") as file:
            file.write(header)
            file.flush()
            num_bytes = prod(shape) * kind.itemsize
            if num_bytes:  # reserve the space now: a disk that fills up later would kill processes that write by mmap
                os.posix_fallocate(file.fileno(), len(header), num_bytes)
        return cls(path=str(path), shape=shape, dtype=kind.name, offset=len(header))

    def record(self) -> dict[str, Any]:
        """Return the fields as a dict of JSON values."""
        return asdict(self)

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> TableFile:
        """Return the table from a dict that `record` has returned."""
        return cls(**values | {"shape": tuple(values["shape"])})

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Write rows of the table.

        Args:
            rows: Numbers of the rows, int64 [n].
            values: The rows, [n, C] or [n].
        """
        if values.numel():
            self._map("r+")[rows.numpy()] = values.numpy()

    def open(self) -> Tensor:
        """Return the table as a copy-on-write mapping; writing to it does not change the file."""
        if not prod(self.shape):
            return torch.from_numpy(np.empty(self.shape, self.dtype))
        return torch.from_numpy(self._map("c"))

    def _map(self, mode: Any) -> np.memmap[Any, Any]:
        return np.memmap(self.path, self.dtype, mode, self.offset, self.shape)


def npy_header(name: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> bytes:
    """Return the bytes before the rows in a .npy file.

    Args:
        name: Name of the tensor, which the format does not store.
        shape: Shape of the table.
        kind: Dtype of the table.
    """
    del name
    buffer = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


def safetensors_header(name: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> bytes:
    """Return the bytes before the rows in a .safetensors file of one tensor.

    Args:
        name: Name of the tensor.
        shape: Shape of the table.
        kind: Dtype of the table.
    """
    num_bytes = prod(shape) * kind.itemsize
    described = {name: {"dtype": SAFETENSORS[kind.name], "shape": shape, "data_offsets": [0, num_bytes]}}
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


SAFETENSORS = {"float32": "F32", "float64": "F64", "int64": "I64", "bool": "BOOL"}
HEADERS = {".npy": npy_header, ".safetensors": safetensors_header}
