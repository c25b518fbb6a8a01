"""Writing of a .npy file part by part, with the checksum for a graph folder's manifest."""

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
    """Writes an array row by row; the header gets the number of rows at the end.

    Args:
        path: The new file.
        dtype: Dtype of the array.
        columns: Shape of a row.
    """

    def __init__(self, path: Path, dtype: DTypeLike, columns: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.num_rows = path, np.dtype(dtype), 0
        self._columns, self._digest = columns, hashlib.sha256()
        self._file = path.open("xb")
        self._header_bytes = self._write_header()

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, rows: NDArray[Any]) -> None:
        """Append rows [n, ...]."""
        array = np.ascontiguousarray(rows, self.dtype)
        data = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            self._digest.update(chunk)
            self._file.write(chunk)
        self.num_rows += len(array)

    def finish(self) -> dict[str, Any]:
        """Complete and flush the file. Return its manifest entry: dtype, shape, sha256 of the data, size and time."""
        self._file.seek(0)
        header_bytes = self._write_header()
        if header_bytes != self._header_bytes:  # NumPy pads the header for a longer shape, so this is a bug
            raise RuntimeError(f"{self.path}: the header for {self.num_rows} rows does not fit before the data")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        described = {"dtype": self.dtype.str, "shape": [self.num_rows, *self._columns]}
        return {**described, "sha256": self._digest.hexdigest(), **file_state(self.path)}

    def _write_header(self) -> int:
        """Write the header for the rows so far, and return its size."""
        shape = (self.num_rows, *self._columns)
        described = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, described)
        return self._file.tell()


def write_array(path: Path, array: NDArray[Any]) -> dict[str, Any]:
    """Write one .npy file, flush it, and return its manifest entry.

    Args:
        path: The new file.
        array: The array.
    """
    with ArrayWriter(path, array.dtype, array.shape[1:]) as writer:
        writer.add(array)
        return writer.finish()
