"""Checks of single tensors, each mistake one line that says where and what helps. They know no graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.runtime.memory import require_memory
from weft.utils.errors import InputError, cause

Numbers: TypeAlias = "Tensor | NDArray[Any] | Sequence[Any]"
"""What is taken as a tensor: one, a NumPy array, a column of pandas, or a list."""

MASKS = ("train_mask", "val_mask", "test_mask")
LINKS = ("val_links", "test_links")

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

# Rows looked at together: a memory-mapped matrix is never copied, and its flags stay within the cache.
BLOCK_ENTRIES = 1 << 20

# More classes or relations than these, and than things that have one, are names and no numbers.
MAX_SPARSE_NUMBERS = 1 << 15


class DataWarning(UserWarning):
    """Legal data that is probably not what was meant."""


@contextmanager
def located(place: str | Path) -> Iterator[None]:
    """Puts the file in front of an InputError raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def plain(field: str, value: object) -> Tensor:
    """A tensor's numbers: dense, on the CPU, without a gradient; unsigned ones of 16 bits or more as int64.

    A NumPy array, a column of pandas and a list are taken as a tensor of their numbers.
    Raises InputError for what is no tensor of real numbers.
    """
    if not isinstance(value, Tensor):
        value = from_array(field, value)
    if value.is_meta:
        raise InputError(f"{field} is on the device meta, which holds no data: give a tensor on the CPU")
    if value.is_quantized or value.is_nested or value.dtype.is_complex:
        kind = "nested" if value.is_nested else value.dtype
        raise InputError(f"{field} is {kind}: give a tensor of real numbers, all rows of one length")
    if value.layout != torch.strided:
        what = f"{field} of shape {list(value.shape)}, dense,"
        require_memory(value.numel() * value.itemsize, what, "give fewer columns")
        value = value.to_dense()
    if value.requires_grad or value.device.type != "cpu":
        value = value.detach().cpu()
    return value if value.dtype not in UNSIGNED else signed(field, value)


def from_array(field: str, value: object) -> Tensor:
    """What numpy makes an array of, as a tensor that shares its memory where it can. InputError for no numbers."""
    kind = f"{field} is of type {type(value).__name__}"
    try:
        array = np.asarray(value.toarray() if hasattr(value, "toarray") else value)
    except (ValueError, TypeError) as error:
        raise InputError(f"{kind}, and no array of numbers ({cause(error)}): give rows of one length") from None
    if array.dtype.kind not in "biuf" or array.itemsize > 8:
        raise InputError(f"{kind}, and holds no real numbers of at most 64 bits: give a tensor, an array or a list")
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def signed(field: str, tensor: Tensor) -> Tensor:
    """Unsigned numbers as int64, since torch computes with few unsigned types; InputError where one is too large."""
    result = tensor.to(torch.int64)
    if (result < 0).any():
        place, value = first(result, result < 0)
        raise InputError(f"{field}{place} is {int(value) + (1 << 64)}: give numbers below 2**63")
    return result


def whole(field: str, value: object) -> Tensor:
    """The tensor as integers, as they are where they are integers already. InputError where one is no whole number."""
    tensor = plain(field, value)
    integral = not tensor.dtype.is_floating_point and tensor.dtype != torch.bool
    return tensor if integral else cast(field, tensor, torch.int64)


def vertex_ids(field: str, value: object) -> Tensor:
    """The tensor as int32 or int64, uncopied where it is one of these. InputError for what is no vector of integers."""
    ids = plain(field, value)
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise InputError(f"{field} is {ids.dtype}: vertex ids are integers, give int64")
    if ids.dim() != 1:
        raise InputError(f"{field} has shape {list(ids.shape)}: give one id for each edge")
    return ids if ids.dtype in (torch.int32, torch.int64) else ids.to(torch.int64)


def cast(field: str, value: object, dtype: torch.dtype) -> Tensor:
    """The tensor as `dtype`, `plain` and contiguous; raises InputError at the first value that would change.

    Numbers with a fraction are rounded to fewer bits, if they are not too large for them.
    """
    tensor = plain(field, value)
    if tensor.dtype == dtype:
        return tensor.contiguous()
    if tensor.itemsize == 1 and tensor.dtype.is_floating_point:
        tensor = tensor.to(torch.float32)  # torch compares no floats of 8 bits
    result = tensor.to(dtype).contiguous()
    if tensor.dtype.is_floating_point and dtype.is_floating_point:
        changed = tensor.isfinite() & ~result.isfinite()
    else:
        changed = (result.to(tensor.dtype) != tensor) & (tensor == tensor)
    if tensor.dtype.is_floating_point and not dtype.is_floating_point:
        changed |= tensor != tensor
    if changed.any():
        place, number = first(tensor, changed)
        problem = f"{field}{place} is {number}, which {dtype} cannot hold ({field} is {tensor.dtype})"
        raise InputError(f"{problem}: {remedy_for(field, dtype)}")
    return result


def label_dtype(y: Tensor) -> torch.dtype:
    """The type of labels: int64 where each vertex has one class, float32 for several or for values of a regression."""
    return torch.int64 if label_kind(y) == "classes" else torch.float32


def label_kind(y: Tensor) -> str:
    """What labels are: 'classes' [n], 'labels' [n, C] of 0 and 1, or 'values' [n] or [n, T] of a regression.

    Values are told by their fractions.
    """
    if y.is_floating_point() and has_fraction(y):
        return "values"
    return "classes" if y.dim() == 1 else "labels"


def has_fraction(tensor: Tensor) -> bool:
    """Whether some number is finite and not whole, looking at a few rows at a time."""
    if not tensor.dim():  # no rows, which the check of shapes says
        return False
    rows = max(1, BLOCK_ENTRIES // max(1, tensor[:1].numel()))
    for start in range(0, len(tensor), rows):
        block = tensor[start : start + rows].double()
        if (block.isfinite() & (block != block.round())).any():
            return True
    return False


def has_label(y: Tensor) -> Tensor:
    """The vertices that are labelled, by labels [n] or [n, C]: bool [n]."""
    kind = label_kind(y)
    if kind == "classes":
        return y >= 0
    if kind == "labels":
        return torch.ones(len(y), dtype=torch.bool)
    return ~(y.isnan() if y.dim() == 1 else y.isnan().any(1))


def no_label(y: Tensor) -> float:
    """What stands among labels of this kind for a vertex that has none."""
    return {"classes": -1, "labels": 0, "values": math.nan}[label_kind(y)]


def remedy_for(field: str, dtype: torch.dtype) -> str:
    """What helps where values of a field do not fit into its dtype."""
    if dtype == torch.bool:
        return f"mark the vertices by a bool each, {mask_of_ids(field)}"
    if field == "y" and not dtype.is_floating_point:
        return "give class numbers from 0 on"
    if dtype.is_floating_point:
        return "give numbers that it can hold"
    return "give whole numbers"


def mask_of_ids(field: str) -> str:
    """How to make a mask of ids, as part of a line."""
    return f"from ids by mask = torch.zeros(num_vertices, dtype=torch.bool); mask[{field}] = True"


def first(tensor: Tensor, wrong: Tensor) -> tuple[str, float | int | bool]:
    """Where and what the first flagged entry is: ("[3, 7]", nan)."""
    index = tuple(int(i) for i in wrong.nonzero()[0])
    return str(list(index)), tensor[index].item()


def check_finite(field: str, tensor: Tensor, remedy: str) -> None:
    """Raises InputError at the first NaN or infinity of a float tensor [n, ...], looking at a few rows at a time."""
    rows = max(1, BLOCK_ENTRIES // max(1, tensor[:1].numel()))
    for start in range(0, len(tensor), rows):
        block = tensor[start : start + rows]
        if not block.numel():
            continue
        low, high = torch.aminmax(block)  # one pass, and NaN wins; eight times as fast as asking each entry
        if not (torch.isfinite(low) and torch.isfinite(high)):
            index = (~torch.isfinite(block)).nonzero()[0]
            value = block[tuple(index)].item()
            index[0] += start
            raise InputError(f"{field}{index.tolist()} is {value}: {remedy}")


def check_length(field: str, tensor: Tensor, length: int, unit: str) -> None:
    """Raises InputError unless the tensor has one entry or row for each of `length` units."""
    if tensor.dim() == 0 or len(tensor) != length:
        how = f", {mask_of_ids(field)}" if field in MASKS else ""
        raise InputError(
            f"{field} has shape {list(tensor.shape)}, but the graph has {length} {unit}: give one entry for each{how}"
        )


def check_vector(field: str, tensor: Tensor, length: int, unit: str) -> None:
    """Raises InputError unless the tensor is a vector with one entry for each of `length` units."""
    check_length(field, tensor, length, unit)
    if tensor.dim() != 1:
        raise InputError(f"{field} has shape {list(tensor.shape)}: give one column of it, for example {field}[:, 0]")


def check_ids(field: str, ids: Tensor, num_vertices: int) -> None:
    """Raises InputError at the first id outside [0, num_vertices)."""
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < num_vertices):
        return
    place, value = first(ids, (ids < 0) | (ids >= num_vertices))
    known = f"the graph has {num_vertices} vertices, numbered from 0"
    remedy = "no id is negative" if value < 0 else "correct the id or raise num_vertices"
    raise InputError(f"{field}{place} is {value}: {known}; {remedy}")


def check_numbering(field: str, count: int, num_things: int, unit: str) -> None:
    """Raises InputError where numbers below `count` are names, not numbers from 0: work and memory grow with them."""
    if count > max(MAX_SPARSE_NUMBERS, num_things):
        raise InputError(
            f"{field} holds numbers up to {count - 1} in {num_things} {unit}: number them from 0 without gaps"
        )


def check_pointers(field: str, indptr: Tensor, num_entries: int, remedy: str) -> None:
    """Raises InputError unless row pointers ascend from 0 to the number of entries."""
    if not len(indptr) or int(indptr[0]) or int(indptr[-1]) != num_entries or (indptr[1:] < indptr[:-1]).any():
        raise InputError(f"{field} does not ascend from 0 to the {num_entries} entries: {remedy}")


def check_edge_features(tensor: Tensor, num_edges: int) -> None:
    """Raises InputError unless the tensor is [edges, features]."""
    check_length("edge_features", tensor, num_edges, "edges")
    if tensor.dim() != 2:
        raise InputError(f"edge_features has shape {list(tensor.shape)}: edge features are [edges, features]")
