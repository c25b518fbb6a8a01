"""Checks of single tensors, each mistake one line that says where and what helps. They know no graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from weft.core.errors import InputError

MASKS = ("train_mask", "val_mask", "test_mask")
LINKS = ("val_links", "test_links")

# Rows looked at together: a memory-mapped matrix is never copied, and its flags stay within the cache.
BLOCK_ENTRIES = 1 << 20


class DataWarning(UserWarning):
    """Legal data that is probably not what was meant."""


@contextmanager
def located(place: str | Path) -> Iterator[None]:
    """Puts the file in front of an InputError raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def cast(field: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as `dtype`, contiguous; raises InputError at the first value that would change."""
    if tensor.dtype == dtype:
        return tensor.contiguous()
    if tensor.dtype.is_complex:
        raise InputError(f"{field} is {tensor.dtype}, not {dtype}: give real numbers")
    result = tensor.to(dtype).contiguous()
    changed = (result.to(tensor.dtype) != tensor) & (tensor == tensor)
    if tensor.dtype.is_floating_point and not dtype.is_floating_point:
        changed |= tensor != tensor
    if changed.any():
        place, value = first(tensor, changed)
        raise InputError(
            f"{field}{place} is {value}, which {dtype} cannot hold ({field} is {tensor.dtype}): "
            f"round it yourself, with {field}.to({dtype})"
        )
    return result


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
        raise InputError(
            f"{field} has shape {list(tensor.shape)}, but the graph has {length} {unit}: give one entry for each"
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


def check_edge_features(tensor: Tensor, num_edges: int) -> None:
    """Raises InputError unless the tensor is [edges, features]."""
    check_length("edge_features", tensor, num_edges, "edges")
    if tensor.dim() != 2:
        raise InputError(f"edge_features has shape {list(tensor.shape)}: edge features are [edges, features]")
