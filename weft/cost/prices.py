"""Seconds of kernels and exchanges on a machine, measured once: tables over sizes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from weft.runtime.kernel_call import KernelCall
from weft.utils.errors import InputError

REMEDY = "measure the machine again with: weft probe"


@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """Seconds per unit of work, by sizes.

    Between two measured sizes, the total seconds are interpolated linearly in each size. Outside of the measured range,
    the seconds per unit are those of the nearest measured size.
    """

    axes: tuple[tuple[float, ...], ...]
    """Measured sizes of each axis, ascending."""
    seconds: tuple[float, ...]
    """Seconds per unit at each combination of sizes; the last axis changes fastest."""

    def at(self, sizes: Sequence[float], *, flat: Collection[int] = ()) -> float:
        """Return the seconds per unit at some sizes.

        Args:
            sizes: One size for each axis.
            flat: Axes along which the number of units does not grow, so that the seconds per unit are interpolated.
        """
        corners = [
            self._between(axis, size, number in flat)
            for number, (axis, size) in enumerate(zip(self.axes, sizes, strict=True))
        ]
        # Multilinear interpolation: add the price at each corner of the cell, weighted by the product of its shares.
        total = 0.0
        for corner in product(*corners):
            index, weight = 0, 1.0
            for axis, (axis_index, share) in zip(self.axes, corner, strict=True):
                index, weight = index * len(axis) + axis_index, weight * share
            total += weight * self.seconds[index]
        return total

    def _between(self, axis: tuple[float, ...], size: float, flat: bool) -> tuple[tuple[int, float], ...]:
        """Return the indices of the two sizes next to `size` on an axis, and the weight of each."""
        upper = bisect_right(axis, size)
        if upper in (0, len(axis)):
            return ((min(upper, len(axis) - 1), 1.0),)
        low, high = axis[upper - 1], axis[upper]
        share = (size - low) / (high - low)
        # The total at an end of the cell is price x size, so its price per unit is weighted by size of the end / size.
        units = (1.0, 1.0) if flat else (low / size, high / size)
        return (upper - 1, (1 - share) * units[0]), (upper, share * units[1])


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Seconds of kernels on one rank."""

    ranks: int
    """Number of ranks of the host that ran concurrently during the measurement."""
    threads: int
    """Number of threads of each rank."""
    tables: Mapping[str, PriceTable]
    """Seconds per unit of work, by table; `table_of` has the table of each kernel."""
    call_seconds: float = 0.0
    """Fixed seconds of a kernel call, for kernels that do more than move rows."""
    move_seconds: float = 0.0
    """Fixed seconds of a kernel call that only moves rows; 0 if the tables include them."""
    attention_seconds: float = 0.0
    """Extra fixed seconds of an attention call, for reshaping heads before and after the kernel."""
    step_seconds: float = 0.0
    """Fixed seconds of a training step outside of its kernels; 0 if kernel calls include them."""
    link_seconds: float = 0.0
    """Seconds per byte between the memories of host and device.

    0 if both are the same memory, so that kernels move the bytes.
    """
    round_seconds: float = 0.0
    """Fixed seconds of a round of chunks outside of its kernels."""
    factor: float = 1.0
    """Ratio of measured to estimated seconds in earlier runs; see `Profile.factor`."""

    def seconds(self, call: KernelCall) -> float:
        """Return the seconds of the calls of a kernel.

        Raises:
            InputError: The probe did not measure the kernel, or an older version did, with other sizes.
        """
        if call.kernel == "round":
            return self.factor * call.number * self.round_seconds
        if call.kernel in COMPOSITE_KERNELS:
            return self.factor * call.number * self.call_seconds
        if call.kernel not in WORK:
            raise InputError(f"the probe has not measured {call.kernel}: {REMEDY}")
        units, sizes = WORK[call.kernel](*call.sizes)
        table = self.tables.get(table_of(call.kernel))
        if table is None or len(table.axes) != len(sizes):
            raise InputError(f"the profile has {call.kernel} from another version of weft's probe: {REMEDY}")
        work = units * table.at(sizes, flat=RATE_AXES.get(table_of(call.kernel), ())) if units > 0 else 0.0
        fixed = self.move_seconds if call.kernel in MOVE_KERNELS else self.call_seconds
        return self.factor * call.number * (fixed + self.attention_seconds * is_attention(call) + work)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Seconds of collectives among ranks."""

    ranks: int
    """Number of ranks."""
    hosts: int
    """Number of hosts, with the same number of ranks on each."""
    tables: Mapping[str, PriceTable]
    """Seconds per byte of all_to_all and all_reduce, by the bytes that a rank sends.

    The optional table all_to_all_beside has the seconds of an all_to_all and of computation that was started with it
    and takes as long as the all_to_all alone, until both are done.
    """
    collective_seconds: float = 0.0
    """Seconds that a rank computes for each collective of a step, in addition to the table."""
    message_seconds: float = 0.0
    """Seconds that a rank computes for each point-to-point message, sent or received."""
    factor: float = 1.0
    """Ratio of measured to estimated seconds of collectives in earlier runs; see `Profile.factor`."""

    def seconds(self, tag: str, num_bytes: int) -> float:
        """Return the seconds of one collective.

        Args:
            tag: Tag of the operation; it decides between all_reduce and all_to_all.
            num_bytes: Bytes that a rank sends or receives, whichever is more.
        """
        table = self.tables["all_reduce" if tag in ALL_REDUCE_TAGS else "all_to_all"]
        return self.factor * max(num_bytes, 1) * table.at((max(num_bytes, 1),))

    def overlapped_share(self, tag: str, num_bytes: int) -> float:
        """Return the share of the shorter of exchange and computation that overlaps with the other.

        1 if nothing was measured. The rest cannot overlap, because the network needs the rank's core.

        Args:
            tag: Tag of the operation.
            num_bytes: Bytes that a rank sends or receives, whichever is more.
        """
        overlapped = self.tables.get("all_to_all_beside")
        if overlapped is None or tag in ALL_REDUCE_TAGS:
            return 1.0
        size = (min(num_bytes, overlapped.axes[0][-1]),)
        return min(max(2.0 - overlapped.at(size) / self.tables["all_to_all"].at(size), 0.0), 1.0)


def is_attention(call: KernelCall) -> bool:
    """Return whether a call is an attention kernel, forward or backward."""
    return call.kernel.startswith("Attend")


ALL_REDUCE_TAGS = ("gradients", "statistics", "norm")
"""Tags of the collectives that sum over the ranks."""
MIN_COLUMNS = 2
"""Dense layers from or to fewer columns take as long as those with this many."""
Sized = tuple[float, tuple[float, ...]]
"""Units of work of a kernel call, and the sizes at which its table is read."""


def _linear(rows: int, columns: int, width: int) -> Sized:
    columns, width = max(columns, MIN_COLUMNS), max(width, MIN_COLUMNS)
    return 2.0 * rows * columns * width, (rows, columns, width)


def _sparse(nonzeros: int, rows: int, columns: int, width: int) -> Sized:
    return float(nonzeros * width), (columns, 1.0, nonzeros / max(rows, 1), width)


def _moved(num_bytes: int) -> Sized:
    return float(num_bytes), (num_bytes,)


def _gathered(rows: int, row_bytes: int) -> Sized:
    return float(rows * row_bytes), (rows * row_bytes, row_bytes)


def _tiles(num_bytes: int, source_bytes: int, sources: int) -> Sized:
    return float(num_bytes), (sources, num_bytes / max(source_bytes, 1))


def _loss(rows: int, classes: int) -> Sized:
    return float(rows * classes), (rows, classes)


def _draw(edges: int, targets: int) -> Sized:
    return float(edges + targets), (targets, edges / max(targets, 1))


def _sum(edges: int, targets: int, sources: int, fresh: int, width: int, _: int) -> Sized:
    return float(edges * width), (sources, fresh / max(edges, 1), edges / max(targets, 1), width)


def _sum_backward(edges: int, targets: int, sources: int, fresh: int, width: int, _: int) -> Sized:
    return _sum(edges, sources, targets, fresh, width, 0)  # over the transposed edges


def _attention(edges: int, targets: int, sources: int, fresh: int, width: int, heads: int) -> Sized:
    return float(edges * width), (*_sum(edges, targets, sources, fresh, width, 0)[1], max(heads, 1))


def _attention_backward(edges: int, targets: int, sources: int, fresh: int, width: int, heads: int) -> Sized:
    return _attention(edges, (targets + sources) // 2, sources, fresh, width, heads)  # over the edges both ways


WORK: Mapping[str, Callable[..., Sized]] = {
    "linear": _linear,
    "linear_weights": _linear,
    "sparse": _sparse,
    "sparse_backward": _sparse,
    "product": lambda flops: (float(flops), (1 << 16, 64, 64)),
    "pass": _moved,
    "tiles": _tiles,
    "gather": _gathered,
    "exponential": _moved,
    "dropout": _moved,
    "update": _moved,
    "loss": _loss,
    "draw": _draw,
    **dict.fromkeys(("Sum", "LaplacianSum", "Max", "ByRelation"), _sum),
    **dict.fromkeys(("Sum_backward", "LaplacianSum_backward", "Max_backward", "ByRelation_backward"), _sum_backward),
    **dict.fromkeys(("Attend", "AttendEdges"), _attention),
    **dict.fromkeys(("Attend_backward", "AttendEdges_backward"), _attention_backward),
}
"""Function from a call's sizes to its units of work and its coordinates in the kernel's table, by kernel."""
ROW, FRESH, HEADS = 1, 1, 4
RATE_AXES = {
    "gather": (ROW,),
    **dict.fromkeys(("Sum", "Max", "Max_backward"), (FRESH,)),
    **{f"{name}{back}": (FRESH, HEADS) for name in ("Attend", "AttendEdges") for back in ("", "_backward")},
}
"""Axes of a table along which the number of units does not grow, by table.

These are the bytes of a row, the share of edges whose row comes from memory, and the number of heads.
"""
MOVE_KERNELS = ("pass", "gather")
"""Kernels that only move rows, each a single operation of PyTorch."""
COMPOSITE_KERNELS = ("WholeLayer", "WholeLayer_backward")
"""Calls whose work the trace already counts as dense layers and passes; they cost only the call."""
PRICED_AS = {
    "product": "linear",
    "Sum_backward": "Sum",
    "LaplacianSum": "Sum",
    "LaplacianSum_backward": "Sum",
    "ByRelation": "Sum",
    "ByRelation_backward": "Sum",
    "sparse": "Sum",
    "sparse_backward": "Sum",
}
"""For each kernel that was not measured itself, the kernel whose price table is used instead."""


def table_of(kernel: str) -> str:
    """Return the name of the table that prices a kernel."""
    return PRICED_AS.get(kernel, kernel)
