"""Ranges of numbers, such as 1e-4..1e-1, from which a random search draws values of an option."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from weft.config.option import checked
from weft.utils.errors import InputError

LOG_RATIO = 10
"""Ratio of a range's ends from which values are drawn on a logarithmic scale."""
DIGITS = 3
"""Number of significant digits of the floats that are drawn, so that they fit in names of folders."""


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """Numbers from `low` to `high`, both included; floats, or integers if both are."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"

    def draw(self, uniform: float) -> float:
        """Return a value: log-uniform if `high` is at least 10 times `low`, otherwise uniform.

        Args:
            uniform: Uniform random number in [0, 1).
        """
        is_whole = isinstance(self.low, int)
        end = self.high + 1 if is_whole else self.high
        if self.low > 0 and self.high >= LOG_RATIO * self.low:
            value = self.low * (end / self.low) ** uniform
        else:
            value = self.low + (end - self.low) * uniform
        value = math.floor(value) if is_whole else float(f"{value:.{DIGITS}g}")
        return min(max(value, self.low), self.high)


def as_range(spec: dataclasses.Field[Any], value: Any) -> Any:
    """Return a `ValueRange` for text such as "1e-4..1e-1" of an option that is a number, and any other value as it is.

    Args:
        spec: Field of the option.
        value: The value.

    Raises:
        InputError: The text contains two dots but is no range of valid values.
    """
    kind = type(spec.default)
    if kind not in (int, float) or not isinstance(value, str) or ".." not in value:
        return value
    flag = "--" + spec.name.replace("_", "-")
    try:
        low, high = map(kind, value.split(".."))
    except ValueError as error:
        raise InputError(f"{flag} {value}: give a range of type {kind.__name__}, such as 1..8") from error
    if low >= high:
        raise InputError(f"{flag} {value}: give the smaller number first")
    return ValueRange(low=checked(spec, low), high=checked(spec, high))
