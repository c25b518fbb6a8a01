"""Seeded random splits, features and labels; each purpose has its own random stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.data.checks.tensor_checks import has_label
from weft.runtime.memory.limit import check_fits_memory
from weft.utils.errors import InputError
from weft.utils.random import key

SHARES = (0.6, 0.2, 0.2)
"""Default fractions of the vertices to train, validate and test on."""

# The purpose of a random stream is part of its key, so that two purposes never share a stream.
SPLIT, FEATURES, CLASSES, RMAT, SBM, DIGITS, CITATIONS = range(1, 8)


def stream(seed: int, *purpose: int) -> np.random.Generator:
    """Return a random generator for a seed and a purpose.

    Args:
        seed: Seed of the run or graph.
        purpose: Numbers that identify the purpose.
    """
    return np.random.Generator(np.random.Philox(key(seed, *purpose)))


class Masks(NamedTuple):
    """Vertices to train, validate and test on: bool [N] each, None if not stated."""

    train_mask: Tensor | None = None
    """Vertices to train on."""
    val_mask: Tensor | None = None
    """Vertices to validate on."""
    test_mask: Tensor | None = None
    """Vertices to test on."""


def random_split(eligible: Tensor, seed: int, shares: Sequence[float] = SHARES) -> Masks:
    """Return a random split of the eligible vertices.

    Args:
        eligible: Vertices to split, bool [N].
        seed: Seed of the split.
        shares: Fractions to train, validate and test on, which add up to 1.
    """
    require_shares(shares)
    ids = eligible.nonzero()[:, 0]
    ids = ids[torch.from_numpy(stream(seed, SPLIT).permutation(len(ids)))]
    num_train, num_val = (round(share * len(ids)) for share in shares[:2])
    masks = torch.zeros(3, len(eligible), dtype=torch.bool)
    for mask, chosen in zip(masks, ids.tensor_split([num_train, num_train + num_val]), strict=True):
        mask[chosen] = True
    return Masks(*(mask.clone() for mask in masks))


def split_vertices(y: Tensor | None, num_vertices: int, seed: int, shares: Sequence[float] = SHARES) -> Masks:
    """Return a random split of the labelled vertices, or of all vertices without labels.

    Args:
        y: Labels, or None.
        num_vertices: Number of vertices.
        seed: Seed of the split.
        shares: Fractions to train, validate and test on.
    """
    return random_split(torch.ones(num_vertices, dtype=torch.bool) if y is None else has_label(y), seed, shares)


def split_by_time(time: Tensor, eligible: Tensor, shares: Sequence[float] = SHARES) -> Masks:
    """Return a split of the eligible vertices by time: the earliest train, the latest test.

    Vertices with equal times stay together, in the later split.

    Args:
        time: A number for each vertex, [N].
        eligible: Vertices to split, bool [N].
        shares: Fractions to train, validate and test on.

    Raises:
        InputError: If no vertex is left to train on.
    """
    require_shares(shares)
    times = time[eligible].sort().values
    if not len(times):
        return Masks(*(torch.zeros_like(eligible) for _ in range(3)))
    last = torch.full((1,), torch.inf, dtype=torch.float64)
    bounds = torch.cat([times.double(), last])[[round(shares[0] * len(times)), round(sum(shares[:2]) * len(times))]]
    part = torch.bucketize(time.double(), bounds, right=True)
    masks = Masks(*(eligible & (part == number) for number in range(3)))
    assert masks.train_mask is not None
    if shares[0] and not masks.train_mask.any():
        raise InputError(f"--split-time: no vertex is earlier than {float(bounds[0]):g}: give finer times, or a split")
    return masks


def require_shares(shares: Sequence[float]) -> None:
    """Raise InputError unless there are three fractions that add up to 1."""
    if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise InputError(f"a split of {list(shares)}: give shares to train, validate and test on that add up to 1")


def split_labelled(y: Tensor, seed: int) -> Masks:
    """Return a random split of the labelled vertices with the default fractions.

    Args:
        y: Labels.
        seed: Seed of the split.
    """
    return random_split(has_label(y), seed)


def random_matrix(rows: int, columns: int, seed: int, part: int = 0) -> Tensor:
    """Return standard normal numbers, float32 [rows, columns].

    Args:
        rows: Number of rows.
        columns: Number of columns.
        seed: Seed of the numbers.
        part: Number of the matrix, if a graph needs several.

    Raises:
        InputError: If the matrix does not fit in memory.
    """
    check_fits_memory(4 * rows * columns, f"{columns} features of {rows} vertices", "ask for fewer")
    return torch.from_numpy(stream(seed, FEATURES, part).standard_normal((rows, columns), dtype=np.float32))


def balanced_classes(num_vertices: int, num_classes: int, seed: int) -> Tensor:
    """Return random labels, int64 [N]; the sizes of the classes differ by at most one.

    Args:
        num_vertices: Number of vertices, N.
        num_classes: Number of classes.
        seed: Seed of the labels.

    Raises:
        InputError: If there are more classes than vertices.
    """
    if num_classes > num_vertices:
        raise InputError(f"{num_classes} classes for {num_vertices} vertices: ask for as many as vertices, or fewer")
    return torch.from_numpy(stream(seed, CLASSES).permutation(np.arange(num_vertices, dtype=np.int64) % num_classes))
