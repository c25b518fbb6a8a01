"""A machine as it was measured, in one file: what it is, what kernels and exchanges take, what runs have taught."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

from weft.cost.prices import REMEDY, Network, Prices, PriceTable
from weft.runtime.kernel_selection import DEFAULT, KernelSelection
from weft.utils import migrate
from weft.utils.errors import InputError, readable

KINDS = ("compute", "network")
"""Of seconds that runs tell apart, whatever their strategy."""
COUNTS = ("ranks", "threads", "hosts")
COLLECTIVES = ("all_to_all", "all_reduce")
MAX_RUNS, MIN_RUNS, MAX_FACTOR = 32, 3, 2.0
"""Runs that count, how many it takes before they do, and the most that they make of a price, or of its inverse."""


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


class Disk(NamedTuple):
    """Seconds of a byte of temporary files that memory does not hold beside them."""

    read: float = 0.0
    write: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A machine, or several alike and their network, as they were measured or described."""

    host: Mapping[str, Any]
    """What it is: processor, cores, memory, versions, when and where it was measured."""
    prices: Sequence[Prices]
    """With fewer threads and more ranks at work; for each number of threads at least those of one rank."""
    networks: Sequence[Network] = ()
    choices: KernelSelection = DEFAULT
    """Which implementations of kernels are fastest, of which prices are those."""
    learned: Sequence[Mapping[str, float]] = ()
    """Of the newest runs, the last one last: seconds seen over those that the tables alone tell, by kind of KINDS."""

    def factor(self, kind: str) -> float:
        """The median of what runs have taught of a kind, within BOUND; 1 before there are LEAST_RUNS of them."""
        found = [math.log(one[kind]) for one in self.learned if kind in one]
        bound = math.log(MAX_FACTOR)
        return math.exp(min(bound, max(-bound, statistics.median(found)))) if len(found) >= MIN_RUNS else 1.0

    def with_calibration(self, ratios: Mapping[str, float]) -> Profile:
        """The same after one more run; see `learned`."""
        return replace(self, learned=[*self.learned, ratios][-MAX_RUNS:])

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

    @property
    def disk(self) -> Disk:
        """What temporary files take. InputError where that was not measured."""
        if "disk" not in self.host:
            raise InputError(f"the probe has not measured the disk: {REMEDY}")
        return Disk(**self.host["disk"])

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
        return replace(nearest, factor=self.factor("network"))

    def record(self) -> dict[str, Any]:
        """The numbers as JSON knows them."""
        return {
            "host": dict(self.host),
            "prices": [_recorded(one) for one in self.prices],
            "networks": [_recorded(one) for one in self.networks],
            "choices": self.choices.record(),
            "learned": [dict(one) for one in self.learned],
        }

    def save(self, path: Path) -> None:
        """Writes the numbers as JSON; a file that is there is whole at all times."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            draft.write_text(json.dumps(migrate.versioned("profile", self.record()), indent=1) + "\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The machine in a file; InputError if it holds none."""
        with readable(path, REMEDY):
            known = migrate.profile(json.loads(path.read_text()), path)
            return cls(
                host=_host(known["host"]),
                prices=[Prices(**_priced(one)) for one in known["prices"]],
                networks=[Network(**_priced(one, COLLECTIVES)) for one in known["networks"]],
                choices=KernelSelection.from_record(known["choices"]),
                learned=[_ratios(one) for one in known["learned"]],
            )


def holds_profile(path: Path, remedy: str = REMEDY) -> bool:
    """Whether a file of JSON is that of a profile. InputError, with the remedy, where it cannot be read."""
    with readable(path, remedy):
        known = json.loads(path.read_text())
        return isinstance(known, dict) and "prices" in known


def _recorded(priced: Prices | Network) -> dict[str, Any]:
    named = {name: value for name, value in vars(priced).items() if name != "factor"}
    return named | {"tables": {name: asdict(table) for name, table in priced.tables.items()}}


def _host(values: dict[str, Any]) -> dict[str, Any]:
    for name, known in (("processes", Processes), ("disk", Disk)):
        for one in known(**values[name]) if name in values else ():
            _amount(name, one)
    return {**values, "cores": _count("cores", values["cores"])}


def _priced(values: dict[str, Any], tables: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of Prices, or of a Network, which has some tables at least."""
    if missing := {*tables} - {*values["tables"]}:
        raise ValueError(f"no table of {', '.join(sorted(missing))}")
    numbers = {name: value for name, value in values.items() if name != "tables"}
    numbers = {name: (_count if name in COUNTS else _amount)(name, value) for name, value in numbers.items()}
    return numbers | {"tables": {name: _table(table) for name, table in values["tables"].items()}}


def _count(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}, and not a whole number from 1")
    return value


def _amount(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} has {value!r}, and no number from 0")
    return value


def _table(values: dict[str, Any]) -> PriceTable:
    axes = tuple(tuple(map(float, axis)) for axis in values["axes"])
    seconds = tuple(map(float, values["seconds"]))
    if len(seconds) != math.prod(map(len, axes)) or not all(math.isfinite(one) and one > 0 for one in seconds):
        raise ValueError("a table that does not have a time above 0 for each of its sizes")
    if not all(axis and low < high < math.inf for axis in axes for low, high in pairwise((0.0, *axis))):
        raise ValueError("a table whose sizes do not ascend from above 0")
    return PriceTable(axes=axes, seconds=seconds)


def _ratios(values: dict[str, Any]) -> dict[str, float]:
    ratios = {kind: float(values[kind]) for kind in KINDS if kind in values}
    if not all(math.isfinite(one) and one > 0 for one in ratios.values()):
        raise ValueError("a run whose ratios are not all above 0")
    return ratios
