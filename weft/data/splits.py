"""Seeded random splits, features and labels, for graphs that come without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.random import key
from weft.data.graph import Graph

TRAIN_SHARE, VAL_SHARE = 0.6, 0.2

# What a random stream is for: part of its key, so that no two purposes share a stream.
SPLIT, FEATURES, CLASSES, RMAT, SBM, DIGITS = range(1, 7)


def stream(seed: int, *purpose: int) -> np.random.Generator:
    """A random generator of its own for a seed and a purpose."""
    return np.random.Generator(np.random.Philox(key(seed, *purpose)))


def random_split(eligible: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Train, validation and test masks, bool [N]: 60, 20 and 20 per cent of the vertices where `eligible` holds."""
    ids = eligible.nonzero()[:, 0]
    ids = ids[torch.from_numpy(stream(seed, SPLIT).permutation(len(ids)))]
    num_train, num_val = round(TRAIN_SHARE * len(ids)), round(VAL_SHARE * len(ids))
    masks = torch.zeros(3, len(eligible), dtype=torch.bool)
    for mask, chosen in zip(masks, ids.tensor_split([num_train, num_train + num_val]), strict=True):
        mask[chosen] = True
    return masks[0].clone(), masks[1].clone(), masks[2].clone()


def split_labelled(y: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A random split over the labelled vertices: all of them where y is [N, C]."""
    return random_split(y >= 0 if y.dim() == 1 else torch.ones(len(y), dtype=torch.bool), seed)


def random_matrix(rows: int, columns: int, seed: int, part: int = 0) -> Tensor:
    """Standard normal float32 [rows, columns]."""
    return torch.from_numpy(stream(seed, FEATURES, part).standard_normal((rows, columns), dtype=np.float32))


def balanced_classes(num_vertices: int, num_classes: int, seed: int) -> Tensor:
    """Random labels, int64 [N], every class as often as every other (give or take one)."""
    return torch.from_numpy(stream(seed, CLASSES).permutation(np.arange(num_vertices, dtype=np.int64) % num_classes))


def placed(drawn: Tensor, graph: Graph) -> Tensor:
    """What was drawn for the vertices as they were first numbered, in the order in which the graph has them."""
    return drawn if graph.ids is None else drawn[graph.ids]


def with_random_features(graph: Graph, width: int, seed: int) -> Graph:
    """The graph with standard normal features of `width` columns where it has none.

    All vertices get them, or those vertex types that lack any. Raises InputError if nothing is lacking.
    """
    if not graph.features and graph.x is None:
        return replace(graph, x=placed(random_matrix(graph.num_vertices, width, seed), graph), trusted=True)
    lacking = [] if graph.x is not None else [name for name in graph.vertex_types if name not in graph.features]
    if not lacking:
        raise InputError(f"{graph.name} has features of its own: leave out --random-features")
    drawn = {
        name: random_matrix(len(graph.type_range(name)), width, seed, 1 + graph.vertex_types.index(name))
        for name in lacking
    }
    return replace(graph, features={**graph.features, **drawn}, trusted=True)


def with_random_classes(graph: Graph, num_classes: int, seed: int) -> Graph:
    """The graph with random labels and a random 60/20/20 split. Raises InputError if it has labels."""
    if graph.y is not None:
        raise InputError(f"{graph.name} has labels of its own: leave out --random-classes")
    y = balanced_classes(graph.num_vertices, num_classes, seed)
    drawn = (y, *random_split(torch.ones(len(y), dtype=torch.bool), seed))
    y, train, val, test = (placed(tensor, graph) for tensor in drawn)
    return replace(graph, y=y, train_mask=train, val_mask=val, test_mask=test, trusted=True)


def with_normalized_features(graph: Graph) -> Graph:
    """A copy whose rows of x have absolute values that sum to 1; a row of zeros stays. InputError without x."""
    if graph.x is None:
        raise InputError(f"{graph.name} has no features to normalize: leave out --normalize-features")
    total = graph.x.abs().sum(1, keepdim=True)
    return replace(graph, x=graph.x / total.where(total > 0, 1.0))
