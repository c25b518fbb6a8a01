"""Memory of the host for what a device with a limit does not hold: in files without a name, and pinned.

What is mapped counts as memory of the process for as long as it is resident; what is read and written does not.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from weft.core import native
from weft.core.errors import InputError, RunError

FILE_STEP = 1 << 24  # bytes by which an array file grows, or by its size, if that is less
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BLOCK_BYTES = 1 << 14  # of rows that are cleared as one

_mapped: dict[StorageWeakRef, int | None] = {}
"""The storages that `release` may take pages of: a weak reference keeps a storage's identity from being used again.

With the version of a private mapping's tensor: its pages are given back only as long as nobody has written to it.
"""


def free_bytes(folder: Path | None = None) -> int:
    """The bytes that files in a folder (None: the temporary one) can still take. InputError if it is not there."""
    name = _name(folder)
    try:
        stat = os.statvfs(name)
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}: --scratch another folder") from error
    return stat.f_bavail * stat.f_frsize


def mapped_empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor in a new file without a name in the folder for temporary files, zero at first. RunError if full."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(*shape, dtype=dtype)
    return _File(num_bytes, remedy="set TMPDIR to").tensor(*shape, dtype=dtype)


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor, or what it is a view of, maps a file: one of `mapped_empty`, of HostRows, or of a store."""
    return bool(_mapped) and tensor.device.type == "cpu" and StorageWeakRef(tensor.untyped_storage()) in _mapped


def note_mapped(tensor: Tensor, *, private: bool = False) -> None:
    """Says that a tensor maps a file, so that `release` may take its pages.

    private: what is written to it does not reach the file.
    """
    for gone in [storage for storage in _mapped if storage.expired()]:
        del _mapped[gone]
    _mapped[StorageWeakRef(tensor.untyped_storage())] = tensor._version if private else None


def release(tensor: Tensor) -> None:
    """Gives back the resident pages of a tensor that maps a file (`is_mapped`); does nothing to any other.

    Its numbers stay in the file, and come back as they are asked for. A private mapping that was written to is kept.
    """
    if tensor.numel() and is_mapped(tensor):
        version = _mapped[StorageWeakRef(tensor.untyped_storage())]
        if version is not None and tensor._version != version:
            return
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        native.release_pages(tensor.data_ptr(), (reach + 1) * tensor.itemsize)


def add_rows(table: Tensor, rows: Tensor, added: Tensor) -> None:
    """`table[rows] += added` on the table's device; rows int64 [c], distinct."""
    if table.device.type == "cpu":
        native.add_rows(table, rows, added.to("cpu"))
    else:
        table.index_add_(0, rows, added)


class _File:
    """Bytes in a file without a name, whose space is taken at once and given back with the object or the process.

    folder: None for that for temporary files. remedy: of the RunError where there is no room.
    """

    def __init__(self, num_bytes: int, folder: Path | None = None, *, remedy: str = "--scratch") -> None:
        self.handle, self.num_bytes, self.folder, self.remedy = -1, 0, _name(folder), remedy
        try:
            self.handle = _unnamed(self.folder)
        except OSError as error:
            raise self.refused(num_bytes, error) from error
        self.grow(num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Takes the space of as many bytes in all."""
        if num_bytes <= self.num_bytes:
            return
        try:
            os.posix_fallocate(self.handle, self.num_bytes, num_bytes - self.num_bytes)
        except OSError as error:
            raise self.refused(num_bytes, error) from error
        self.num_bytes = num_bytes

    def read(self, offset: int, out: Tensor) -> Tensor:
        """Fills a contiguous tensor with what begins at a byte."""
        with self.explained():
            native.read_bytes(self.handle, offset, out)
        return out

    def write(self, offset: int, tensor: Tensor) -> None:
        """Writes a tensor of any device from a byte on."""
        with self.explained():
            native.write_bytes(self.handle, offset, tensor.detach().to("cpu"))

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """The file's first bytes as a tensor that is mapped; it outlives this object."""
        path = f"/proc/self/fd/{self.handle}"
        with self.explained():
            mapped = torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype)
        note_mapped(mapped)
        return mapped.view(*shape)

    def refused(self, num_bytes: int, error: OSError) -> RunError:
        """The error for what the system would not do."""
        what = "no room for" if error.errno in NO_ROOM else "cannot keep"
        said = f"{self.folder}: {what} {num_bytes:,} bytes of vertex data ({error.strerror})"
        return RunError(f"{said}: {self.remedy} another folder")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns what the system refuses into a RunError."""
        try:
            yield
        except OSError as error:
            raise self.refused(self.num_bytes, error) from error

    def close(self) -> None:
        """Gives the space back, if nothing is mapped."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle, self.num_bytes = -1, 0

    def __del__(self) -> None:
        self.close()


def _name(folder: Path | None) -> str:
    return tempfile.gettempdir() if folder is None else str(folder)


def _unnamed(folder: str) -> int:
    """The handle of a new file that no other process can see, and that is gone when this one is."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:  # a filesystem without such files; any other reason holds for the next line too
        handle, path = tempfile.mkstemp(prefix="weft-", dir=folder)
        os.unlink(path)
        return handle


class HostRows:
    """Rows [n, F] on the host in a file, zero at first; what is moved takes no memory but the caller's.

    dtype: float32 or float64. folder: None for that for temporary files.
    RunError where the file's folder has no room. One call at a time.
    """

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, folder: Path | None = None) -> None:
        self.num_rows, self.width, self.dtype = num_rows, width, dtype
        self.num_bytes = num_rows * width * dtype.itemsize
        self._file = _File(self.num_bytes, folder)
        self._block = max(1, BLOCK_BYTES // max(1, width * dtype.itemsize))
        self._cleared = np.zeros(-(-num_rows // self._block), np.uint8)  # by block: what the file has there is void

    def read(self, first: int, end: int) -> Tensor:
        """A copy of the rows [end - first, F] from `first` on."""
        assert 0 <= first <= end <= self.num_rows
        self._settle(first, end)
        out = torch.empty(end - first, self.width, dtype=self.dtype)
        return self._file.read(first * self.width * self.dtype.itemsize, out)

    def write(self, first: int, rows: Tensor) -> None:
        """Puts rows [m, F] in the place of those from `first` on."""
        assert first >= 0
        assert first + len(rows) <= self.num_rows
        assert rows.shape[1:] == (self.width,)
        end, block = first + len(rows), self._block
        self._cleared[-(-first // block) : len(self._cleared) if end == self.num_rows else end // block] = 0
        self._settle(first, end)
        self._file.write(first * self.width * self.dtype.itemsize, rows.detach().to("cpu", self.dtype))

    def gather(self, rows: Tensor, out: Tensor, places: Tensor | None = None) -> None:
        """`out[places[i]] = self[rows[i]]`; rows int64 [c], ascending and distinct; out [K, F] contiguous.

        places None: out[i].
        """
        self._check(rows, out)
        self._settle(0, self.num_rows)
        if out.device.type == "cpu":
            with self._file.explained():
                native.gather_file_rows(self._file.handle, rows, places, out)
        else:
            found = torch.empty(len(rows), self.width, dtype=self.dtype, pin_memory=out.is_cuda)
            self.gather(rows, found)
            _put(found, out, places)

    def add(self, rows: Tensor, values: Tensor, places: Tensor | None = None) -> None:
        """`self[rows[i]] += values[places[i]]`; rows int64 [c], ascending and distinct; values [K, F].

        places None: values[i].
        """
        self._check(rows, values)
        if values.device.type != "cpu":
            values, places = _taken(values, places).to("cpu"), None
        with self._file.explained():
            native.add_file_rows(
                self._file.handle,
                rows,
                places,
                values,
                num_rows=self.num_rows,
                block_rows=self._block,
                cleared=torch.from_numpy(self._cleared),
            )

    def clear(self) -> None:
        """Makes all rows zero, without a word to the file: what is added to them is written there, and not read."""
        self._cleared.fill(1)

    def tensor(self) -> Tensor:
        """All rows [n, F] as a tensor that is mapped: it shares them, and keeps them when this object is gone."""
        if not self.num_bytes:
            return torch.empty(self.num_rows, self.width, dtype=self.dtype)
        self._settle(0, self.num_rows)
        return self._file.tensor(self.num_rows, self.width, dtype=self.dtype)

    def close(self) -> None:
        """Gives the space back, unless a tensor shares it."""
        self._file.close()

    def _settle(self, first: int, end: int) -> None:
        """Writes the zeros of blocks that were cleared, in which some of these rows are."""
        cleared = self._cleared[first // self._block : -(-end // self._block)]
        if not cleared.any():
            return
        for block in (cleared.nonzero()[0] + first // self._block).tolist():
            begin, stop = block * self._block, min((block + 1) * self._block, self.num_rows)
            zeros = torch.zeros(stop - begin, self.width, dtype=self.dtype)
            self._file.write(begin * self.width * self.dtype.itemsize, zeros)
        cleared.fill(0)

    def _check(self, rows: Tensor, table: Tensor) -> None:
        assert table.shape[1:] == (self.width,)
        assert table.dtype == self.dtype
        assert not len(rows) or int(rows[-1]) < self.num_rows


class PinnedRows:
    """The same rows in memory that a device reaches by itself, where that device is a GPU.

    device: which; anything but a GPU gets plain memory.
    """

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_rows, self.width, self.dtype = num_rows, width, dtype
        self.num_bytes = num_rows * width * dtype.itemsize
        self._pinned = device.type == "cuda"
        self._rows = torch.zeros(num_rows, width, dtype=dtype, pin_memory=self._pinned)

    def read(self, first: int, end: int) -> Tensor:
        """The rows [end - first, F] from `first` on, in their own memory, not to be changed."""
        return self._rows[first:end]

    def write(self, first: int, rows: Tensor) -> None:
        """Puts rows [m, F] in the place of those from `first` on."""
        self._rows[first : first + len(rows)] = rows.detach().to("cpu")

    def gather(self, rows: Tensor, out: Tensor, places: Tensor | None = None) -> None:
        """`out[places[i]] = self[rows[i]]`; rows int64 [c], ascending and distinct; out [K, F], here or on the GPU.

        places None: out[i].
        """
        found = torch.empty(len(rows), self.width, dtype=self.dtype, pin_memory=self._pinned)
        _put(torch.index_select(self._rows, 0, rows, out=found), out, places)

    def add(self, rows: Tensor, values: Tensor, places: Tensor | None = None) -> None:
        """`self[rows[i]] += values[places[i]]`; rows int64 [c], ascending and distinct; values [K, F].

        places None: values[i].
        """
        add_rows(self._rows, rows, _taken(values, places))

    def clear(self) -> None:
        """Makes all rows zero."""
        self._rows.zero_()

    def tensor(self) -> Tensor:
        """All rows [n, F], shared."""
        return self._rows

    def close(self) -> None:
        """Gives the memory back, unless a tensor shares it."""
        self._rows = self._rows.new_empty(0, self.width)


def _taken(values: Tensor, places: Tensor | None) -> Tensor:
    """`values[places]`; None: all."""
    return values if places is None else values.index_select(0, places.to(values.device))


def _put(found: Tensor, out: Tensor, places: Tensor | None) -> None:
    """`out[places[i]] = found[i]`, by one copy where places are a run; None: out[i]."""
    first, count = 0 if places is None or not len(places) else int(places[0]), len(found)
    if places is None or torch.equal(places.to("cpu"), torch.arange(first, first + count)):
        out[first : first + count].copy_(found, non_blocking=True)
    else:
        out.index_copy_(0, places.to(out.device), found.to(out.device, non_blocking=True))


def host_rows(
    num_rows: int, width: int, dtype: torch.dtype, *, device: torch.device, folder: Path | None = None
) -> HostRows | PinnedRows:
    """Rows for a device to work on: pinned for a GPU unless a folder is named, else in a file."""
    if device.type == "cuda" and folder is None:
        return PinnedRows(num_rows, width, dtype, device)
    return HostRows(num_rows, width, dtype, folder)


class ArrayRef(NamedTuple):
    """Where an array file keeps an array."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class ArrayFile:
    """Small arrays one after the other in a file that grows with them. RunError where its folder has no room."""

    def __init__(self, folder: Path | None = None) -> None:
        self.num_bytes = 0
        self._file = _File(0, folder)

    def put(self, tensor: Tensor) -> ArrayRef:
        """Keeps an array of any type and shape."""
        stored = ArrayRef(self.num_bytes, tuple(tensor.shape), tensor.dtype)
        end = self.num_bytes + tensor.nbytes
        if end > self._file.num_bytes:
            self._file.grow(max(end, self._file.num_bytes + min(self._file.num_bytes, FILE_STEP)))
        self._file.write(self.num_bytes, tensor)
        self.num_bytes = end
        return stored

    def get(self, stored: ArrayRef) -> Tensor:
        """A copy of an array that was put."""
        return self._file.read(stored.offset, torch.empty(stored.shape, dtype=stored.dtype))

    def close(self) -> None:
        """Gives the space back."""
        self._file.close()
