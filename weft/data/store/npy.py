"""The .npy format. Headers are compared with the file's size before memory is allocated."""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data.checks.tensor_checks import dense_cpu_tensor
from weft.storage.unnamed_files import note_mapped
from weft.utils.errors import InputError, readable
from weft.utils.files.file_reading import open_regular

MAP_NORESERVE = 0x4000
"""Flag of Linux's mmap on x86 and arm64, which Python's module lacks before 3.13."""
BFLOAT16 = "|V2"
"""Dtype of bfloat16 numbers in a .npy file, since NumPy has none: two bytes without a meaning."""
REMEDY = "save numbers by numpy.save, or fetch the file again"


class Header(NamedTuple):
    """Header of a .npy file."""

    shape: tuple[int, ...]
    """Shape of the array."""
    fortran_order: bool
    """True if the array is stored column by column."""
    dtype: np.dtype[Any]
    """Dtype of the array."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def array_of(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array that a .npy file can contain; they share memory."""
    return tensor.view(torch.int16).numpy().view(BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Return the tensor of an array from `array_of`; they share memory."""
    if array.dtype.str == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@contextmanager
def parsing(path: Path, remedy: str) -> Iterator[None]:
    """Turn errors in the block into InputErrors as `readable` does, and ignore NumPy's warnings about old files.

    Args:
        path: The file, for errors.
        remedy: Remedy to print in the error.
    """
    with readable(path, remedy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def read_header(file: IO[bytes], num_bytes: int) -> Header:
    """Read the header at the start of a file; the file is then positioned at the data. Call it in a `parsing` block.

    Args:
        file: The file.
        num_bytes: Size of the file.

    Raises:
        ValueError: If it contains Python objects, which would have to be unpickled, or data of another size. NumPy
            raises errors of many types for damaged bytes.
    """
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("its format is another version of .npy than numpy.save writes")
    header = Header(*np.lib.format.read_array_header_1_0(file))
    if header.dtype.hasobject:
        raise ValueError("it holds Python objects, which weft never unpickles")
    expected = file.tell() + header.num_bytes
    if expected != num_bytes:
        raise ValueError(f"it is truncated or damaged, with {num_bytes} bytes where its header asks for {expected}")
    return header


def map_array(path: Path, remedy: str = REMEDY) -> NDArray[Any]:
    """Return a .npy file as a copy-on-write memory map, which PyTorch accepts as writable.

    Args:
        path: The file.
        remedy: Remedy to print in the error.

    Raises:
        InputError: If it is missing or damaged.
    """
    if path.is_dir() or not path.exists():
        raise InputError(f"{path}: no such file: check the path")
    with parsing(path, remedy), open_regular(path) as file:
        header = read_header(file, path.stat().st_size)
        # np.memmap would reserve memory for a copy of every page, which the system refuses for files beyond memory.
        mapping = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        order: Any = "F" if header.fortran_order else "C"
        return np.ndarray(header.shape, header.dtype, mapping, offset=file.tell(), order=order)


def map_tensor(path: Path, field: str) -> Tensor:
    """Return a user's .npy file as a tensor, memory-mapped if PyTorch has its dtype.

    Args:
        path: The file.
        field: Name of the array in errors.

    Raises:
        InputError: If it contains no numbers.
    """
    array = map_array(path)
    tensor = as_tensor(f"{path}: {field}", array)
    if tensor.data_ptr() == array.ctypes.data:  # not converted, so the tensor is the mapping
        note_mapped(tensor, private=True)
    return tensor


def as_tensor(field: str, array: NDArray[Any]) -> Tensor:
    """Return a NumPy array as a tensor, which shares its memory if PyTorch has the dtype.

    Args:
        field: Name of the array in errors.
        array: Numbers of any byte order and width.

    Raises:
        InputError: If it contains no numbers.
    """
    if array.dtype.kind not in "biuf" or array.itemsize > 8:
        raise InputError(f"{field} is {array.dtype}: save real numbers of at most 64 bits")
    if not array.ndim:
        raise InputError(f"{field} is a single value: save an array")
    return dense_cpu_tensor(field, torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False)))
