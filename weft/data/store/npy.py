"""The .npy format: what an array's header says is compared with what is there before anything is allocated."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data.tensor_checks import dense_cpu_tensor
from weft.storage.unnamed_files import note_mapped
from weft.utils.errors import InputError, readable

REMEDY = "save numbers by numpy.save, or fetch the file again"


class Header(NamedTuple):
    """What a .npy file says of its array."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        """What the data take."""
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def parsing(path: Path, remedy: str) -> Iterator[None]:
    """`readable`, without numpy's warnings of what is damaged or old: it is read, or refused."""
    with readable(path, remedy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def read_header(file: IO[bytes], num_bytes: int) -> Header:
    """The header that a file of `num_bytes` begins with; the data come next. To be called while `parsing`.

    Raises ValueError for objects, which would have to be unpickled, and where the data are of another size. At damaged
    bytes, numpy raises errors of many kinds.
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
    """A .npy file as a memory map, copy on write, which torch takes as writable. InputError if it is no whole one."""
    if not path.is_file():
        raise InputError(f"{path}: no such file: check the path")
    with parsing(path, remedy), path.open("rb") as file:
        header = read_header(file, path.stat().st_size)
        order: Any = "F" if header.fortran_order else "C"
        return np.memmap(path, dtype=header.dtype, mode="c", offset=file.tell(), shape=header.shape, order=order)


def map_tensor(path: Path, field: str) -> Tensor:
    """A person's own .npy file as a tensor, memory-mapped where torch knows its type. InputError for what it is not."""
    array = map_array(path)
    tensor = as_tensor(f"{path}: {field}", array)
    if tensor.data_ptr() == array.ctypes.data:  # no copy of another type
        note_mapped(tensor, private=True)
    return tensor


def as_tensor(field: str, array: NDArray[Any]) -> Tensor:
    """A numpy array as a tensor that shares its memory where torch knows the type. InputError for other than numbers.

    Numbers of any byte order and width are taken, by their value.
    """
    if array.dtype.kind not in "biuf" or array.itemsize > 8:
        raise InputError(f"{field} is {array.dtype}: save real numbers of at most 64 bits")
    if not array.ndim:
        raise InputError(f"{field} is a single value: save an array")
    return dense_cpu_tensor(field, torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False)))
