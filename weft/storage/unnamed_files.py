"""Unnamed files for data that a device with a memory limit cannot hold: tensors that map a file, and arrays in a file.

Mapped pages count as memory of the process while they are resident; data that is read and written does not.
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
from weft.storage.quantized_table import FeatureTable
from weft.utils.errors import InputError, RunError

MAX_GROWTH = 1 << 24
"""Bytes by which an array file grows; a smaller file doubles its size."""
MIN_FILE = 1 << 24
"""Bytes from which on `empty_in_file` uses a file."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers that mean too little free space."""

_mapped: dict[StorageWeakRef, int | None] = {}
"""Storages whose pages `release` may free. A weak reference keeps a storage's identity from being reused.

The value is the tensor's version if the mapping is private: its pages are freed only if nobody has written to them.
"""


def free_bytes(folder: Path | None = None) -> int:
    """Return the free space of a folder in bytes; None: the folder for temporary files.

    Raises:
        InputError: If the folder does not exist.
    """
    name = _name(folder)
    try:
        stat = os.statvfs(name)
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}: give --scratch another folder") from error
    return stat.f_bavail * stat.f_frsize


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor, or the tensor that it is a view of, maps a file of HostRows or of a graph folder."""
    return bool(_mapped) and tensor.device.type == "cpu" and StorageWeakRef(tensor.untyped_storage()) in _mapped


def note_mapped(tensor: Tensor, *, private: bool = False) -> None:
    """Register a tensor that maps a file, so that `release` may free its pages.

    Args:
        tensor: The tensor.
        private: Whether writes to it do not reach the file.
    """
    for expired in [storage for storage in _mapped if storage.expired()]:
        del _mapped[expired]
    _mapped[StorageWeakRef(tensor.untyped_storage())] = tensor._version if private else None


def release(table: FeatureTable) -> None:
    """Free the resident pages of a tensor that maps a file (`is_mapped`); does nothing to other tensors.

    The data stays in the file and is read again when accessed. A private mapping that was written to is not freed.
    """
    tensor = table if isinstance(table, Tensor) else table.values
    if tensor.numel() and is_mapped(tensor):
        version = _mapped[StorageWeakRef(tensor.untyped_storage())]
        if version is not None and tensor._version != version:
            return
        last_element = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        native.release_pages(tensor.data_ptr(), (last_element + 1) * tensor.itemsize)


class ScratchFile:
    """Bytes in an unnamed file, whose space is reserved at once and freed with the object or the process.

    Args:
        num_bytes: Size of the file.
        folder: Folder of the file; None: the default folder for temporary files.

    Raises:
        RunError: If there is too little free space.
    """

    def __init__(self, num_bytes: int, folder: Path | None = None) -> None:
        self.handle, self.num_bytes, self.folder = -1, 0, _name(folder)
        self.remedy = "set TMPDIR to" if folder is None else "give --scratch"
        try:
            self.handle = _unnamed(self.folder)
        except OSError as error:
            raise self.refused(num_bytes, error) from error
        self.grow(num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Enlarge the file to `num_bytes` bytes in total."""
        if num_bytes <= self.num_bytes:
            return
        try:
            os.posix_fallocate(self.handle, self.num_bytes, num_bytes - self.num_bytes)
        except OSError as error:
            raise self.refused(num_bytes, error) from error
        self.num_bytes = num_bytes

    def read(self, offset: int, out: Tensor) -> Tensor:
        """Fill a contiguous tensor from the file, and return it.

        Args:
            offset: Position of the first byte.
            out: The tensor.
        """
        with self.explained():
            native.read_bytes(self.handle, offset, out)
        return out

    def write(self, offset: int, tensor: Tensor) -> None:
        """Write a tensor of any device to the file.

        Args:
            offset: Position of the first byte.
            tensor: The tensor.
        """
        with self.explained():
            native.write_bytes(self.handle, offset, tensor.detach().to("cpu"))

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return the beginning of the file as a memory-mapped tensor, which outlives this object.

        Args:
            shape: Shape of the tensor.
            dtype: Dtype of the tensor.
        """
        path = f"/proc/self/fd/{self.handle}"
        with self.explained():
            mapped = torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype)
        note_mapped(mapped)
        return mapped.view(*shape)

    def refused(self, num_bytes: int, error: OSError) -> RunError:
        """Return the RunError for an operation that the system refused.

        Args:
            num_bytes: Size of the file that was needed.
            error: The system's error.
        """
        problem = "no space for" if error.errno in NO_SPACE else "cannot store"
        message = f"{self.folder}: {problem} {num_bytes:,} bytes of vertex data ({error.strerror})"
        return RunError(f"{message}: {self.remedy} another folder")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn OSErrors inside the block into RunErrors."""
        try:
            yield
        except OSError as error:
            raise self.refused(self.num_bytes, error) from error

    def close(self) -> None:
        """Close the file, which frees its space unless a tensor maps it."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle, self.num_bytes = -1, 0

    def __del__(self) -> None:
        self.close()


def empty_in_memory(count: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor.

    Args:
        count: Number of elements.
        dtype: Their type.
    """
    return torch.empty(count, dtype=dtype)


def empty_in_file(count: int, dtype: torch.dtype, folder: Path | None = None) -> Tensor:
    """Return a tensor that maps an unnamed file, whose space is freed with the tensor; a small one is in memory.

    Args:
        count: Number of elements.
        dtype: Their type.
        folder: Folder of the file; None: the default folder for temporary files.

    Raises:
        RunError: If there is too little free space.
    """
    num_bytes = count * dtype.itemsize
    if num_bytes < MIN_FILE:
        return empty_in_memory(count, dtype)
    return ScratchFile(num_bytes, folder).tensor(count, dtype=dtype)


def _name(folder: Path | None) -> str:
    """Return the name of a folder, or of the default folder for temporary files."""
    return tempfile.gettempdir() if folder is None else str(folder)


def _unnamed(folder: str) -> int:
    """Open a new file that no other process can see and that is deleted with this process; return its descriptor."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:  # the file system has no O_TMPFILE; for any other reason, the next line fails too
        handle, path = tempfile.mkstemp(prefix="weft-", dir=folder)
        os.unlink(path)
        return handle


class ArrayRef(NamedTuple):
    """Location of a stored array."""

    offset: int
    """Position of the first byte in an ArrayFile; number of the array in an ArrayMemory."""
    shape: tuple[int, ...]
    """Shape of the array."""
    dtype: torch.dtype
    """Dtype of the array."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class ArrayMemory:
    """Arrays in memory, with the interface of ArrayFile.

    `get` returns the stored array itself, which must not be changed.
    """

    def __init__(self) -> None:
        self._arrays: list[Tensor] = []

    def put(self, tensor: Tensor) -> ArrayRef:
        """Store an array of any dtype and shape, and return its location."""
        self._arrays.append(tensor.contiguous())
        return ArrayRef(len(self._arrays) - 1, tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays)

    def get(self, ref: ArrayRef) -> Tensor:
        """Return a stored array."""
        return self._arrays[ref.offset]


class ArrayFile:
    """Small arrays one after the other in an unnamed file that grows. Raises RunError if its folder is full.

    Args:
        folder: Folder of the file; None: the default folder for temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.num_bytes = 0
        self._file = ScratchFile(0, folder)

    def put(self, tensor: Tensor) -> ArrayRef:
        """Store an array of any dtype and shape, and return its location."""
        ref = ArrayRef(self.num_bytes, tuple(tensor.shape), tensor.dtype)
        end = self.num_bytes + tensor.nbytes
        if end > self._file.num_bytes:
            self._file.grow(max(end, self._file.num_bytes + min(self._file.num_bytes, MAX_GROWTH)))
        self._file.write(self.num_bytes, tensor)
        self.num_bytes = end
        return ref

    def get(self, ref: ArrayRef) -> Tensor:
        """Return a copy of a stored array."""
        return self._file.read(ref.offset, torch.empty(ref.shape, dtype=ref.dtype))

    def close(self) -> None:
        """Close the file, which frees its space."""
        self._file.close()


class MetaArrayFile(ArrayFile):
    """Array file for meta tensors: it counts the bytes of its arrays, and allocates those that are read."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def put(self, tensor: Tensor) -> ArrayRef:
        self.num_bytes += tensor.nbytes
        return ArrayRef(0, tuple(tensor.shape), tensor.dtype)

    def get(self, ref: ArrayRef) -> Tensor:
        return torch.empty(ref.shape, dtype=ref.dtype, device="meta")
