"""Samples are fair, by chi-square tests of single edges and of pairs; estimates of sums are unbiased."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import weft
from tests.data.sampling.reference import probabilities
from weft.data import Adjacency
from weft.data.sampling import METHODS, KeyTransition, dependent_batch_key, sample_layer
from weft.utils.random import key

# Probability of each tail of chi-square. Keys are fixed, so results do not vary between runs.
MIN_TAIL = 1e-3


def samples(degree: int, k: int, count: int, *, most_edges: int = 1 << 22) -> Tensor:
    """Sample `count` rows of one in-degree with several keys; return positions in the row, int64 [count, k]."""
    targets = max(1, min(count, most_edges // degree))
    rows = Adjacency(
        indptr=torch.arange(targets + 1) * degree,
        indices=torch.zeros(targets * degree, dtype=torch.int32),
        num_sources=1,
    )
    calls = [sample_layer(rows, torch.arange(targets), k, key=key(i)).edge_ids for i in range(-(-count // targets))]
    return (torch.cat(calls).long() % degree).view(-1, k)[:count]


def assert_fair(statistic: float, freedom: int) -> None:
    """Check that a chi-square statistic is neither too large nor too small."""
    tail = float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2).double()))
    assert MIN_TAIL < tail < 1 - MIN_TAIL, f"{statistic:.1f} at {freedom} degrees of freedom: tail {tail:.2g}"


@pytest.mark.parametrize(
    ("degree", "k", "count"),
    [
        (2, 1, 20_000),
        (40, 3, 8000),
        (40, 31, 8000),
        (255, 1, 20_000),
        (255, 10, 8000),
        (255, 200, 3000),
        (40_000, 20, 20_000),
        (40_000, 900, 400),
        (70_000, 20, 20_000),
        (70_000, 1000, 400),
    ],
)
def test_single_edges(degree: int, k: int, count: int) -> None:
    """All positions are equally frequent. Positions of a sample differ, which reduces the variance of the counts."""
    observed = samples(degree, k, count).flatten().bincount(minlength=degree).double()
    fraction = k / degree
    # variance / mean of a count: (1 - k / degree) of one sample, times degree / (degree - 1) for its dependence
    expected, variance_ratio = count * fraction, (1 - fraction) * degree / (degree - 1)
    assert_fair(float(((observed - expected) ** 2).sum() / (expected * variance_ratio)), degree - 1)


def test_the_only_edge() -> None:
    assert not samples(1, 1, 1000).any()


@pytest.mark.parametrize(
    ("degree", "cells", "count"),
    [(40, 40, 12_000), (255, 15, 6000), (255, 85, 60_000), (40_000, 20, 6000), (70_000, 28, 6000)],
)
def test_pairs(degree: int, cells: int, count: int) -> None:
    """All pairs of positions are equally frequent, counted in cells of neighbouring positions."""
    size = degree // cells
    assert size * cells == degree
    first, second = (samples(degree, 2, count) // size).unbind(1)
    observed = (first * cells + second).bincount(minlength=cells * cells).view(cells, cells).double()
    assert not observed.tril(-1).any()  # Positions of a sample ascend.
    weight = torch.full((cells, cells), float(size * size)).triu(1) + torch.eye(cells) * size * (size - 1) / 2
    expected = (weight / (degree * (degree - 1) / 2) * count).double()
    used = expected > 0
    assert_fair(float(((observed - expected)[used] ** 2 / expected[used]).sum()), int(used.sum()) - 1)


@pytest.mark.parametrize(("degree", "k", "count"), [(40, 20, 4000), (40, 33, 4000), (255, 30, 2000), (700, 4, 60_000)])
def test_pairs_in_larger_samples(degree: int, k: int, count: int) -> None:
    """All pairs of positions are equally frequent in samples of more than two edges.

    Pairs of one sample depend on each other. The covariance of two pairs depends only on the number of positions that
    they share. Its matrix has two eigenvalues: one for counts that are sums of a number for each position, and one for
    counts that are orthogonal to these.
    """
    columns = torch.combinations(torch.arange(k), 2)
    first, second = samples(degree, k, count)[:, columns].flatten(0, 1).unbind(1)
    together = (first * degree + second).bincount(minlength=degree * degree).view(degree, degree).double()
    p2, p3, p4 = (math.perm(k, j) / math.perm(degree, j) for j in (2, 3, 4))
    deviation = together.triu(1) - torch.ones(degree, degree).triu(1) * count * p2
    deviation += deviation.T.clone()
    by_position = deviation.sum(1)
    sums = ((by_position[:, None] + by_position) / (degree - 2)).fill_diagonal_(0)
    same, one_shared, none_shared = p2 - p2**2, p3 - p2**2, p4 - p2**2
    of_sums = same + (degree - 4) * one_shared - (degree - 3) * none_shared
    of_rest = same - 2 * one_shared + none_shared
    statistic = sums.square().sum() / of_sums + (deviation - sums).square().sum() / of_rest
    assert_fair(float(statistic) / 2 / count, math.comb(degree, 2) - 1)


def test_successive_keys_and_targets_are_independent() -> None:
    """Samples of two keys, and of two neighbouring targets, are independent."""
    for first, second in ((0, 1), (1, 2), (7, 1 << 40)):
        rows = Adjacency(
            indptr=torch.arange(20_001) * 20, indices=torch.zeros(400_000, dtype=torch.int32), num_sources=1
        )
        a, b = (sample_layer(rows, torch.arange(20_000), 1, key=key(i)).edge_ids.long() % 20 for i in (first, second))
        for other in (b, a.roll(1)):
            observed = (a * 20 + other).bincount(minlength=400).double()
            assert_fair(float(((observed - 50) ** 2 / 50).sum()), 399)


def inclusion(method: str, weight: Tensor, k: int) -> Tensor:
    d = len(weight)
    if d <= k:
        return torch.ones(d, dtype=torch.float64)
    if method == "weighted":
        return torch.tensor(probabilities(weight.tolist(), k), dtype=torch.float64)
    return torch.full((d,), k / d, dtype=torch.float64)


@pytest.mark.parametrize(("method", "dependent"), [*((method, False) for method in METHODS), ("labor", True)])
@pytest.mark.parametrize("name", ["cora", pytest.param("topo_dblp-2010", marks=pytest.mark.slow)])
def test_estimates_are_unbiased(name: str, method: str, dependent: bool, weft_data: Callable[[str], Path]) -> None:
    """Means of estimated sums over in-neighbours of a real graph are within the standard error."""
    k, count = 3, 300
    whole = weft.load(str(weft_data(name))).in_edges
    random = torch.Generator().manual_seed(2)
    weight = torch.rand(whole.num_edges, generator=random, dtype=torch.float64) ** 2 + 0.05
    x = torch.randn(whole.num_sources, generator=random, dtype=torch.float64)
    targets = (whole.degree > k).nonzero().view(-1)[:1000]
    whole = whole.with_weight(weight)
    estimates = torch.zeros(len(targets), dtype=torch.float64)
    for batch in range(count):
        sample_key, transition = (
            dependent_batch_key(1, batch=16 * batch + 3, kappa=8) if dependent else (key(batch), None)
        )
        estimates += estimate(whole, targets, k, sample_key, method, transition, x) / count
    true, variance = (torch.empty(len(targets), dtype=torch.float64) for _ in range(2))
    for i, v in enumerate(targets.tolist()):
        row = slice(int(whole.indptr[v]), int(whole.indptr[v + 1]))
        values, p = x[whole.indices[row].long()] * weight[row], inclusion(method, weight[row], k)
        d = len(values)
        true[i] = values.sum()
        fixed_size = d * d * (1 - k / d) / k * values.var()
        variance[i] = fixed_size if method == "uniform" else (values.square() * (1 / p - 1)).sum()
    z = (estimates - true) / (variance / count).sqrt()
    assert float(z.abs().max()) < 6
    assert 0.8 < float(z.square().mean()) < 1.25


def estimate(
    whole: Adjacency, targets: Tensor, k: int, sample_key: int, method: str, transition: KeyTransition | None, x: Tensor
) -> Tensor:
    edges = sample_layer(whole, targets, k, key=sample_key, method=method, transition=transition)
    assert whole.weight is not None
    values = edges.scale() * x[edges.sources.long()] * whole.weight[edges.edge_ids.long()]
    rows = torch.arange(len(targets)).repeat_interleave(edges.indptr.diff())
    return torch.zeros(len(targets), dtype=torch.float64).index_add_(0, rows, values)


def test_labor_samples_fewer_sources() -> None:
    """LABOR samples as many edges as uniform sampling from fewer vertices, because targets share random numbers."""
    random = torch.Generator().manual_seed(4)
    source, target = torch.randint(3000, (2, 120_000), generator=random)
    whole = Adjacency.from_edges(source, target, num_sources=3000, num_targets=3000)
    counts = {}
    for method in ("uniform", "labor"):
        edges = sample_layer(whole, torch.arange(1000), 5, key=3, method=method)
        assert 4700 < edges.num_edges < 5300
        counts[method] = len(edges.sources.unique())
    assert counts["labor"] < 0.8 * counts["uniform"]
