"""What a machine and its network cost: the factors of NeutronStar's cost model (section 3), as a probe found them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from weft.core.errors import InputError

REMEDY = "leave out --probe to measure anew"


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Seconds a rank takes, with all ranks at work.

    seconds_per_flop: of the maps of a row, T_v. seconds_per_edge: of a product, by edge and column, T_e.
    seconds_per_byte: of an exchange, by byte received while as much is sent, T_c.
    """

    seconds_per_flop: float
    seconds_per_edge: float
    seconds_per_byte: float

    def save(self, path: Path) -> None:
        """Writes the factors as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """The factors in a file; InputError if it holds none."""
        try:
            values = json.loads(path.read_text())
            factors = cls(**{spec.name: float(values[spec.name]) for spec in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise InputError(f"{path}: cannot read the factors of a probe ({error!r}): {REMEDY}") from None
        for name, value in asdict(factors).items():
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{path}: {name} is {value}, not a number of at least 0: {REMEDY}")
        return factors
