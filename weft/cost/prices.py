"""What kernels and exchanges take on a machine, measured once: tables over sizes."""

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
    """Seconds for a unit of work, by sizes.

    Between those measured, the seconds of all units are linear in each size, and beyond them a unit takes as long as at
    the nearest one.
    """

    axes: tuple[tuple[float, ...], ...]
    """The sizes measured, ascending, of each axis."""
    seconds: tuple[float, ...]
    """Of a unit, the last axis fastest."""

    def at(self, sizes: Sequence[float], *, flat: Collection[int] = ()) -> float:
        """Seconds of a unit at some sizes, one for each axis; flat: the axes with which there are no more units."""
        corners = [
            self._between(axis, size, place in flat)
            for place, (axis, size) in enumerate(zip(self.axes, sizes, strict=True))
        ]
        total = 0.0
        for chosen in product(*corners):
            place, weight = 0, 1.0
            for axis, (index, share) in zip(self.axes, chosen, strict=True):
                place, weight = place * len(axis) + index, weight * share
            total += weight * self.seconds[place]
        return total

    def _between(self, axis: tuple[float, ...], size: float, flat: bool) -> tuple[tuple[int, float], ...]:
        """The two sizes on either side, and how much each counts."""
        after = bisect_right(axis, size)
        if after in (0, len(axis)):
            return ((min(after, len(axis) - 1), 1.0),)
        low, high = axis[after - 1], axis[after]
        share = (size - low) / (high - low)
        units = (1.0, 1.0) if flat else (low / size, high / size)
        return (after - 1, (1 - share) * units[0]), (after, share * units[1])


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Seconds of kernels on one rank, where so many of its host are at work."""

    ranks: int
    """At work while it was measured."""
    threads: int
    """Of each of them."""
    tables: Mapping[str, PriceTable]
    """By kernel."""
    call_seconds: float = 0.0
    """What a kernel's call costs beside its work, but of one that moves rows."""
    move_seconds: float = 0.0
    """What a pass, or rows by index, cost beside; 0: their tables have it."""
    attention_seconds: float = 0.0
    """What a call of attention costs more than another, by what is done with its heads before and after."""
    step_seconds: float = 0.0
    """What a training step costs beside its kernels; 0: its calls have it, as where they were measured."""
    link_seconds: float = 0.0
    """Of a byte between the host's memory and the device's; 0: they are the same, and kernels move it."""
    round_seconds: float = 0.0
    """What a round of chunks costs beside its kernels."""
    factor: float = 1.0
    """How many times that runs have taken, see Profile.learned."""

    def seconds(self, call: KernelCall) -> float:
        """Those of a kernel's calls."""
        if call.kernel == "round":
            return self.factor * call.number * self.round_seconds
        if call.kernel in COMPOSITE_KERNELS:
            return self.factor * call.number * self.call_seconds
        if call.kernel not in WORK:
            raise InputError(f"the probe has not measured {call.kernel}: {REMEDY}")
        units, sizes = WORK[call.kernel](*call.sizes)
        table = self.tables.get(table_of(call.kernel))
        if table is None or len(table.axes) != len(sizes):
            raise InputError(f"another version of weft's probe measured {call.kernel}, in another way: {REMEDY}")
        work = units * table.at(sizes, flat=RATE_AXES.get(table_of(call.kernel), ())) if units > 0 else 0.0
        beside = self.move_seconds if call.kernel in MOVE_KERNELS else self.call_seconds
        return self.factor * call.number * (beside + self.attention_seconds * is_attention(call) + work)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Seconds of collectives among so many ranks."""

    ranks: int
    hosts: int
    """On which they are, as many on each."""
    tables: Mapping[str, PriceTable]
    """all_to_all and all_reduce, by the bytes that a rank sends.

    all_to_all_beside, where it was measured: an all_to_all and, begun with it, work that takes as long as it does by
    itself, until both are done.
    """
    collective_seconds: float = 0.0
    """What a rank has to do for a collective in a step, beside its table."""
    message_seconds: float = 0.0
    """What a rank has to do for a message that leaves or comes by itself."""
    factor: float = 1.0
    """How many times what its tables say collectives have taken in runs, see Profile.learned."""

    def seconds(self, tag: str, num_bytes: int) -> float:
        """Those in which a collective crosses, where a rank sends, or receives, so many bytes at most."""
        table = self.tables["all_reduce" if tag in ALL_REDUCE_TAGS else "all_to_all"]
        return self.factor * max(num_bytes, 1) * table.at((max(num_bytes, 1),))

    def overlapped_share(self, tag: str, num_bytes: int) -> float:
        """The share of a crossing that goes on while its rank computes, of the shorter of the two.

        The rest waits until the rank leaves its core to the network, or takes the core from it. 1 where nothing was
        measured.
        """
        beside = self.tables.get("all_to_all_beside")
        if beside is None or tag in ALL_REDUCE_TAGS:
            return 1.0
        size = (min(num_bytes, beside.axes[0][-1]),)
        return min(max(2.0 - beside.at(size) / self.tables["all_to_all"].at(size), 0.0), 1.0)


def is_attention(call: KernelCall) -> bool:
    """Whether a call is one of attention, forward or backward."""
    return call.kernel.startswith("Attend")


ALL_REDUCE_TAGS = ("gradients", "statistics", "norm")
"""Tags of collectives that are sums over the ranks."""
MIN_COLUMNS = 2
"""Maps from or to fewer columns take as long."""
Sized = tuple[float, tuple[float, ...]]


def _linear(rows: int, columns: int, width: int) -> Sized:
    columns, width = max(columns, MIN_COLUMNS), max(width, MIN_COLUMNS)
    return 2.0 * rows * columns * width, (rows, columns, width)


def _sparse(nonzeros: int, rows: int, columns: int, width: int) -> Sized:
    return float(nonzeros * width), (columns, 1.0, nonzeros / max(rows, 1), width)


def _moved(num_bytes: int) -> Sized:
    return float(num_bytes), (num_bytes,)


def _gathered(rows: int, row_bytes: int) -> Sized:
    return float(rows * row_bytes), (rows * row_bytes, row_bytes)


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
    "gather": _gathered,
    "exponential": _moved,
    "dropout": _moved,
    "update": _moved,
    "loss": _loss,
    "draw": _draw,
    **dict.fromkeys(("Sum", "Max", "ByRelation"), _sum),
    **dict.fromkeys(("Sum_backward", "Max_backward", "ByRelation_backward"), _sum_backward),
    **dict.fromkeys(("Attend", "AttendEdges"), _attention),
    **dict.fromkeys(("Attend_backward", "AttendEdges_backward"), _attention_backward),
}
"""By kernel, the units of its work and where they stand in its table, from a call's sizes."""
ROW, FRESH, HEADS = 1, 1, 4
RATE_AXES = {
    "gather": (ROW,),
    **dict.fromkeys(("Sum", "Max", "Max_backward"), (FRESH,)),
    **{f"{name}{back}": (FRESH, HEADS) for name in ("Attend", "AttendEdges") for back in ("", "_backward")},
}
"""By table, the axes with which there are no more units: a row's bytes, the share of edges whose row comes from memory,
and heads."""
MOVE_KERNELS = ("pass", "gather")
"""Kernels that one operation of PyTorch is."""
COMPOSITE_KERNELS = ("WholeLayer", "WholeLayer_backward")
"""Kernels whose work a trace has as maps and passes."""
PRICED_AS = {
    "product": "linear",
    "Sum_backward": "Sum",
    "ByRelation": "Sum",
    "ByRelation_backward": "Sum",
    "sparse": "Sum",
    "sparse_backward": "Sum",
}
"""Kernels that are priced as another."""


def table_of(kernel: str) -> str:
    """The table by which a kernel is priced."""
    return PRICED_AS.get(kernel, kernel)
