"""A table in a .npy or .safetensors file that several processes of a host write rows of, so that none has it whole."""

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


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """Where the table is; what it holds is any until its rows are put."""

    path: str
    shape: tuple[int, ...]
    """[N, C], or [N]."""
    dtype: str
    """NumPy's name of it."""
    offset: int
    """Bytes before the first row."""

    @classmethod
    def create(cls, path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, suffix: str) -> TableFile:
        """A new file with room for a table. name: of the tensor. suffix: the format. OSError where there is no room."""
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        header = HEADERS[suffix](name, shape, kind)
        with path.open("wb") as file:
            file.write(header)
            file.flush()
            num_bytes = prod(shape) * kind.itemsize
            if num_bytes:  # a disk that is full later would end whoever writes through a mapping
                os.posix_fallocate(file.fileno(), len(header), num_bytes)
        return cls(path=str(path), shape=shape, dtype=kind.name, offset=len(header))

    def record(self) -> dict[str, Any]:
        """In values that JSON knows."""
        return asdict(self)

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> TableFile:
        """What `record` has said."""
        return cls(**values | {"shape": tuple(values["shape"])})

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Writes values [n, C], or [n], as the rows of these numbers, int64 [n]."""
        if values.numel():
            self._map("r+")[rows.numpy()] = values.numpy()

    def open(self) -> Tensor:
        """The table, mapped; what is written to it does not reach the file."""
        if not prod(self.shape):
            return torch.from_numpy(np.empty(self.shape, self.dtype))
        return torch.from_numpy(self._map("c"))

    def _map(self, mode: Any) -> np.memmap[Any, Any]:
        return np.memmap(self.path, self.dtype, mode, self.offset, self.shape)


def npy_header(name: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> bytes:
    """What is before the rows in a .npy file."""
    del name
    made = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(made, described)
    return made.getvalue()


def safetensors_header(name: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> bytes:
    """What is before the rows in a .safetensors file of one tensor."""
    num_bytes = prod(shape) * kind.itemsize
    described = {name: {"dtype": SAFETENSORS[kind.name], "shape": shape, "data_offsets": [0, num_bytes]}}
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


SAFETENSORS = {"float32": "F32", "float64": "F64", "int64": "I64", "bool": "BOOL"}
HEADERS = {".npy": npy_header, ".safetensors": safetensors_header}
