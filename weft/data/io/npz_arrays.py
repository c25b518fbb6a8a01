"""Arrays of an .npz file by key: numbers, names, features, edges. No object is unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data.checks.tensor_checks import cast, check_ids, check_pointers, vertex_ids
from weft.data.store.npy import as_tensor, parsing, read_header
from weft.runtime.memory.limit import check_fits_memory
from weft.utils.errors import InputError
from weft.utils.files.file_reading import open_regular

Arrays = dict[str, NDArray[Any]]

REMEDY = "save it with numpy.savez, without objects"
MAX_RATIO = 1032
"""Largest compression ratio of deflate; a file that promises more is damaged or malicious."""
CSR_PARTS = ("data", "indices", "indptr", "shape")
"""Suffixes of the keys of features in CSR form."""


def read_all(path: Path, keys: Collection[str] | None = None) -> Arrays:
    """Return the arrays of a file by key.

    Args:
        path: The file.
        keys: Keys of the arrays to read. None: every array.

    Raises:
        InputError: If it is no .npz file, contains pickled objects, or does not fit in memory.
    """
    if path.is_dir() or not path.exists():
        raise InputError(f"{path}: no such file: check the path")
    with parsing(path, REMEDY), open_regular(path) as file, zipfile.ZipFile(file) as archive:
        members = [info for info in archive.infolist() if keys is None or info.filename.removesuffix(".npy") in keys]
        packed, unpacked = sum(info.compress_size for info in members), sum(info.file_size for info in members)
        if packed > path.stat().st_size or unpacked > MAX_RATIO * packed:
            raise ValueError(f"it cannot contain the {unpacked} bytes that its header states")
        check_fits_memory(unpacked, f"{path}: its arrays", "give fewer features, or their CSR parts")
        return {info.filename.removesuffix(".npy"): read_member(archive, info) for info in members}


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Return one array of a file.

    Args:
        archive: The file.
        member: Entry of the array.
    """
    with archive.open(member) as file:
        read_header(file, member.file_size)
        file.seek(0)
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def read_features(arrays: Arrays, key: str) -> Tensor | None:
    """Return dense features [n, F]; None if the file has none.

    Args:
        arrays: Arrays of the file by key.
        key: Key of dense features, or prefix of the keys of their CSR parts.

    Raises:
        InputError: If CSR parts are missing or inconsistent.
    """
    if key in arrays:
        return optional_tensor(arrays, key)
    if f"{key}_data" not in arrays:
        return None
    rows, columns = sizes = whole_numbers(arrays, f"{key}_shape", 2)
    check_fits_memory(4 * rows * columns, f"{key} of shape {sizes}, dense,", "give fewer columns")
    data = cast(f"{key}_data", as_tensor(f"{key}_data", arrays[f"{key}_data"]), torch.float32)
    indices, indptr = (
        vertex_ids(name, as_tensor(name, required_array(arrays, name))) for name in (f"{key}_indices", f"{key}_indptr")
    )
    if len(indptr) != rows + 1 or len(data) != len(indices):
        raise InputError(
            f"{key}_indptr has {len(indptr)} entries, for {rows} rows, {len(data)} values and {len(indices)} column "
            "indices: write the CSR parts again"
        )
    check_pointers(f"{key}_indptr", indptr, len(indices), "write the CSR parts again")
    check_ids(f"{key}_indices", indices, columns)
    cells = (torch.arange(rows) * columns).repeat_interleave(indptr.diff()) + indices
    return torch.zeros(rows * columns).index_add_(0, cells, data).view(rows, columns)


def edge_rows(arrays: Arrays, key: str) -> tuple[Tensor, Tensor]:
    """Return sources and targets [E] of a (2, E) array.

    Args:
        arrays: Arrays of the file by key.
        key: Key of the edges.
    """
    edges = as_tensor(key, required_array(arrays, key))
    if edges.dim() != 2 or len(edges) != 2:
        raise InputError(f"{key} has shape {list(edges.shape)}: save edges as (2, E), source row first")
    return vertex_ids(f"{key}[0]", edges[0]), vertex_ids(f"{key}[1]", edges[1])


def required_array(arrays: Arrays, key: str) -> NDArray[Any]:
    """Return an array that a file must contain.

    Args:
        arrays: Arrays of the file by key.
        key: Key of the array.

    Raises:
        InputError: If it is missing.
    """
    if key not in arrays:
        raise InputError(f"no array '{key}' in the file: it contains {', '.join(sorted(arrays))}")
    return arrays[key]


def whole_number(arrays: Arrays, key: str) -> int:
    """Return a single whole number of a file.

    Args:
        arrays: Arrays of the file by key.
        key: Key of the number.

    Raises:
        InputError: If it is missing or something else.
    """
    return whole_numbers(arrays, key, 1)[0]


def whole_numbers(arrays: Arrays, key: str, size: int) -> list[int]:
    """Return several nonnegative whole numbers of a file.

    Args:
        arrays: Arrays of the file by key.
        key: Key of the numbers.
        size: How many they must be.

    Raises:
        InputError: If they are missing or something else.
    """
    array = required_array(arrays, key)
    if array.size != size or array.dtype.kind not in "iu" or (array < 0).any():
        raise InputError(
            f"{key} holds {array.reshape(-1)[:4].tolist()} ({array.dtype} of shape {list(array.shape)}): save {size} "
            f"whole number{'s' * (size > 1)} from 0 on"
        )
    return [int(number) for number in array.reshape(-1)]


def name_list(arrays: Arrays, key: str) -> tuple[str, ...]:
    """Return a list of names of a file.

    Args:
        arrays: Arrays of the file by key.
        key: Key of the names.

    Raises:
        InputError: If it is missing or something else.
    """
    array = required_array(arrays, key)
    if array.ndim != 1:
        raise InputError(f"{key} has shape {list(array.shape)}: save one list of names")
    return tuple(str(name) for name in array)


def optional_tensor(arrays: Arrays, key: str) -> Tensor | None:
    """Return an array as a tensor; None if the file does not contain it.

    Args:
        arrays: Arrays of the file by key.
        key: Key of the array.

    Raises:
        InputError: If it contains no numbers.
    """
    return as_tensor(key, arrays[key]) if key in arrays else None
