"""What kernels and exchanges take on a machine, measured once: tables over sizes, and one file for all of them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self

from weft.core.errors import InputError, readable
from weft.core.kernel_call import KernelCall

REMEDY = "measure the machine again with: weft probe"
KINDS = ("compute", "network")
"""Of seconds that runs tell apart, whatever their strategy."""
NEWEST, LEAST_RUNS, BOUND = 32, 3, 2.0
"""Runs that count, how many it takes before they do, and the most that they make of a price, or of its inverse."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Seconds for a unit of work, by sizes; between those measured, a power law, and beyond them, what is nearest."""

    axes: tuple[tuple[float, ...], ...]
    """The sizes measured, ascending, of each axis."""
    seconds: tuple[float, ...]
    """Of a unit, the last axis fastest."""

    def at(self, sizes: Sequence[float]) -> float:
        """Seconds of a unit at some sizes, one for each axis."""
        corners = [self._between(axis, size) for axis, size in zip(self.axes, sizes, strict=True)]
        total = 0.0
        for chosen in product(*corners):
            place, weight = 0, 1.0
            for axis, (index, share) in zip(self.axes, chosen, strict=True):
                place, weight = place * len(axis) + index, weight * share
            if weight:
                total += weight * self._logarithms[place]
        return math.exp(total)

    @cached_property
    def _logarithms(self) -> list[float]:
        return [math.log(one) for one in self.seconds]

    def _between(self, axis: tuple[float, ...], size: float) -> tuple[tuple[int, float], tuple[int, float]]:
        """The two sizes on either side, and how much each counts."""
        after = bisect_right(axis, size)
        if after in (0, len(axis)):
            nearest = min(after, len(axis) - 1)
            return (nearest, 1.0), (nearest, 0.0)
        low, high = axis[after - 1], axis[after]
        share = math.log(size / low) / math.log(high / low)
        return (after - 1, 1 - share), (after, share)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Seconds of kernels on one rank, where so many of its host are at work."""

    ranks: int
    """At work while it was measured."""
    threads: int
    """Of each of them."""
    tables: Mapping[str, Table]
    """By kernel."""
    call_seconds: float = 0.0
    """What a kernel's call costs beside its work."""
    step_seconds: float = 0.0
    """What a training step costs beside its kernels."""
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
        if call.kernel in MAPPED:
            return self.factor * call.number * self.call_seconds
        if call.kernel not in WORK:
            raise InputError(f"the probe has not measured {call.kernel}: {REMEDY}")
        units, sizes = WORK[call.kernel](*call.sizes)
        work = units * self.tables[table_of(call.kernel)].at(sizes) if units > 0 else 0.0
        return self.factor * call.number * (self.call_seconds + work)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Seconds of collectives among so many ranks."""

    ranks: int
    hosts: int
    """On which they are, as many on each."""
    tables: Mapping[str, Table]
    """all_to_all and all_reduce, by the bytes that a rank sends."""
    collective_seconds: float = 0.0
    """What a collective costs in a step beside its table, where ranks come to it from other work."""
    step_seconds: float = 0.0
    """What a step of several ranks costs beside its kernels and collectives."""
    factor: float = 1.0
    """How many times what its tables say collectives have taken in runs, see Profile.learned."""

    def seconds(self, tag: str, num_bytes: int) -> float:
        """Those of a collective in which a rank sends, or receives, so many bytes at most."""
        table = self.tables["all_reduce" if tag in SUMMED else "all_to_all"]
        return self.factor * (self.collective_seconds + max(num_bytes, 1) * table.at((max(num_bytes, 1),)))


SUMMED = ("gradients", "statistics", "norm")
"""Tags of collectives that are sums over the ranks."""
NARROW = 2
"""Maps from or to fewer columns take as long."""
Sized = tuple[float, tuple[float, ...]]


def _linear(rows: int, columns: int, width: int) -> Sized:
    columns, width = max(columns, NARROW), max(width, NARROW)
    return 2.0 * rows * columns * width, (rows, columns, width)


def _sparse(nonzeros: int, rows: int, columns: int, width: int) -> Sized:
    return float(nonzeros * width), (columns, 1.0, nonzeros / max(rows, 1), width)


def _moved(num_bytes: int) -> Sized:
    return float(num_bytes), (num_bytes,)


def _loss(rows: int, classes: int) -> Sized:
    return float(rows * classes), (rows, classes)


def _sum(edges: int, targets: int, sources: int, fresh: int, width: int, _: int) -> Sized:
    return float(edges * width), (sources, fresh / max(edges, 1), edges / max(targets, 1), width)


def _attention(edges: int, targets: int, sources: int, fresh: int, width: int, heads: int) -> Sized:
    return float(edges * width), (*_sum(edges, targets, sources, fresh, width, 0)[1], max(heads, 1))


WORK: Mapping[str, Callable[..., Sized]] = {
    "linear": _linear,
    "linear_weights": _linear,
    "sparse": _sparse,
    "sparse_backward": _sparse,
    "product": lambda flops: (float(flops), (1 << 16, 64, 64)),
    "pass": _moved,
    "exponential": _moved,
    "dropout": _moved,
    "update": _moved,
    "loss": _loss,
    **{f"{name}{back}": _sum for name in ("Sum", "Max", "ByRelation") for back in ("", "_backward")},
    **{f"{name}{back}": _attention for name in ("Attend", "AttendEdges") for back in ("", "_backward")},
}
"""By kernel, the units of its work and where they stand in its table, from a call's sizes."""
MAPPED = ("WholeLayer", "WholeLayer_backward")
"""Kernels whose work a trace has as maps and passes."""
ALIKE = {
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
    return ALIKE.get(kernel, kernel)


class Processes(NamedTuple):
    """Bytes that the processes of a run take before they have a graph, pages that they share counted once."""

    alone: int
    """One that trains alone."""
    launcher: int
    """One that starts ranks, with those that it starts them by."""
    rank: int
    """Each of these ranks."""


NOMINAL_PROCESSES = Processes(alone=327 << 20, launcher=551 << 20, rank=18 << 20)
"""Of a machine that was described and not measured: as seen with Python 3.11 and PyTorch 2.13 for CPUs."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A machine, or several alike and their network, as they were measured or described."""

    host: Mapping[str, Any]
    """What it is: processor, cores, memory, versions, when and where it was measured."""
    prices: Sequence[Prices]
    """With fewer threads and more ranks at work; for each number of threads at least those of one rank."""
    networks: Sequence[Network] = ()
    learned: Sequence[Mapping[str, float]] = ()
    """Of the newest runs, the last one last: seconds seen over those that the tables alone tell, by kind of KINDS."""

    def factor(self, kind: str) -> float:
        """The median of what runs have taught of a kind, within BOUND; 1 before there are LEAST_RUNS of them."""
        found = [math.log(one[kind]) for one in self.learned if kind in one]
        bound = math.log(BOUND)
        return math.exp(min(bound, max(-bound, statistics.median(found)))) if len(found) >= LEAST_RUNS else 1.0

    def taught(self, ratios: Mapping[str, float]) -> Profile:
        """The same after one more run; see `learned`."""
        return replace(self, learned=[*self.learned, ratios][-NEWEST:])

    @property
    def digest(self) -> str:
        """Tells what was measured from what was at another time; runs that teach leave it as it is."""
        return hashlib.sha256(json.dumps(replace(self, learned=()).record()).encode()).hexdigest()

    @property
    def cores(self) -> int:
        """Of a host."""
        return int(self.host["cores"])

    @property
    def processes(self) -> Processes:
        """What processes take."""
        return Processes(**self.host["processes"]) if "processes" in self.host else NOMINAL_PROCESSES

    def prices_of(self, threads: int) -> tuple[Prices, Prices]:
        """Those of a rank of so many threads alone on its host, and where all cores are at work.

        InputError where that was not measured.
        """
        found = sorted((one for one in self.prices if one.threads == threads), key=lambda one: one.ranks)
        if not found:
            known = ", ".join(map(str, sorted({one.threads for one in self.prices})))
            raise InputError(f"the machine was measured with {known} threads a rank, not {threads}: {REMEDY}")
        return self._as_learned(found[0]), self._as_learned(found[-1])

    def _as_learned(self, prices: Prices) -> Prices:
        factor = self.factor("compute")
        return replace(prices, factor=factor, step_seconds=factor * prices.step_seconds)

    def network_of(self, ranks: int, hosts: int) -> Network:
        """The one among so many ranks, or the nearest number. InputError where there is none on so many hosts."""
        found = [one for one in self.networks if (one.hosts > 1) == (hosts > 1)]
        if not found:
            where = "several hosts: run weft probe under torchrun on them" if hosts > 1 else "one host: weft probe"
            raise InputError(f"no exchange between ranks was measured on {where}")
        nearest = min(found, key=lambda one: (abs(math.log(one.ranks / ranks)), one.ranks))
        step_seconds = self.factor("compute") * nearest.step_seconds  # in which no rank waits for others
        return replace(nearest, factor=self.factor("network"), step_seconds=step_seconds)

    def record(self) -> dict[str, Any]:
        """The numbers as JSON knows them."""
        return {
            "host": dict(self.host),
            "prices": [_recorded(one) for one in self.prices],
            "networks": [_recorded(one) for one in self.networks],
            "learned": [dict(one) for one in self.learned],
        }

    def save(self, path: Path) -> None:
        """Writes the numbers as JSON; a file that is there is whole at all times."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            draft.write_text(json.dumps(self.record(), indent=1) + "\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The machine in a file; InputError if it holds none."""
        with readable(path, REMEDY):
            known = json.loads(path.read_text())
            return cls(
                host=dict(known["host"]),
                prices=[Prices(**_with_tables(one)) for one in known["prices"]],
                networks=[Network(**_with_tables(one)) for one in known["networks"]],
                learned=[_ratios(one) for one in known.get("learned", [])],
            )


def holds_profile(path: Path) -> bool:
    """Whether a file of JSON is that of a profile. InputError where it cannot be read."""
    with readable(path, REMEDY):
        known = json.loads(path.read_text())
        return isinstance(known, dict) and "prices" in known


def _recorded(priced: Prices | Network) -> dict[str, Any]:
    named = {name: value for name, value in vars(priced).items() if name != "factor"}
    return named | {"tables": {name: asdict(table) for name, table in priced.tables.items()}}


def _with_tables(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "tables": {name: _table(table) for name, table in values["tables"].items()}}


def _table(values: dict[str, Any]) -> Table:
    axes = tuple(tuple(map(float, axis)) for axis in values["axes"])
    seconds = tuple(map(float, values["seconds"]))
    if len(seconds) != math.prod(map(len, axes)) or not all(math.isfinite(one) and one > 0 for one in seconds):
        raise ValueError("a table that does not have a time above 0 for each of its sizes")
    return Table(axes=axes, seconds=seconds)


def _ratios(values: dict[str, Any]) -> dict[str, float]:
    ratios = {kind: float(values[kind]) for kind in KINDS if kind in values}
    if not all(math.isfinite(one) and one > 0 for one in ratios.values()):
        raise ValueError("a run whose ratios are not all above 0")
    return ratios
