"""Keys for counter-based randomness: what is drawn depends on what it is for, never on who draws it."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
MOST_KEYS = 1024
"""Of a table."""

RandomKey = int | Tensor
"""64 bits that randomness depends on: a number, or int64 [1] on the device that draws, whose value may change."""


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


def keyed_words(key: int, *numbers: Tensor | int) -> Tensor:
    """64 random bits, int64 [n], for each entry of the numbers, int64 [n] or one for all; by the chain of `key`."""
    return reduce(lambda word, number: mix64_each(word ^ number), numbers, torch.tensor(signed(key)))


def keyed_integers(words: Tensor, count: Tensor | int) -> Tensor:
    """Uniform integers from 0 to count - 1, int64, from random bits; the bias is count / 2^63."""
    return (words & (MASK64 >> 1)) % count


def mix64_each(values: Tensor) -> Tensor:
    """`mix64` of int64 [n], whose aggregates wrap and whose shifts must not carry the sign."""
    values = values + signed(0x9E3779B97F4A7C15)
    values = (values ^ (values >> 30 & MASK64 >> 30)) * signed(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> 27 & MASK64 >> 27)) * signed(0x94D049BB133111EB)
    return values ^ (values >> 31 & MASK64 >> 31)


def signed(value: int) -> int:
    """The integer whose two's complement are these 64 bits; it is its own."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def key_word(key: RandomKey) -> int | Tensor:
    """A key as int64 arithmetic takes it."""
    return key if isinstance(key, Tensor) else signed(key)


def key_on(key: RandomKey, device: torch.device) -> Tensor:
    """A key in the memory of a device: int64 [1]."""
    return key if isinstance(key, Tensor) else torch.full((1,), signed(key), device=device)


class KeyTable:
    """The keys of a step's draws in a device's memory, where work that is repeated finds those of the next step."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(MOST_KEYS, dtype=torch.int64, device=device)
        self._places: list[tuple[int, int]] = []

    def at(self, stage: int, call: int) -> Tensor:
        """Where `fill` writes `key(key(*parts, stage), call)`: int64 [1]."""
        self._places.append((stage, call))
        if len(self._places) > MOST_KEYS:
            raise RuntimeError(f"a step draws under more than {MOST_KEYS} keys")
        return self._words[len(self._places) - 1 :][:1]

    def fill(self, *parts: int) -> None:
        """Writes the keys of a step; parts: what tells it from others."""
        words = [signed(key(key(*parts, stage), call)) for stage, call in self._places]
        self._words[: len(words)].copy_(torch.tensor(words, dtype=torch.int64))
