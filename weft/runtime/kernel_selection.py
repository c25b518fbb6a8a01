"""Selection of an implementation for each kernel by the sizes of a call: the fastest one measured, or a default.

A run never changes its selection, since implementations round differently.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from weft.utils.errors import readable
from weft.utils.files import migrate
from weft.utils.files.file_reading import MAX_OPTIONS_BYTES, read_text

IMPLEMENTATIONS = {
    "map": ("torch", "mkl", "onednn"),
    "map_weights": ("mkl", "onednn", "onednn_transposed"),
    "sum": ("torch_sparse", "triton"),
}
"""Implementations by kind of kernel.

- map: linear transform of float32 rows on the CPU, with the gradient of the rows. By PyTorch, or by weft with MKL's
  matrix product or oneDNN's inner product.
- map_weights: gradient of the weights of weft's linear transform. By MKL's product with the narrower side first, or by
  oneDNN's convolution, direct or transposed.
- sum: sum over in-edges on a GPU, forward and backward. By cuSPARSE through PyTorch, or by weft's Triton kernels.
"""
SIZES = {"map": 4, "map_weights": 4, "sum": 1}
"""Number of sizes by kind of kernel. Linear transforms: threads, multiplications, columns in, columns out. Sums:
columns.
"""
REMEDY = "give the choices.json of a run, or a profile of weft probe"
"""Remedy in errors about a file that contains no kernel selection."""


@dataclass(frozen=True, kw_only=True)
class SizeClasses:
    """Implementation for each class of sizes."""

    floors: tuple[tuple[float, ...], ...]
    """Lower bounds of the classes of each size, ascending. Sizes below the first bound belong to the first class."""
    names: tuple[str, ...]
    """Implementation of each combination of classes; the class of the last size changes fastest."""

    def at(self, sizes: Sequence[float]) -> str:
        """Return the implementation for these sizes."""
        position = 0
        for floors, size in zip(self.floors, sizes, strict=True):
            position = position * len(floors) + max(bisect_right(floors, size) - 1, 0)
        return self.names[position]

    def renamed(self, old: str, new: str) -> SizeClasses:
        """Return a copy with one implementation replaced by another.

        Args:
            old: Implementation to replace.
            new: Implementation that replaces it.
        """
        return replace(self, names=tuple(new if name == old else name for name in self.names))

    def with_slice(self, floor: float, names: Sequence[str]) -> SizeClasses:
        """Return a copy with a class of the first size added, or its implementations replaced.

        Args:
            floor: Lower bound of the class.
            names: Implementation of each combination of classes of the other sizes.
        """
        each = len(self.names) // len(self.floors[0])
        slices = {low: self.names[position * each :][:each] for position, low in enumerate(self.floors[0])} | {
            floor: names
        }
        floors = tuple(sorted(slices))
        return SizeClasses(
            floors=(floors, *self.floors[1:]), names=tuple(name for low in floors for name in slices[low])
        )


@dataclass(frozen=True, kw_only=True)
class KernelSelection:
    """Implementation of each kind of kernel, by sizes."""

    origin: str
    """Source of the selection: `default`, or the probe and its date; and which implementations were replaced since."""
    kinds: Mapping[str, SizeClasses]
    """Implementations of each kind in IMPLEMENTATIONS."""

    def replaced(self, kind: str, old: str, new: str) -> KernelSelection:
        """Return a copy with one implementation of a kind replaced by another, if it is used.

        Args:
            kind: Kind of kernel.
            old: Implementation to replace.
            new: Implementation that replaces it.
        """
        if old not in self.kinds[kind].names:
            return self
        origin = f"{self.origin}; {new} for {old} ({kind})"
        return KernelSelection(origin=origin, kinds={**self.kinds, kind: self.kinds[kind].renamed(old, new)})

    def without_onednn(self, linear_by: str = "torch") -> KernelSelection:
        """Return a copy without oneDNN.

        `linear_by` computes linear transforms instead: `torch`, or `mkl` for weft's function.
        """
        selection = self.replaced("map", "onednn", linear_by).replaced("map_weights", "onednn", "mkl")
        return selection.replaced("map_weights", "onednn_transposed", "mkl")

    def record(self) -> dict[str, Any]:
        """Return the selection as values that JSON can represent."""
        return asdict(self)

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> Self:
        """Return the selection in a record.

        Raises:
            KeyError, TypeError, ValueError: The record contains no valid selection.
        """
        return cls(origin=str(values["origin"]), kinds={kind: _classes(kind, values["kinds"]) for kind in SIZES})

    def text(self) -> str:
        """Return the selection as JSON, which `read` accepts."""
        return json.dumps(migrate.versioned("choices", self.record())) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the selection in a file.

        Raises:
            InputError: The file contains no valid selection.
        """
        with readable(path, REMEDY):
            return cls.from_record(migrate.choices(json.loads(read_text(path, MAX_OPTIONS_BYTES)), path))


DEFAULT = KernelSelection(
    origin="default",
    kinds={
        "map": SizeClasses(floors=((1,), (0, 1 << 18), (0,), (0,)), names=("torch", "onednn")),
        "map_weights": SizeClasses(floors=((1, 2), (0, 1 << 22), (0, 16), (0, 16)), names=("mkl",) * 15 + ("onednn",)),
        "sum": SizeClasses(floors=((0,),), names=("triton",)),
    },
)
"""Selection without measurements, from experience with a few processors.

Below 2^18 multiplications, calling weft's function costs more than it saves. From 2^22, oneDNN is faster for the
gradient of weights, with several threads and at least 16 columns.
"""

_selection = DEFAULT
"""Kernel selection of this process."""


def select_kernels(selection: KernelSelection) -> None:
    """Set the kernel selection of this process."""
    global _selection
    _selection = selection


@contextmanager
def avoid_onednn() -> Iterator[None]:
    """Avoid oneDNN in the `with` block. It would compile and cache a kernel for each number of rows."""
    before = _selection
    select_kernels(before.without_onednn())
    try:
        yield
    finally:
        select_kernels(before)


def selected_kernel(kind: str, *sizes: float) -> str:
    """Return this process's implementation of a kernel.

    Args:
        kind: Kind of kernel.
        *sizes: Sizes of the call, see SIZES.
    """
    return _selection.kinds[kind].at(sizes)


def kernels_in_use(kind: str) -> set[str]:
    """Return all implementations of a kind that this process uses, whatever the sizes."""
    return set(_selection.kinds[kind].names)


def _classes(kind: str, values: Mapping[str, Any]) -> SizeClasses:
    floors = tuple(tuple(map(float, bounds)) for bounds in values[kind]["floors"])
    names = tuple(values[kind]["names"])
    if len(floors) != SIZES[kind] or len(names) != math.prod(map(len, floors)) or not names:
        raise ValueError(f"the number of implementations of {kind} does not match its size classes")
    if unknown := {*names} - {*IMPLEMENTATIONS[kind]}:
        raise ValueError(f"{', '.join(sorted(map(str, unknown)))} is not an implementation of {kind}")
    if not all(low < high for bounds in floors for low, high in pairwise(bounds)):
        raise ValueError(f"the size classes of {kind} do not ascend")
    return SizeClasses(floors=floors, names=names)
