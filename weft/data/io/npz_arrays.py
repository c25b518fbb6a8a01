"""The arrays of an .npz file, by key: numbers, names, features, edges; never a pickled object."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data.store.npy import as_tensor, parsing, read_header
from weft.data.tensor_checks import cast, check_ids, check_pointers, vertex_ids
from weft.runtime.memory import check_fits_memory
from weft.utils.errors import InputError

Arrays = dict[str, NDArray[Any]]

REMEDY = "save it with numpy.savez, without objects"
MAX_RATIO = 1032  # of bytes to those that deflate makes of them, at most
CSR_PARTS = ("data", "indices", "indptr", "shape")
"""What follows the key of features in CSR form."""


def read_all(path: Path) -> Arrays:
    """Every array of the file. Raises InputError if it is no .npz file, or holds pickled objects."""
    if not path.is_file():
        raise InputError(f"{path}: no such file: check the path")
    with parsing(path, REMEDY), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        packed, unpacked = sum(one.compress_size for one in members), sum(one.file_size for one in members)
        if packed > path.stat().st_size or unpacked > MAX_RATIO * packed:
            raise ValueError(f"it cannot hold the {unpacked} bytes that it states")
        check_fits_memory(unpacked, f"{path}: its arrays", "give fewer features, or their CSR parts")
        return {one.filename.removesuffix(".npy"): read_member(archive, one) for one in members}


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """One array of the file."""
    with archive.open(member) as file:
        read_header(file, member.file_size)
        file.seek(0)
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def read_features(arrays: Arrays, key: str) -> Tensor | None:
    """Features [n, F], dense, from `key` or its CSR parts; None if the file has neither."""
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
            f"{key}_indptr has {len(indptr)} entries, for {rows} rows and {len(data)} values at {len(indices)} places: "
            "write the CSR parts again"
        )
    check_pointers(f"{key}_indptr", indptr, len(indices), "write the CSR parts again")
    check_ids(f"{key}_indices", indices, columns)
    cells = (torch.arange(rows) * columns).repeat_interleave(indptr.diff()) + indices
    return torch.zeros(rows * columns).index_add_(0, cells, data).view(rows, columns)


def edge_rows(arrays: Arrays, key: str) -> tuple[Tensor, Tensor]:
    """Source and target [E] of a (2, E) array."""
    edges = as_tensor(key, required_array(arrays, key))
    if edges.dim() != 2 or len(edges) != 2:
        raise InputError(f"{key} has shape {list(edges.shape)}: save edges as (2, E), source row first")
    return vertex_ids(f"{key}[0]", edges[0]), vertex_ids(f"{key}[1]", edges[1])


def required_array(arrays: Arrays, key: str) -> NDArray[Any]:
    """An array by its key; InputError if the file lacks it."""
    if key not in arrays:
        raise InputError(f"lacks '{key}': it holds {', '.join(sorted(arrays))}")
    return arrays[key]


def whole_number(arrays: Arrays, key: str) -> int:
    """A single whole number by its key; InputError if it is something else."""
    return whole_numbers(arrays, key, 1)[0]


def whole_numbers(arrays: Arrays, key: str, size: int) -> list[int]:
    """As many whole numbers from 0 on, by their key; InputError if it is something else."""
    array = required_array(arrays, key)
    if array.size != size or array.dtype.kind not in "iu" or (array < 0).any():
        raise InputError(
            f"{key} holds {array.reshape(-1)[:4].tolist()} ({array.dtype} of shape {list(array.shape)}): save {size} "
            f"whole number{'s' * (size > 1)} from 0 on"
        )
    return [int(number) for number in array.reshape(-1)]


def name_list(arrays: Arrays, key: str) -> tuple[str, ...]:
    """A list of names by its key; InputError if it is something else."""
    array = required_array(arrays, key)
    if array.ndim != 1:
        raise InputError(f"{key} has shape {list(array.shape)}: save one list of names")
    return tuple(str(name) for name in array)


def optional_tensor(arrays: Arrays, key: str) -> Tensor | None:
    """An array as a tensor, or None if the file lacks it; InputError if it holds no numbers."""
    return as_tensor(key, arrays[key]) if key in arrays else None
