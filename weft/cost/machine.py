"""What a machine and its network cost, measured once: the factors of cost models, in one file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from weft.utils import migrate
from weft.utils.errors import InputError, readable

REMEDY = "give the probe.json of a hybrid run, or a profile of weft probe"


class Rates(NamedTuple):
    """How many rows a second move, as ratios to one another (HongTu, section 5.3, equation 4)."""

    host: float
    """From the host to the device."""
    ranks: float
    """Between ranks."""
    inplace: float
    """On the device."""


NOMINAL_RATES = Rates(host=1.0, ranks=2.0, inplace=8.0)
"""Of no machine in particular."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds that a rank takes, with all ranks at work (NeutronStar, section 3), and how fast rows move."""

    seconds_per_flop: float
    """Of the maps of a row: T_v."""
    seconds_per_edge: float
    """Of an aggregate, by edge and column: T_e."""
    seconds_per_byte: float
    """Of an exchange, by byte received while as much is sent: T_c."""
    rates: Rates = NOMINAL_RATES

    def record(self) -> dict[str, Any]:
        """The numbers as JSON knows them."""
        return asdict(self) | {"rates": self.rates._asdict()}

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> Self:
        """Read the factors from a record. KeyError, TypeError or ValueError if a field is missing or no number."""
        factors = {spec.name: float(values[spec.name]) for spec in fields(cls) if spec.name != "rates"}
        return cls(**factors, rates=Rates(**{name: float(values["rates"][name]) for name in Rates._fields}))

    def save(self, path: Path) -> None:
        """Writes the numbers as JSON."""
        path.write_text(json.dumps(migrate.versioned("factors", self.record()), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """The machine in a file; InputError if it holds none."""
        with readable(path, REMEDY):
            machine = cls.from_record(migrate.factors(json.loads(path.read_text()), path))
        for name, value in {**asdict(machine), **machine.rates._asdict()}.items():
            if name != "rates" and not (math.isfinite(value) and value >= 0):
                raise InputError(f"{path}: {name} is {value}, not a number of at least 0: {REMEDY}")
        if min(machine.rates) <= 0:
            raise InputError(f"{path}: rates are {machine.rates}, not all above 0: {REMEDY}")
        return machine
