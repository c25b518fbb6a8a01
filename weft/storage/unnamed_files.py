"""Files without a name for what a device with a limit does not hold: tensors that map one, and arrays in one.

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

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from weft.runtime import native
from weft.utils.errors import InputError, RunError

FILE_STEP = 1 << 24  # bytes by which an array file grows, or by its size, if that is less
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

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


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor, or what it is a view of, maps a file: one of HostRows, or of a store."""
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


class ScratchFile:
    """Bytes in a file without a name, whose space is taken at once and given back with the object or the process.

    folder: None for that for temporary files.
    """

    def __init__(self, num_bytes: int, folder: Path | None = None) -> None:
        self.handle, self.num_bytes, self.folder = -1, 0, _name(folder)
        self.remedy = "set TMPDIR to" if folder is None else "--scratch"
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


class ArrayRef(NamedTuple):
    """Where an array is kept."""

    offset: int
    """In a file its first byte; in memory its number."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class ArrayMemory:
    """What an `ArrayFile` does, in memory: `get` gives the array itself, not to be changed."""

    def __init__(self) -> None:
        self._arrays: list[Tensor] = []

    def put(self, tensor: Tensor) -> ArrayRef:
        """Keeps an array of any type and shape."""
        self._arrays.append(tensor.contiguous())
        return ArrayRef(len(self._arrays) - 1, tuple(tensor.shape), tensor.dtype)

    def get(self, stored: ArrayRef) -> Tensor:
        """An array that was put."""
        return self._arrays[stored.offset]


class ArrayFile:
    """Small arrays one after the other in a file that grows with them. RunError where its folder has no room."""

    def __init__(self, folder: Path | None = None) -> None:
        self.num_bytes = 0
        self._file = ScratchFile(0, folder)

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
