"""Choose a small subset of cases in which each pair of properties occurs that occurs in any case."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

import pytest

PAIRS = (
    ("strategy", "model"),
    ("strategy", "option"),
    ("strategy", "setting"),
    ("strategy", "ranks"),
    ("model", "option"),
    ("strategy", "graph"),
)
"""Pairs of properties whose values are combined. A case has one value of a property, or several options at once."""

Properties = Mapping[str, Collection[str]]
"""Values of each property of a case, by the property's name."""
Pair = tuple[str, str, str, str]
"""A property and its value, and another property and its value."""


def pairs_of(properties: Properties) -> Iterator[Pair]:
    """Yield the pairs of values that a case with these properties contains."""
    for first, second in PAIRS:
        for pair in product(properties.get(first, ()), properties.get(second, ())):
            yield first, pair[0], second, pair[1]


def choose(candidates: Mapping[str, Properties], costs: Mapping[str, float]) -> list[str]:
    """Return names of candidates that together contain every pair that any candidate contains.

    Greedy weighted set cover: take the candidate with the most uncovered pairs per cost, until all pairs are
    covered. The number of uncovered pairs only decreases, so the top of a heap of old numbers is the maximum once it
    is up to date. A hash of the names breaks ties, which spreads the choice over all values.
    """
    pairs = {name: set(pairs_of(properties)) for name, properties in candidates.items()}
    heap = [(-len(contained) / costs[name], hash_of(name), name) for name, contained in pairs.items() if contained]
    heapq.heapify(heap)
    covered: set[Pair] = set()
    names = []
    while heap:
        old, order, name = heapq.heappop(heap)
        new = -len(pairs[name] - covered) / costs[name]
        if new == old:
            covered |= pairs[name]
            names.append(name)
        elif new:
            heapq.heappush(heap, (new, order, name))
    return names


def hash_of(name: str, below: int = 1 << 60) -> int:
    """Return a number from 0 to `below` - 1 that depends on the name alone, in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % below


def param(*values: Any, name: str, quick: bool) -> Any:
    """Return the parameters of one test; those that are not quick run with `pytest -m ""`."""
    return pytest.param(*values, id=name, marks=() if quick else pytest.mark.slow)
