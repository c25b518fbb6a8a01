"""Keys for counter-based random numbers: a number depends on its purpose, never on the rank that computes it."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
"""Mask of the lowest 64 bits."""
MAX_KEYS = 1024
"""Largest number of random keys that a step can use: the size of a `KeyTable`."""

RandomKey = int | Tensor
"""Random key of 64 bits: a number, or a tensor int64 [1] on the device that uses it, whose value may change."""


def mix64(value: int) -> int:
    """Return a permutation of 64-bit values in which every input bit affects every output bit.

    This is the finalizer of SplitMix64 (Steele, Lea, Flood 2014).
    """
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def key(*parts: int) -> int:
    """Return a 64-bit key from integers such as (seed, epoch, stage, call), whose order matters."""
    result = 0
    for part in parts:
        result = mix64(result ^ (part & MASK64))
    return result


def keyed_words(key: int, *numbers: Tensor | int) -> Tensor:
    """Return 64 random bits for each entry of the numbers, int64 [n], from the same chain of hashes as `key`.

    Args:
        key: Random key.
        *numbers: int64 [n], or one number for all entries.
    """
    return reduce(lambda word, number: mix64_each(word ^ number), numbers, torch.tensor(signed(key)))


def keyed_integers(words: Tensor, count: Tensor | int) -> Tensor:
    """Return uniform integers from 0 to count - 1, int64. The bias is count / 2^63.

    Args:
        words: Random bits, int64.
        count: Number of possible values, or one number for each word.
    """
    return (words & (MASK64 >> 1)) % count


def mix64_each(values: Tensor) -> Tensor:
    """Return `mix64` of each value, int64 [n]. Sums and products wrap around, and shifts must not copy the sign bit."""
    values = values + signed(0x9E3779B97F4A7C15)
    values = (values ^ (values >> 30 & MASK64 >> 30)) * signed(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> 27 & MASK64 >> 27)) * signed(0x94D049BB133111EB)
    return values ^ (values >> 31 & MASK64 >> 31)


def signed(value: int) -> int:
    """Return the signed integer with the same 64 bits (two's complement)."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def key_word(key: RandomKey) -> int | Tensor:
    """Return a key for int64 arithmetic."""
    return key if isinstance(key, Tensor) else signed(key)


def key_on(key: RandomKey, device: torch.device) -> Tensor:
    """Return a key as a tensor int64 [1] on a device.

    Args:
        key: The key.
        device: The device.
    """
    return key if isinstance(key, Tensor) else torch.full((1,), signed(key), device=device)


class KeyTable:
    """Random keys of a step in a device's memory, where a CUDA graph reads those of each step.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(MAX_KEYS, dtype=torch.int64, device=device)
        self._calls: list[tuple[int, int]] = []

    def at(self, stage: int, call: int) -> Tensor:
        """Return the slot, int64 [1], into which `fill` writes `key(key(*parts, stage), call)`.

        Args:
            stage: Number of the stage.
            call: Number of the dropout call.
        """
        self._calls.append((stage, call))
        if len(self._calls) > MAX_KEYS:
            raise RuntimeError(f"a step uses more than {MAX_KEYS} random keys")
        return self._words[len(self._calls) - 1 :][:1]

    def fill(self, *parts: int) -> None:
        """Write the keys of a step, which `parts` identifies."""
        words = [signed(key(key(*parts, stage), call)) for stage, call in self._calls]
        self._words[: len(words)].copy_(torch.tensor(words, dtype=torch.int64))
