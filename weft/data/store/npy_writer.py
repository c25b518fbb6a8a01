"""A .npy file written part by part, with the checksum that a store's manifest states."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from weft.data.store.digests import CHUNK_BYTES
from weft.data.store.manifest import file_state


class ArrayWriter:
    """Writes rows one part after the other; the header says in the end how many there were."""

    def __init__(self, path: Path, dtype: DTypeLike, columns: tuple[int, ...] = ()) -> None:
        """columns: the shape of a row."""
        self.path, self.dtype, self.num_rows = path, np.dtype(dtype), 0
        self._columns, self._digest = columns, hashlib.sha256()
        self._file = path.open("wb")
        self._header_bytes = self._write_header()

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, rows: NDArray[Any]) -> None:
        """Writes some more rows [n, ...]."""
        array = np.ascontiguousarray(rows, self.dtype)
        data = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            self._digest.update(chunk)
            self._file.write(chunk)
        self.num_rows += len(array)

    def finish(self) -> dict[str, Any]:
        """Flushes the file; its manifest entry, with the sha256 of the data after the header, and the file's state."""
        self._file.seek(0)
        header_bytes = self._write_header()
        if header_bytes != self._header_bytes:  # numpy leaves room for a longer shape
            raise RuntimeError(f"{self.path}: the header of {self.num_rows} rows has no room before the data")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        described = {"dtype": self.dtype.str, "shape": [self.num_rows, *self._columns]}
        return {**described, "sha256": self._digest.hexdigest(), **file_state(self.path)}

    def _write_header(self) -> int:
        shape = (self.num_rows, *self._columns)
        described = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, described)
        return self._file.tell()


def write_array(path: Path, array: NDArray[Any]) -> dict[str, Any]:
    """Writes one .npy file and flushes it; returns its manifest entry."""
    with ArrayWriter(path, array.dtype, array.shape[1:]) as writer:
        writer.add(array)
        return writer.finish()
