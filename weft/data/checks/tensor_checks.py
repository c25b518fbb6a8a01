"""Checks of single tensors, independent of graphs. Each error is one line with the position and the remedy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.runtime.memory.limit import check_fits_memory
from weft.runtime.native import plain_tensor
from weft.storage.quantized_table import FeatureTable, QuantizedTable
from weft.utils.errors import InputError, cause, printable

Numbers: TypeAlias = "Tensor | NDArray[Any] | Sequence[Any]"
"""Types that are accepted as a tensor: a tensor, a NumPy array, a pandas column, or a list."""

MASKS = ("train_mask", "val_mask", "test_mask")
LINKS = ("val_links", "test_links")

FEATURE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types in which features are stored, besides `QuantizedTable`. Others are converted to the first one."""

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

SEVERAL_LABELS = (
    "labels of [vertices, classes] are 0 or 1: give class numbers as [vertices], or floats for a regression"
)
"""Remedy, as part of an error, for several labels per vertex that are not 0 or 1."""

MAX_DENSE_FLOAT = 1 << 24
"""Largest number up to which float32 holds every whole number."""

# Entries checked at once: a memory-mapped matrix is never copied as a whole, and the flags fit in the cache.
BLOCK_ENTRIES = 1 << 20

# If there are more classes or relations than this limit and than labelled vertices or edges, they are names.
MAX_SPARSE_NUMBERS = 1 << 15


class DataWarning(UserWarning):
    """Warning about legal data that is probably a mistake, in one line.

    Args:
        text: The message.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class Float32Rounding:
    """Counts large numbers, such as Unix times, that become equal when they are rounded to float32, by column."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, place: str, values: NDArray[Any], rounded: NDArray[np.float32]) -> None:
        """Count the distinct numbers above 2**24 of some rows that rounding makes equal to another one of these rows.

        Args:
            place: Name of the column or matrix.
            values: Numbers before, [n] or [n, K].
            rounded: The numbers as float32, of the same shape.
        """
        if values.itemsize < rounded.itemsize or values.dtype == rounded.dtype or not values.size:
            return
        if max(float(np.fmax.reduce(values, axis=None)), -float(np.fmin.reduce(values, axis=None))) <= MAX_DENSE_FLOAT:
            return
        for column in range(values.shape[1] if values.ndim == 2 else 1):
            before, after = (array if array.ndim == 1 else array[:, column] for array in (values, rounded))
            large = np.abs(after) > MAX_DENSE_FLOAT
            count = len(np.unique(before[large])) - len(np.unique(after[large]))
            name = f"{place}[:, {column}]" if values.ndim == 2 and values.shape[1] > 1 else place
            if count:
                self._counts[name] = self._counts.get(name, 0) + count

    def warn(self) -> None:
        """Warn (DataWarning) once for each column of which numbers became equal."""
        for place, count in self._counts.items():
            warnings.warn(
                f"{place}: {count} numbers above 2**24 become equal to others in float32: subtract an offset from the "
                "column or divide it, or leave it out if it contains ids",
                DataWarning,
                stacklevel=4,
            )


@contextmanager
def located(place: str | Path) -> Iterator[None]:
    """Prefix every InputError raised in the `with` block with a file or another place."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def dense_cpu_tensor(field: str, value: object) -> Tensor:
    """Return numbers as a dense CPU tensor without gradient; unsigned ones of 16 bits or more become int64.

    Args:
        field: Name of the numbers in errors.
        value: A tensor, a NumPy array, a pandas column or a list.

    Raises:
        InputError: If it is no tensor of real numbers.
    """
    value = plain_tensor(value) if isinstance(value, Tensor) else tensor_from_array(field, value)
    if type(value) is not Tensor:
        raise InputError(
            f"{field} is of type {type(value).__name__}, which has no memory of its own: give a torch.Tensor"
        )
    if value.is_meta:
        raise InputError(f"{field} is on the device meta, which holds no data: give a tensor on the CPU")
    if value.is_quantized or value.is_nested or value.dtype.is_complex:
        kind = "nested" if value.is_nested else value.dtype
        raise InputError(f"{field} is {kind}: give a tensor of real numbers, all rows of one length")
    if value.layout != torch.strided:
        what = f"{field} of shape {list(value.shape)}, dense,"
        check_fits_memory(value.numel() * value.itemsize, what, "give fewer columns")
        value = value.to_dense()
    if value.requires_grad or value.device.type != "cpu":
        value = value.detach().cpu()
    return value if value.dtype not in UNSIGNED else unsigned_to_int64(field, value)


def tensor_from_array(field: str, value: object) -> Tensor:
    """Return anything that NumPy can convert as a tensor, which shares memory if possible.

    Args:
        field: Name of the value in errors.
        value: An array, a column, a sparse matrix or a list.

    Raises:
        InputError: If it contains no real numbers, or a masked array has masked entries.
    """
    kind = f"{field} is of type {type(value).__name__}"
    if isinstance(value, np.ma.MaskedArray) and (masked := np.ma.getmaskarray(value)).any():
        place = [int(i) for i in np.argwhere(masked)[0]]
        count = f"{int(masked.sum())} of {masked.size} entries"
        raise InputError(f"{field}{place} is masked, as are {count}: replace them, {field}.filled(VALUE)")
    try:
        array = np.asarray(value.toarray() if hasattr(value, "toarray") else value)
    except (ValueError, TypeError) as error:
        raise InputError(f"{kind}, and no array of numbers ({cause(error)}): give rows of one length") from None
    if array.dtype.kind not in "biuf" or array.itemsize > 8:
        raise InputError(f"{kind}, and holds no real numbers of at most 64 bits: give a tensor, an array or a list")
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def unsigned_to_int64(field: str, tensor: Tensor) -> Tensor:
    """Return unsigned numbers as int64, because PyTorch computes with few unsigned types.

    Args:
        field: Name of the numbers in errors.
        tensor: Unsigned integers.

    Raises:
        InputError: If one is too large for int64.
    """
    result = tensor.to(torch.int64)
    if (result < 0).any():
        place, value = first_flagged(result, result < 0)
        raise InputError(f"{field}{place} is {int(value) + (1 << 64)}: give numbers below 2**63")
    return result


def as_integers(field: str, value: object) -> Tensor:
    """Return a value as a tensor of integers; integers keep their dtype.

    Args:
        field: Name of the value in errors.
        value: A tensor, an array or a list.

    Raises:
        InputError: If a number is not whole.
    """
    tensor = dense_cpu_tensor(field, value)
    integral = not tensor.dtype.is_floating_point and tensor.dtype != torch.bool
    return tensor if integral else cast(field, tensor, torch.int64)


def vertex_ids(field: str, value: object) -> Tensor:
    """Return a value as a tensor of int32 or int64 [E], without a copy if it is one.

    Args:
        field: Name of the value in errors.
        value: A tensor, an array or a list.

    Raises:
        InputError: If it is no vector of integers.
    """
    ids = dense_cpu_tensor(field, value)
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise InputError(f"{field} is {ids.dtype}: vertex ids are integers, give int64")
    if ids.dim() != 1:
        raise InputError(f"{field} has shape {list(ids.shape)}: give one id for each edge")
    return ids if ids.dtype in (torch.int32, torch.int64) else ids.to(torch.int64)


def as_features(field: str, value: object, rounding: Float32Rounding | None = None) -> FeatureTable:
    """Return features as a contiguous dense CPU tensor of one of FEATURE_DTYPES: their own, otherwise float32.

    A `QuantizedTable` is returned as it is.

    Args:
        field: Name of the features in errors.
        value: A tensor, an array or a list.
        rounding: As in `cast`.

    Raises:
        InputError: At the first value that float32 cannot hold.
    """
    if isinstance(value, QuantizedTable):
        return value
    tensor = dense_cpu_tensor(field, value)
    return tensor.contiguous() if tensor.dtype in FEATURE_DTYPES else cast(field, tensor, torch.float32, rounding)


def cast(field: str, value: object, dtype: torch.dtype, rounding: Float32Rounding | None = None) -> Tensor:
    """Return a value as a contiguous dense CPU tensor of a dtype.

    Floats are rounded to a narrower float type if they are within its range; a DataWarning names large numbers that
    become equal in float32.

    Args:
        field: Name of the value in errors.
        value: A tensor, an array or a list.
        dtype: Dtype of the result.
        rounding: Counts the numbers that become equal in float32, for the caller to warn; None: warn here.

    Raises:
        InputError: At the first value that would change.
    """
    tensor = dense_cpu_tensor(field, value)
    if tensor.dtype == dtype:
        return tensor.contiguous()
    if tensor.itemsize == 1 and tensor.dtype.is_floating_point:
        tensor = tensor.to(torch.float32)  # PyTorch cannot compare 8-bit floats
    result = tensor.to(dtype).contiguous()
    # A value changes if a finite float overflows, or if an integer or bool is another number after the way back.
    # NaN has no integer.
    if tensor.dtype.is_floating_point and dtype.is_floating_point:
        changed = tensor.isfinite() & ~result.isfinite()
    else:
        changed = (result.to(tensor.dtype) != tensor) & (tensor == tensor)
    if tensor.dtype.is_floating_point and not dtype.is_floating_point:
        changed |= tensor != tensor
    if changed.any():
        place, number = first_flagged(tensor, changed)
        problem = f"{field}{place} is {number}, which {dtype} cannot hold ({field} is {tensor.dtype})"
        raise InputError(f"{problem}: {remedy_for(field, dtype)}")
    if dtype == torch.float32 and tensor.dim() in (1, 2):
        counter = Float32Rounding() if rounding is None else rounding
        counter.add(field, tensor.numpy(), result.numpy())
        if rounding is None:
            counter.warn()
    return result


def as_labels(y: object) -> Tensor:
    """Return labels in the form of `GraphFields.y`; one column of integers becomes a vector of classes.

    Args:
        y: A tensor, an array or a list, [n] or [n, C].

    Raises:
        InputError: At the first integer of [n, C] that is not 0 or 1, and at the first value that would change.
    """
    labels = dense_cpu_tensor("y", y)
    if labels.dim() == 2 and not labels.is_floating_point():
        labels = labels[:, 0] if labels.shape[1] == 1 else labels
        wrong = (labels != 0) & (labels != 1)
        if labels.dim() == 2 and wrong.any():
            place, value = first_flagged(labels, wrong)
            raise InputError(f"y{place} is {value}: {SEVERAL_LABELS}")
    return cast("y", labels, label_dtype(labels))


def user_labels(y: object) -> Tensor | None:
    """Return labels from a user in the form of `GraphFields.y`, with a warning if their kind is a guess; None for None.

    Args:
        y: A tensor, an array, a list, or None.
    """
    warn_whole_values(y)
    return None if y is None else as_labels(y)


def label_dtype(y: Tensor) -> torch.dtype:
    """Return the dtype of labels: int64 for one class per vertex, float32 for several labels or values."""
    return torch.int64 if label_kind(y) == "classes" else torch.float32


def label_kind(y: Tensor) -> str:
    """Return the kind of labels: 'classes' [n], 'labels' [n, C] of 0 and 1, or 'values' [n] or [n, T] of a regression.

    Integers are classes or labels. Floats are values, except for [n, C] that contain 0 and 1 only.
    """
    if y.is_floating_point() and (y.dim() == 1 or any_finite(y, lambda block: (block != 0) & (block != 1))):
        return "values"
    return "classes" if y.dim() == 1 else "labels"


def any_finite(tensor: Tensor, condition: Callable[[Tensor], Tensor]) -> bool:
    """Return whether any finite number fulfils a condition. Reads a few rows at a time.

    Args:
        tensor: Numbers [n, ...].
        condition: Function from some rows, as float64, to flags of the same shape.
    """
    if not tensor.dim():  # a single number; the check of shapes reports it
        return False
    rows = max(1, BLOCK_ENTRIES // max(1, tensor[:1].numel()))
    for start in range(0, len(tensor), rows):
        block = tensor[start : start + rows].double()
        if (block.isfinite() & condition(block)).any():
            return True
    return False


def warn_whole_values(y: object) -> None:
    """Warn (DataWarning) if labels are floats, and therefore values of a regression, although all numbers are whole.

    Args:
        y: Labels from a user: a tensor, an array, a list, or None.
    """
    labels = None if y is None else dense_cpu_tensor("y", y)
    if labels is None or not labels.is_floating_point() or label_kind(labels) != "values":
        return
    count = int(labels.double().isfinite().sum())
    if count and not any_finite(labels, lambda block: block != block.round()):
        warnings.warn(
            f"y contains {count} whole numbers, but as {labels.dtype}, so they are values of a regression: for "
            "classes, give integers in one column, with -1 for no label",
            DataWarning,
            stacklevel=3,
        )


def has_label(y: Tensor) -> Tensor:
    """Return the labelled vertices, bool [n], for labels [n] or [n, C]."""
    kind = label_kind(y)
    if kind == "classes":
        return y >= 0
    if kind == "labels":
        return torch.ones(len(y), dtype=torch.bool)
    return ~(y.isnan() if y.dim() == 1 else y.isnan().any(1))


def no_label(y: Tensor) -> float:
    """Return the value that marks an unlabelled vertex among labels of this kind."""
    return {"classes": -1, "labels": 0, "values": math.nan}[label_kind(y)]


def remedy_for(field: str, dtype: torch.dtype) -> str:
    """Return the remedy, as part of an error, if values of a field do not fit into its dtype.

    Args:
        field: Name of the field.
        dtype: Dtype that the field must have.
    """
    if dtype == torch.bool:
        return f"mark the vertices by a bool each, {mask_of_ids(field)}"
    if field == "y" and not dtype.is_floating_point:
        return "give class numbers from 0 on"
    if dtype.is_floating_point:
        return "give numbers that it can hold, for example less an offset"
    return "give whole numbers"


def mask_of_ids(field: str) -> str:
    """Return code that makes a mask from ids, as part of an error."""
    return f"from ids by mask = torch.zeros(num_vertices, dtype=torch.bool); mask[{field}] = True"


def first_flagged(tensor: Tensor, wrong: Tensor) -> tuple[str, float | int | bool]:
    """Return position and value of the first flagged entry, such as ("[3, 7]", nan).

    Args:
        tensor: Any tensor.
        wrong: Flags of its shape.
    """
    index = tuple(int(i) for i in wrong.nonzero()[0])
    return str(list(index)), tensor[index].item()


def check_finite(field: str, tensor: FeatureTable, remedy: str) -> None:
    """Check that all numbers are finite. Reads a few rows at a time; those of a `QuantizedTable` always are.

    Args:
        field: Name of the tensor in errors.
        tensor: Floats [n, ...].
        remedy: Remedy to print in the error.

    Raises:
        InputError: At the first NaN or infinity.
    """
    if isinstance(tensor, QuantizedTable):
        return
    rows = max(1, BLOCK_ENTRIES // max(1, tensor[:1].numel()))
    for start in range(0, len(tensor), rows):
        block = tensor[start : start + rows]
        if not block.numel():
            continue
        low, high = torch.aminmax(block)  # NaN propagates; eight times as fast as isfinite of each entry
        if not (torch.isfinite(low) and torch.isfinite(high)):
            index = (~torch.isfinite(block)).nonzero()[0]
            value = block[tuple(index)].item()
            index[0] += start
            raise InputError(f"{field}{index.tolist()} is {value}: {remedy}")


def check_length(field: str, tensor: FeatureTable, length: int, unit: str) -> None:
    """Check that a tensor has one entry or row for each vertex or edge.

    Args:
        field: Name of the tensor in errors.
        tensor: Any tensor, or a table of features.
        length: Number of rows that it must have.
        unit: What is counted, such as 'vertices'.

    Raises:
        InputError: If it has another number.
    """
    if tensor.dim() == 0 or len(tensor) != length:
        hint = f", {mask_of_ids(field)}" if field in MASKS else ""
        raise InputError(
            f"{field} has shape {list(tensor.shape)}, but the graph has {length} {unit}: give one entry for each{hint}"
        )


def check_vector(field: str, tensor: Tensor, length: int, unit: str) -> None:
    """Check that a tensor is a vector with one entry for each vertex or edge.

    Args:
        field: Name of the tensor in errors.
        tensor: Any tensor.
        length: Number of entries that it must have.
        unit: What is counted, such as 'vertices'.

    Raises:
        InputError: If it is not.
    """
    check_length(field, tensor, length, unit)
    if tensor.dim() != 1:
        raise InputError(f"{field} has shape {list(tensor.shape)}: give one column of it, for example {field}[:, 0]")


def check_ids(field: str, ids: Tensor, num_vertices: int) -> None:
    """Check that ids are within [0, num_vertices).

    Args:
        field: Name of the ids in errors.
        ids: Integers [n].
        num_vertices: Number of vertices.

    Raises:
        InputError: At the first id out of range.
    """
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < num_vertices):
        return
    place, value = first_flagged(ids, (ids < 0) | (ids >= num_vertices))
    if value < 0:
        raise InputError(f"{field}{place} is {value}: vertices are numbered from 0, so no id is negative")
    limits = f"the graph has {num_vertices} vertices, numbered from 0"
    raise InputError(f"{field}{place} is {value}: {limits}; correct the id or raise num_vertices")


def check_numbering(field: str, count: int, num_things: int, unit: str) -> None:
    """Check that classes or relations are numbered from 0 without large gaps; work and memory grow with the largest.

    Args:
        field: Name of the numbers in errors.
        count: One more than the largest number.
        num_things: Number of vertices or edges that have such a number.
        unit: What is counted, such as 'vertices'.

    Raises:
        InputError: If the numbers are far too sparse.
    """
    if count > max(MAX_SPARSE_NUMBERS, num_things):
        raise InputError(
            f"{field} holds numbers up to {count - 1} in {num_things} {unit}: number them from 0 without gaps"
        )


def check_pointers(field: str, indptr: Tensor, num_entries: int, remedy: str) -> None:
    """Check that row pointers ascend from 0 to the number of entries.

    Args:
        field: Name of the pointers in errors.
        indptr: int64 [n + 1].
        num_entries: Number of entries.
        remedy: Remedy to print in the error.

    Raises:
        InputError: If they do not.
    """
    if not len(indptr) or int(indptr[0]) or int(indptr[-1]) != num_entries or (indptr[1:] < indptr[:-1]).any():
        raise InputError(f"{field} does not ascend from 0 to the {num_entries} entries: {remedy}")


def check_edge_features(tensor: Tensor, num_edges: int) -> None:
    """Check that edge features are [edges, features].

    Args:
        tensor: The edge features.
        num_edges: Number of edges.

    Raises:
        InputError: If they are not.
    """
    check_length("edge_features", tensor, num_edges, "edges")
    if tensor.dim() != 2:
        raise InputError(f"edge_features has shape {list(tensor.shape)}: edge features are [edges, features]")
