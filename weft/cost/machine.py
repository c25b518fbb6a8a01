"""Cost factors by which `hybrid` and `offload` decide, from the profile of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Rates(NamedTuple):
    """Rows per second of each type of move, as ratios to one another (HongTu, section 5.3, equation 4)."""

    host: float
    """Rows per second from the host to the device."""
    ranks: float
    """Rows per second between ranks."""
    inplace: float
    """Rows per second within the device's memory."""


NOMINAL_RATES = Rates(host=1.0, ranks=2.0, inplace=8.0)
"""Assumed ratios, for decisions that use no measured profile."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds of one rank while all ranks work (NeutronStar, section 3)."""

    seconds_per_flop: float
    """Seconds per floating-point operation of the dense layers: T_v."""
    seconds_per_edge: float
    """Seconds per edge and column of an aggregate: T_e."""
    seconds_per_byte: float
    """Seconds per received byte of an exchange in which as many bytes are sent: T_c."""
