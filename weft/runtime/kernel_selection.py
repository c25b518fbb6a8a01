"""Which of several implementations serves a kernel, by class of sizes: as measured on a machine, or the default.

A run keeps the ones that it has, since other implementations round in other ways.
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

from weft.utils import migrate
from weft.utils.errors import readable

IMPLEMENTATIONS = {
    "map": ("torch", "mkl", "onednn"),
    "map_weights": ("mkl", "onednn", "onednn_transposed"),
    "sum": ("torch_sparse", "triton"),
}
"""By kind, those that there may be.

map: of rows of float32 on the CPU, with the rows' gradient: PyTorch's own as a whole, or a function of ours by MKL's
product or oneDNN's inner one. map_weights: the gradient of its weights in that function, by MKL's product, the narrower
side first, or as oneDNN's convolution has it, or the transposed one. sum: over in-edges on a GPU, both ways, by
cuSPARSE or our kernels.
"""
SIZES = {"map": 4, "map_weights": 4, "sum": 1}
"""By kind, of how many sizes: threads, multiplications, columns in and out; of a sum, columns."""
REMEDY = "give a run's choices.json, or a profile of weft probe"


@dataclass(frozen=True, kw_only=True)
class SizeClasses:
    """Implementations by class of sizes."""

    floors: tuple[tuple[float, ...], ...]
    """By size, ascending: where its classes begin; one below the first belongs to that."""
    names: tuple[str, ...]
    """Of each class, the last size fastest."""

    def at(self, sizes: Sequence[float]) -> str:
        """That of some sizes."""
        place = 0
        for floors, size in zip(self.floors, sizes, strict=True):
            place = place * len(floors) + max(bisect_right(floors, size) - 1, 0)
        return self.names[place]

    def renamed(self, old: str, new: str) -> SizeClasses:
        """The same with one implementation in another's place."""
        return replace(self, names=tuple(new if name == old else name for name in self.names))

    def with_slice(self, floor: float, names: Sequence[str]) -> SizeClasses:
        """The same with what was measured at one more class of the first size, or anew."""
        each = len(self.names) // len(self.floors[0])
        slices = {one: self.names[place * each :][:each] for place, one in enumerate(self.floors[0])} | {floor: names}
        floors = tuple(sorted(slices))
        return SizeClasses(floors=(floors, *self.floors[1:]), names=tuple(name for one in floors for name in slices[one]))


@dataclass(frozen=True, kw_only=True)
class KernelSelection:
    """What serves each kind of kernel."""

    origin: str
    """Who says so: `default`, or the probe and its day; and what has replaced what."""
    kinds: Mapping[str, SizeClasses]
    """By kind of IMPLEMENTATIONS, all of them."""

    def replaced(self, kind: str, old: str, new: str) -> KernelSelection:
        """The same with one implementation of a kind in another's place, if it is one of these."""
        if old not in self.kinds[kind].names:
            return self
        origin = f"{self.origin}; {new} for {old} ({kind})"
        return KernelSelection(origin=origin, kinds={**self.kinds, kind: self.kinds[kind].renamed(old, new)})

    def without_onednn(self, maps_by: str = "torch") -> KernelSelection:
        """The same where PyTorch's product stands for oneDNN; maps_by: `torch`, or `mkl` for a function of ours."""
        found = self.replaced("map", "onednn", maps_by).replaced("map_weights", "onednn", "mkl")
        return found.replaced("map_weights", "onednn_transposed", "mkl")

    def record(self) -> dict[str, Any]:
        """In values that JSON knows."""
        return asdict(self)

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> Self:
        """Those of a record. KeyError, TypeError or ValueError for what is none."""
        return cls(origin=str(values["origin"]), kinds={kind: _classes(kind, values["kinds"]) for kind in SIZES})

    def text(self) -> str:
        """What `read` takes, as JSON."""
        return json.dumps(migrate.versioned("choices", self.record())) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Those in a file; InputError if it holds none."""
        with readable(path, REMEDY):
            return cls.from_record(migrate.choices(json.loads(path.read_text()), path))


DEFAULT = KernelSelection(
    origin="default",
    kinds={
        "map": SizeClasses(floors=((1,), (0, 1 << 18), (0,), (0,)), names=("torch", "onednn")),
        "map_weights": SizeClasses(floors=((1, 2), (0, 1 << 22), (0, 16), (0, 16)), names=("mkl",) * 15 + ("onednn",)),
        "sum": SizeClasses(floors=((0,),), names=("triton",)),
    },
)
"""Where nothing was measured, as it was good on a few processors.

Below 2^18 multiplications the call of a function costs more than it saves; from 2^22 oneDNN pays for the gradient of
weights, on several threads and from 16 columns.
"""


_used = DEFAULT


def select_kernels(choices: KernelSelection) -> None:
    """Has this process's kernels served so."""
    global _used
    _used = choices


@contextmanager
def avoid_onednn() -> Iterator[None]:
    """Leaves oneDNN out where calls differ in their numbers of rows: it compiles a kernel for each, and keeps it."""
    before = _used
    select_kernels(before.without_onednn())
    try:
        yield
    finally:
        select_kernels(before)


def selected_kernel(kind: str, *sizes: float) -> str:
    """The implementation that serves a kernel of some sizes in this process, see SIZES."""
    return _used.kinds[kind].at(sizes)


def kernels_in_use(kind: str) -> set[str]:
    """The implementations that serve a kernel of any size in this process."""
    return set(_used.kinds[kind].names)


def _classes(kind: str, values: Mapping[str, Any]) -> SizeClasses:
    floors = tuple(tuple(map(float, one)) for one in values[kind]["floors"])
    names = tuple(values[kind]["names"])
    if len(floors) != SIZES[kind] or len(names) != math.prod(map(len, floors)) or not names:
        raise ValueError(f"classes of {kind} that do not have a name each")
    if unknown := {*names} - {*IMPLEMENTATIONS[kind]}:
        raise ValueError(f"{', '.join(sorted(map(str, unknown)))} is no implementation of {kind}")
    if not all(low < high for one in floors for low, high in pairwise(one)):
        raise ValueError(f"classes of {kind} that do not ascend")
    return SizeClasses(floors=floors, names=names)
