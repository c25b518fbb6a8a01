"""Profile of a machine: its description, the prices of kernels and exchanges, and calibration by earlier runs."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

from weft.cost.prices import REMEDY, Network, Prices, PriceTable
from weft.runtime.kernel_selection import DEFAULT, KernelSelection
from weft.utils.errors import InputError, readable
from weft.utils.files import migrate
from weft.utils.files.file_reading import MAX_JSON_BYTES, read_text
from weft.utils.files.file_writing import write_text

KINDS = ("compute", "network")
"""Kinds of seconds that are calibrated separately, whatever the strategy."""
COUNTS = ("ranks", "threads", "hosts")
COLLECTIVES = ("all_to_all", "all_reduce")
MAX_RUNS, MIN_RUNS, MAX_FACTOR = 32, 3, 2.0
"""Number of the newest runs that count, number of runs before any counts, and bound of the correction.

A factor lies between 1 / MAX_FACTOR and MAX_FACTOR.
"""


class Processes(NamedTuple):
    """Bytes of the processes of a run before they load a graph; pages that processes share count once."""

    alone: int
    """Bytes of a process that trains by itself."""
    launcher: int
    """Bytes of a process that starts ranks, and of its helper processes."""
    rank: int
    """Bytes of each rank that it starts."""


NOMINAL_PROCESSES = Processes(alone=327 << 20, launcher=551 << 20, rank=18 << 20)
"""Default for machines that were described but not measured (Python 3.11, PyTorch 2.13 for CPUs)."""


class Disk(NamedTuple):
    """Seconds per byte of temporary files that do not fit in memory."""

    read: float = 0.0
    write: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured or described properties of a machine, or of several identical machines and their network."""

    host: Mapping[str, Any]
    """Description of the host: processor, cores, memory, versions, time and place of the measurement."""
    prices: Sequence[Prices]
    """Prices of kernels, for several numbers of threads and of concurrent ranks.

    For each number of threads, one entry is for a single rank.
    """
    networks: Sequence[Network] = ()
    """Prices of collectives, for several numbers of ranks and hosts."""
    choices: KernelSelection = DEFAULT
    """Fastest implementation of each kernel; `prices` are those of these implementations."""
    calibration: Sequence[Mapping[str, float]] = ()
    """Calibration: ratio of measured to estimated seconds in the newest runs, by kind, oldest first.

    The estimate of each ratio is the one before calibration.
    """

    def factor(self, kind: str) -> float:
        """Return the factor that corrects estimated seconds of a kind in KINDS.

        The factor is the median of measured / estimated seconds over the newest runs, limited to the range from
        1 / MAX_FACTOR to MAX_FACTOR. It is 1 before there are MIN_RUNS runs.
        """
        logs = [math.log(ratios[kind]) for ratios in self.calibration if kind in ratios]
        # Logarithms, so that a ratio and its inverse count alike.
        bound = math.log(MAX_FACTOR)
        return math.exp(min(bound, max(-bound, statistics.median(logs)))) if len(logs) >= MIN_RUNS else 1.0

    def with_calibration(self, ratios: Mapping[str, float]) -> Profile:
        """Return a copy of the profile that is calibrated by one more run; see `calibration`."""
        return replace(self, calibration=[*self.calibration, ratios][-MAX_RUNS:])

    @property
    def digest(self) -> str:
        """Checksum of the measurements, which calibration does not change."""
        return hashlib.sha256(json.dumps(replace(self, calibration=()).record()).encode()).hexdigest()

    @property
    def cores(self) -> int:
        """Cores of a host."""
        return int(self.host["cores"])

    @property
    def is_quick(self) -> bool:
        """True if the quick probe measured it, whose estimates have a larger error."""
        return bool(self.host.get("quick"))

    @property
    def processes(self) -> Processes:
        """Memory of the processes of a run."""
        return Processes(**self.host["processes"]) if "processes" in self.host else NOMINAL_PROCESSES

    @property
    def disk(self) -> Disk:
        """Seconds per byte of temporary files.

        Raises:
            InputError: The probe did not measure the disk.
        """
        if "disk" not in self.host:
            raise InputError(f"the probe has not measured the disk: {REMEDY}")
        return Disk(**self.host["disk"])

    def prices_of(self, threads: int) -> tuple[Prices, Prices]:
        """Return the prices of a rank that is alone on its host, and of one while all cores are busy.

        Args:
            threads: Threads of each rank.

        Raises:
            InputError: The probe did not measure ranks with this number of threads. Of a quick probe, which measures
                only one or two such numbers, the nearest is used, as if seconds were inversely proportional to threads.
        """
        measured = sorted(
            (prices for prices in self.prices if prices.threads == threads), key=lambda prices: prices.ranks
        )
        if not measured and self.is_quick and self.prices:
            nearest = min(self.prices, key=lambda prices: abs(math.log(prices.threads / threads)))
            measured = [replace(nearest, factor=nearest.threads / threads)]
        if not measured:
            counts = ", ".join(map(str, sorted({prices.threads for prices in self.prices})))
            raise InputError(f"the machine was measured with {counts} threads a rank, not {threads}: {REMEDY}")
        return self._calibrated(measured[0]), self._calibrated(measured[-1])

    def _calibrated(self, prices: Prices) -> Prices:
        """Return prices that are corrected by the measured time of earlier runs."""
        factor = prices.factor * self.factor("compute")
        return replace(prices, factor=factor, step_seconds=factor * prices.step_seconds)

    def network_of(self, ranks: int, hosts: int) -> Network:
        """Return the prices of collectives for the nearest measured number of ranks.

        Args:
            ranks: Number of ranks.
            hosts: Number of hosts; measurements on one host serve one host only, and those on several hosts all others.

        Raises:
            InputError: The probe did not measure collectives on one host, or on several.
        """
        measured = [network for network in self.networks if (network.hosts > 1) == (hosts > 1)]
        if not measured:
            where = "several hosts: run weft probe under torchrun on them" if hosts > 1 else "one host: run weft probe"
            raise InputError(f"the profile has no collectives that were measured on {where}")
        nearest = min(measured, key=lambda network: (abs(math.log(network.ranks / ranks)), network.ranks))
        return replace(nearest, factor=self.factor("network"))

    def record(self) -> dict[str, Any]:
        """Return the profile as values that JSON can hold."""
        return {
            "host": dict(self.host),
            "prices": [_record(entry) for entry in self.prices],
            "networks": [_record(entry) for entry in self.networks],
            "choices": self.choices.record(),
            "learned": [dict(entry) for entry in self.calibration],
        }

    def save(self, path: Path) -> None:
        """Write the profile to a JSON file atomically: readers find either the old or the new content."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(migrate.versioned("profile", self.record()), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the profile from a JSON file.

        Raises:
            InputError: The file has no valid profile.
        """
        with readable(path, REMEDY):
            record = migrate.profile(json.loads(read_text(path, MAX_JSON_BYTES)), path)
            return cls(
                host=_host(record["host"]),
                prices=[Prices(**_price_fields(entry)) for entry in record["prices"]],
                networks=[Network(**_price_fields(entry, COLLECTIVES)) for entry in record["networks"]],
                choices=KernelSelection.from_record(record["choices"]),
                calibration=[_ratios(entry) for entry in record["learned"]],
            )


def holds_profile(path: Path, remedy: str = REMEDY) -> bool:
    """Return whether a JSON file holds a profile.

    Args:
        path: The file.
        remedy: End of the error message: what to do if the file cannot be read.

    Raises:
        InputError: The file cannot be read.
    """
    with readable(path, remedy):
        content = json.loads(read_text(path, MAX_JSON_BYTES))
        return isinstance(content, dict) and "prices" in content


def _record(prices: Prices | Network) -> dict[str, Any]:
    named = {name: value for name, value in vars(prices).items() if name != "factor"}
    return named | {"tables": {name: asdict(table) for name, table in prices.tables.items()}}


def _host(values: dict[str, Any]) -> dict[str, Any]:
    for name, record_type in (("processes", Processes), ("disk", Disk)):
        for amount in record_type(**values[name]) if name in values else ():
            _amount(name, amount)
    return {**values, "cores": _count("cores", values["cores"])}


def _price_fields(values: dict[str, Any], tables: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of `Prices` or `Network` from a record; `tables` names the tables that it must have."""
    if missing := {*tables} - {*values["tables"]}:
        raise ValueError(f"no table of {', '.join(sorted(missing))}")
    numbers = {name: value for name, value in values.items() if name != "tables"}
    numbers = {name: (_count if name in COUNTS else _amount)(name, value) for name, value in numbers.items()}
    return numbers | {"tables": {name: _table(table) for name, table in values["tables"].items()}}


def _count(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}, not a whole number of at least 1")
    return value


def _amount(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} has {value!r}, not a number of at least 0")
    return value


def _table(values: dict[str, Any]) -> PriceTable:
    axes = tuple(tuple(map(float, axis)) for axis in values["axes"])
    seconds = tuple(map(float, values["seconds"]))
    if len(seconds) != math.prod(map(len, axes)) or not all(math.isfinite(price) and price > 0 for price in seconds):
        raise ValueError("a table lacks a time above 0 for some of its sizes")
    if not all(axis and low < high < math.inf for axis in axes for low, high in pairwise((0.0, *axis))):
        raise ValueError("the sizes of a table are not ascending numbers above 0")
    return PriceTable(axes=axes, seconds=seconds)


def _ratios(values: dict[str, Any]) -> dict[str, float]:
    ratios = {kind: float(values[kind]) for kind in KINDS if kind in values}
    if not all(math.isfinite(ratio) and ratio > 0 for ratio in ratios.values()):
        raise ValueError("the ratios of a run in `learned` are not all above 0")
    return ratios
