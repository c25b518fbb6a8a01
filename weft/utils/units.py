"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from weft.utils.errors import InputError

FACTORS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}
"""Bytes of each unit."""
PATTERN = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)
"""Number and unit of an amount."""


def parse_bytes(text: str, flag: str) -> int:
    """Return the bytes of an amount such as '512MB', '1.5 GiB' or '4096'.

    Args:
        text: The amount.
        flag: Flag or option that the amount was given for.

    Raises:
        InputError: The text is not an amount; the message names the flag.
    """
    match = PATTERN.fullmatch(text.strip())
    unit = match[2].upper() if match else ""
    if match is None or unit not in FACTORS:
        raise InputError(f"{flag} {text!r}: give an amount such as 512MB or 1.5GiB")
    return int(float(match[1]) * FACTORS[unit])


def format_bytes(value: float) -> str:
    """Return bytes as text: '512 B', '4.1 kB', '1.50 GB' or '8e+06 GB'."""
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB" if value < 1e6 else f"{value:.0e} GB"
