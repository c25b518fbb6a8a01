"""The order of an epoch's training examples, and the keys that its batches draw by."""

from __future__ import annotations

from torch import Tensor

from weft.utils.random import key, keyed_words

ORDER, DRAW = 0x6F72646572, 0x64726177  # so that no two purposes share a key


def epoch_batches(
    examples: Tensor, batch_size: int, *, seed: int, epoch: int, ids: Tensor | None = None
) -> list[Tensor]:
    """Vertices or links in a random order, cut into batches; the last may be shorter.

    Args:
        examples: distinct: int64 [t], vertices, or [t, 3], links as rows (source, target, relation).
        ids: int64 [N], original ids that key the order (Graph.ids); None: the vertices' own numbers.

    Returns:
        Some of the examples each, in their order; the same on all ranks, and however the graph is numbered but for the
        order within a batch. ValueError where batch_size is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: give 1 or more")
    columns = (examples,) if examples.dim() == 1 else examples.unbind(1)
    if ids is not None:
        columns = *(ids[one] for one in columns[:2]), *columns[2:]
    order = keyed_words(key(seed, ORDER, epoch), *columns).argsort()  # distinct vertices have distinct words
    return [examples[batch.sort().values] for batch in order.split(batch_size)] if len(examples) else []


def layer_key(seed: int, epoch: int, batch: int, hop: int) -> int:
    """The 64-bit key of one hop's draws in one batch; `batch` counts from 0 in each epoch, `hop` from the batch out."""
    return key(seed, DRAW, epoch, batch, hop)
