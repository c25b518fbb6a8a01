"""The built-in graph: scikit-learn's handwritten digits, each joined to the most similar ones. Needs no network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from weft.data.edges import build
from weft.data.fields import GraphFields
from weft.data.splits import DIGITS, Masks, stream

NUM_NEIGHBOURS = 8
NUM_CLASSES = 10
TRAIN_PER_CLASS, NUM_VAL, NUM_TEST = 20, 300, 1000


def digits() -> GraphFields:
    """Return a graph of 1,797 digits of 8 x 8 pixels in 10 classes, each joined to its 8 nearest in both directions.

    Features are pixels scaled to [0, 1]. The split is fixed: 20 per class to train, 300 to validate, 1,000 to test.
    """
    from sklearn.datasets import load_digits  # imported only when needed, because it takes a second

    pixels, labels = load_digits(return_X_y=True)
    num_vertices = len(pixels)
    # Squared distance |a|^2 + |b|^2 - 2 a.b in whole numbers, so it is exact on every machine. Multiplied by N and with
    # the id added, ties go to the lower id.
    grey = pixels.astype(np.int64)
    squares = (grey * grey).sum(1)
    distance = squares[:, None] + squares[None, :] - 2 * (pixels @ pixels.T).astype(np.int64)
    np.fill_diagonal(distance, distance.max() + 1)
    ranking = distance * num_vertices + np.arange(num_vertices)
    nearest = np.argpartition(ranking, NUM_NEIGHBOURS, axis=1)[:, :NUM_NEIGHBOURS]
    is_edge = np.zeros((num_vertices, num_vertices), dtype=bool)
    is_edge[np.arange(num_vertices)[:, None], nearest] = True
    source, target = (is_edge | is_edge.T).nonzero()

    order = stream(0, DIGITS).permutation(num_vertices)
    train = np.concatenate([order[labels[order] == label][:TRAIN_PER_CLASS] for label in range(NUM_CLASSES)])
    rest = order[~np.isin(order, train)]
    masks = torch.zeros(3, num_vertices, dtype=torch.bool)
    for mask, vertices in zip(masks, (train, rest[:NUM_VAL], rest[NUM_VAL : NUM_VAL + NUM_TEST]), strict=True):
        mask[torch.from_numpy(vertices)] = True
    edges = build(torch.from_numpy(source), torch.from_numpy(target), num_vertices=num_vertices)
    return replace(
        edges,
        x=torch.from_numpy((pixels / 16).astype(np.float32)),
        y=torch.from_numpy(labels.astype(np.int64)),
        name="digits",
        **Masks(*(mask.clone() for mask in masks))._asdict(),
    )
