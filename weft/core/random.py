"""Keys for counter-based randomness: what is drawn depends on what it is for, never on who draws it."""

from __future__ import annotations

MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection that spreads every bit."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def key(*parts: int) -> int:
    """A 64-bit key from integers such as (seed, epoch, stage, call); order matters."""
    result = 0
    for part in parts:
        result = mix64(result ^ (part & MASK64))
    return result
