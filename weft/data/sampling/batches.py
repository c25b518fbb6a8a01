"""Order of an epoch's training examples, and the keys of the random choices in its batches."""

from __future__ import annotations

from torch import Tensor

from weft.utils.random import key, keyed_words

ORDER, DRAW = 0x6F72646572, 0x64726177
"""Parts of the keys, so that the order of examples and the sampling of edges never share a key."""


def epoch_batches(
    examples: Tensor, batch_size: int, *, seed: int, epoch: int, ids: Tensor | None = None
) -> list[Tensor]:
    """Return the training examples in a random order, cut into batches; the last one may be smaller.

    The batches are the same on all ranks. Renumbering the vertices only changes the order within a batch.

    Args:
        examples: Distinct vertices int64 [t], or links int64 [t, 3] as rows (source, target, relation).
        batch_size: Number of examples of a batch.
        seed: Seed of the run.
        epoch: Number of the epoch.
        ids: Original ids int64 [N] that key the order (Graph.ids); None: the vertices' numbers.

    Returns:
        Examples of each batch, in the order of `examples`.

    Raises:
        ValueError: If batch_size is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: give 1 or more")
    columns = (examples,) if examples.dim() == 1 else examples.unbind(1)
    if ids is not None:
        columns = *(ids[vertices] for vertices in columns[:2]), *columns[2:]
    order = keyed_words(key(seed, ORDER, epoch), *columns).argsort()  # distinct vertices have distinct random words
    return [examples[batch.sort().values] for batch in order.split(batch_size)] if len(examples) else []


def layer_key(seed: int, epoch: int, batch: int, hop: int) -> int:
    """Return the 64-bit key of the sampling at one hop of one batch.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch.
        batch: Number of the batch in the epoch, from 0.
        hop: Number of the hop, counted from the batch outwards.
    """
    return key(seed, DRAW, epoch, batch, hop)
