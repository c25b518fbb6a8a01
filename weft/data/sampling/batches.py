"""The order of an epoch's training vertices, and the keys that its batches draw by."""

from __future__ import annotations

from torch import Tensor

from weft.core.random import key, keyed_words

ORDER, DRAW = 0x6F72646572, 0x64726177  # so that no two purposes share a key


def epoch_batches(
    train_ids: Tensor, batch_size: int, *, seed: int, epoch: int, ids: Tensor | None = None
) -> list[Tensor]:
    """The training vertices in a random order, cut into batches, each of which ascends; the last may be shorter.

    Args:
        train_ids: int64 [t], distinct.
        ids: int64 [N], original ids that key the order (Graph.ids); None: the vertices' own numbers.

    Returns:
        int64 tensors; the same on all ranks, and however the graph is numbered but for their order within a batch.
        ValueError where batch_size is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: give 1 or more")
    named = train_ids if ids is None else ids[train_ids]
    order = keyed_words(key(seed, ORDER, epoch), named).argsort()  # distinct ids have distinct words
    return [batch.sort().values for batch in train_ids[order].split(batch_size)] if len(train_ids) else []


def layer_key(seed: int, epoch: int, batch: int, hop: int) -> int:
    """The 64-bit key of one hop's draws in one batch; `batch` counts from 0 in each epoch, `hop` from the batch out."""
    return key(seed, DRAW, epoch, batch, hop)
