"""Seeded random splits, features and labels, each purpose with a random stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.data.tensor_checks import has_label
from weft.runtime.memory import require_memory
from weft.utils.errors import InputError
from weft.utils.random import key

SHARES = (0.6, 0.2, 0.2)
"""Of a split that is not said otherwise: to train, to validate and to test on."""

# What a random stream is for: part of its key, so that no two purposes share a stream.
SPLIT, FEATURES, CLASSES, RMAT, SBM, DIGITS = range(1, 7)


def stream(seed: int, *purpose: int) -> np.random.Generator:
    """A random generator of its own for a seed and a purpose."""
    return np.random.Generator(np.random.Philox(key(seed, *purpose)))


class Masks(NamedTuple):
    """Which vertices are to train on, to validate on and to test on: bool [N], where that is known."""

    train_mask: Tensor | None = None
    val_mask: Tensor | None = None
    test_mask: Tensor | None = None


def random_split(eligible: Tensor, seed: int, shares: Sequence[float] = SHARES) -> Masks:
    """A random split of the vertices where `eligible` holds. shares: to train, validate and test on, together 1."""
    require_shares(shares)
    ids = eligible.nonzero()[:, 0]
    ids = ids[torch.from_numpy(stream(seed, SPLIT).permutation(len(ids)))]
    num_train, num_val = (round(share * len(ids)) for share in shares[:2])
    masks = torch.zeros(3, len(eligible), dtype=torch.bool)
    for mask, chosen in zip(masks, ids.tensor_split([num_train, num_train + num_val]), strict=True):
        mask[chosen] = True
    return Masks(*(mask.clone() for mask in masks))


def split_vertices(y: Tensor | None, num_vertices: int, seed: int, shares: Sequence[float] = SHARES) -> Masks:
    """A random split of the vertices that have a label, or of all where there are none."""
    return random_split(torch.ones(num_vertices, dtype=torch.bool) if y is None else has_label(y), seed, shares)


def split_by_time(time: Tensor, eligible: Tensor, shares: Sequence[float] = SHARES) -> Masks:
    """A split of the vertices where `eligible` holds: the earliest to train on, the latest to test on.

    time: [N]. shares as in random_split, but vertices of one time stay together, in the later part. InputError where
    that leaves none to train on.
    """
    require_shares(shares)
    known = time[eligible].sort().values
    if not len(known):
        return Masks(*(torch.zeros_like(eligible) for _ in range(3)))
    last = torch.full((1,), torch.inf, dtype=torch.float64)
    bounds = torch.cat([known.double(), last])[[round(shares[0] * len(known)), round(sum(shares[:2]) * len(known))]]
    part = torch.bucketize(time.double(), bounds, right=True)
    masks = Masks(*(eligible & (part == number) for number in range(3)))
    assert masks.train_mask is not None
    if shares[0] and not masks.train_mask.any():
        raise InputError(f"--split-time: no vertex is earlier than {float(bounds[0]):g}: give finer times, or a split")
    return masks


def require_shares(shares: Sequence[float]) -> None:
    """InputError unless there are three shares that make up the whole."""
    if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise InputError(f"a split of {list(shares)}: give shares to train, validate and test on that add up to 1")


def split_labelled(y: Tensor, seed: int) -> Masks:
    """A random split over the labelled vertices."""
    return random_split(has_label(y), seed)


def random_matrix(rows: int, columns: int, seed: int, part: int = 0) -> Tensor:
    """Standard normal float32 [rows, columns]. InputError where there is no memory for them."""
    require_memory(4 * rows * columns, f"{columns} features of {rows} vertices", "ask for fewer")
    return torch.from_numpy(stream(seed, FEATURES, part).standard_normal((rows, columns), dtype=np.float32))


def balanced_classes(num_vertices: int, num_classes: int, seed: int) -> Tensor:
    """Random labels, int64 [N], every class as often as every other (give or take one).

    Raises InputError for more classes than vertices.
    """
    if num_classes > num_vertices:
        raise InputError(f"{num_classes} classes for {num_vertices} vertices: ask for as many as vertices, or fewer")
    return torch.from_numpy(stream(seed, CLASSES).permutation(np.arange(num_vertices, dtype=np.int64) % num_classes))
