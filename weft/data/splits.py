"""Seeded random splits, features and labels, each purpose with a random stream of its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.memory import require_memory
from weft.core.random import key
from weft.data.checks import has_label

TRAIN_SHARE, VAL_SHARE = 0.6, 0.2

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


def random_split(eligible: Tensor, seed: int) -> Masks:
    """A random split: 60, 20 and 20 per cent of the vertices where `eligible` holds."""
    ids = eligible.nonzero()[:, 0]
    ids = ids[torch.from_numpy(stream(seed, SPLIT).permutation(len(ids)))]
    num_train, num_val = round(TRAIN_SHARE * len(ids)), round(VAL_SHARE * len(ids))
    masks = torch.zeros(3, len(eligible), dtype=torch.bool)
    for mask, chosen in zip(masks, ids.tensor_split([num_train, num_train + num_val]), strict=True):
        mask[chosen] = True
    return Masks(*(mask.clone() for mask in masks))


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
