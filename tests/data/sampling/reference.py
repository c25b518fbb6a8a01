"""Reference implementation of csrc/sampling.cpp in plain Python, one edge at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from weft.data import Adjacency
from weft.data.sampling import ALL, Fanout, KeyTransition
from weft.utils.random import MASK64, mix64

Edge = tuple[int, float]  # position in the graph, 1 / probability


def floyd(d: int, k: int, word: int) -> list[int]:
    """Return k of the numbers 0 to d - 1 in ascending order, by Floyd's algorithm."""
    m = min(k, d - k)
    chosen: set[int] = set()
    for i in range(m):
        last = d - m + i
        number = mix64(word ^ i) * (last + 1) >> 64
        chosen.add(last if number in chosen else number)
    return sorted(set(range(d)) - chosen if k > d - k else chosen)


def variate(key: int, vertex: int, transition: KeyTransition | None) -> float:
    """Return the random number in [0, 1) that LABOR assigns to a source vertex."""
    if transition is None:
        return mix64(key ^ vertex) / 2**64
    angle = math.pi / 2 * transition.share
    z = math.cos(angle) * normal(key, vertex) + math.sin(angle) * normal(transition.next_key, vertex)
    return math.erfc(-z / math.sqrt(2)) / 2


def normal(key: int, vertex: int) -> float:
    word = mix64(key ^ vertex)
    radius, angle = ((mix64(word ^ i) >> 11) / 2**53 for i in range(2))
    return math.sqrt(-2 * math.log(1 - radius)) * math.cos(2 * math.pi * angle)


def probabilities(weights: Sequence[float], k: int) -> list[float]:
    """Return probabilities min(1, c w) whose sum is k; the number of probabilities of 1 is found by trial."""
    positive = sorted((w for w in weights if w > 0), reverse=True)
    if len(positive) <= k:
        return [float(w > 0) for w in weights]
    for certain in range(k):
        c = (k - certain) / math.fsum(positive[certain:])
        if c * positive[certain] < 1:
            break
    return [min(1.0, c * w) for w in weights]


def sample(
    in_edges: Adjacency,
    targets: Sequence[int],
    fanout: Fanout,
    *,
    key: int,
    method: str,
    transition: KeyTransition | None = None,
    ids: Sequence[int] | None = None,
    edge_type: Sequence[int] | None = None,
) -> list[list[Edge]]:
    """Return the sampled edges of each target."""
    id_of: Callable[[int], int] = (lambda v: v) if ids is None else ids.__getitem__
    indptr, indices = in_edges.indptr.tolist(), in_edges.indices.tolist()
    weight = [1.0] * len(indices) if in_edges.weight is None else in_edges.weight.tolist()
    samples = []
    for v in targets:
        word = mix64(key & MASK64 ^ id_of(v))
        row = range(indptr[v], indptr[v + 1])
        groups = [(list(row), fanout, word)]
        if isinstance(fanout, tuple):
            assert edge_type is not None
            groups = [([e for e in row if edge_type[e] == r], k, mix64(word ^ r)) for r, k in enumerate(fanout)]
        edges: list[Edge] = []
        for group, k, group_word in groups:
            d = len(group)
            if k == ALL or d <= k:
                edges += [(e, 1.0) for e in group]
            elif not k:
                continue
            elif method == "uniform":
                edges += [(group[i], d / k) for i in floyd(d, k, group_word)]
            elif method == "labor":
                edges += [(e, d / k) for e in group if variate(key, id_of(indices[e]), transition) < k / d]
            else:
                for e, p in zip(group, probabilities([weight[e] for e in group], k), strict=True):
                    if (mix64(word ^ (e - row.start)) >> 11) / 2**53 < p:
                        edges.append((e, 1 / p))
        samples.append(sorted(edges))
    return samples
