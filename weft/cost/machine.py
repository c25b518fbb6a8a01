"""Cost factors of a machine and its network, measured once and saved in one file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from weft.utils import migrate
from weft.utils.errors import InputError, readable

REMEDY = "give the probe.json of a hybrid run, or a profile that weft probe wrote"


class Rates(NamedTuple):
    """Rows per second of each type of move, as ratios to one another (HongTu, section 5.3, equation 4)."""

    host: float
    """Rows per second from the host to the device."""
    ranks: float
    """Rows per second between ranks."""
    inplace: float
    """Rows per second within the device's memory."""


NOMINAL_RATES = Rates(host=1.0, ranks=2.0, inplace=8.0)
"""Default ratios, used where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds of one rank while all ranks work (NeutronStar, section 3), and the rates at which rows move."""

    seconds_per_flop: float
    """Seconds per floating-point operation of the dense layers: T_v."""
    seconds_per_edge: float
    """Seconds per edge and column of an aggregate: T_e."""
    seconds_per_byte: float
    """Seconds per received byte of an exchange in which as many bytes are sent: T_c."""
    rates: Rates = NOMINAL_RATES
    """Rates at which rows move."""

    def record(self) -> dict[str, Any]:
        """Return the factors as values that JSON can hold."""
        return asdict(self) | {"rates": self.rates._asdict()}

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> Self:
        """Read the factors from a record.

        Raises:
            KeyError: A field is missing.
            TypeError: A field has the wrong type.
            ValueError: A field is not a number.
        """
        factors = {spec.name: float(values[spec.name]) for spec in fields(cls) if spec.name != "rates"}
        return cls(**factors, rates=Rates(**{name: float(values["rates"][name]) for name in Rates._fields}))

    def save(self, path: Path) -> None:
        """Write the factors to a JSON file."""
        path.write_text(json.dumps(migrate.versioned("factors", self.record()), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the factors from a JSON file.

        Raises:
            InputError: The file has no valid factors.
        """
        with readable(path, REMEDY):
            machine = cls.from_record(migrate.factors(json.loads(path.read_text()), path))
        for name, value in {**asdict(machine), **machine.rates._asdict()}.items():
            if name != "rates" and not (math.isfinite(value) and value >= 0):
                raise InputError(f"{path}: {name} is {value}, not a number of at least 0: {REMEDY}")
        if min(machine.rates) <= 0:
            raise InputError(f"{path}: rates are {machine.rates}, not all above 0: {REMEDY}")
        return machine
