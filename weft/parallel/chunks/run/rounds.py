"""Rounds: chunks of a rank, the rows that move before and after each, and the buffer slot of every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.partition import Hop

MAX_ROWS_PER_EDGE = 2  # limit of `pays_in_place`
EMPTY_ROWS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """One chunk of a rank, with the rows and gradients that move before and after it.

    Rows are counted as sources of the block: first the local rows, then the rows of other ranks. Index tensors are
    int32 or int64.

    With shared loads, ranks exchange rows and gradients between their slots. Without, `send_rows` and `recv_grads` are
    local row numbers: rows are read from the host of their owner, and gradients are written there.
    """

    targets: slice
    """Local rows that the chunk computes."""
    edges: slice
    """Edges into the targets, as a range of the block's edges."""
    indices: Tensor
    """Slot of each edge's source, [e], in the dtype of the block's `indices`."""
    target_slots: Tensor
    """Slot of each target's own row, [n]; empty if targets are not read."""
    slot_sources: Tensor
    """Source number of the row in each slot, [slots]; -1 for a free slot."""
    in_place: bool = False
    """True if rows are read, and gradients added, where they are stored: slot i is row i, and nothing moves."""
    load: Tensor = EMPTY_ROWS
    """Local rows to load from the host before the round, ascending."""
    load_slots: Tensor = EMPTY_ROWS
    """Destination slot of each loaded row."""
    recv_row_slots: Tensor = EMPTY_ROWS
    """Destination slot of each row from another rank, grouped by owner, ascending within each owner."""
    recv_row_counts: tuple[int, ...] = (0,)
    """Number of rows to receive from each rank."""
    send_rows: Tensor = EMPTY_ROWS
    """Slots of the local rows to send, grouped by receiving rank; read after `load` has arrived."""
    send_row_counts: tuple[int, ...] = (0,)
    """Number of rows to send to each rank."""
    write_back: Tensor = EMPTY_ROWS
    """Local rows whose gradients are added to those on the host after the round."""
    write_back_slots: Tensor = EMPTY_ROWS
    """Slot of each row of `write_back`."""
    send_grad_slots: Tensor = EMPTY_ROWS
    """Slots of other ranks' rows whose gradients are sent to their owners after the round, by owner."""
    send_grad_counts: tuple[int, ...] = (0,)
    """Number of gradients to send to each rank."""
    recv_grads: Tensor = EMPTY_ROWS
    """Slots of the local rows whose gradients other ranks send, grouped by sender."""
    recv_grad_counts: tuple[int, ...] = (0,)
    """Number of gradients to receive from each rank."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The rounds of one rank in order, and the size of its buffer."""

    num_slots: int
    """Number of slots of the buffer."""
    rounds: tuple[Round, ...]
    """Rounds in the order in which they run."""


def pays_in_place(hop: Hop, count: int) -> bool:
    """Return True if chunks should read rows where they are stored instead of copying them into slots.

    Each chunk then passes over all rows (of the gradients), which costs more the more chunks there are.

    Args:
        hop: Aggregate that is split into chunks.
        count: Number of chunks.
    """
    return count * hop.num_inputs <= MAX_ROWS_PER_EDGE * hop.block.num_edges


def in_place(hop: Hop, bounds: Sequence[int]) -> Schedule:
    """Return the rounds of a single rank that reads all rows where they are stored.

    Args:
        hop: Aggregate that is split into chunks.
        bounds: Boundaries of the ranges of targets, [chunks + 1].
    """
    edges = hop.block.indptr[torch.tensor(bounds, dtype=torch.int64)].tolist()
    all_rows = torch.arange(hop.num_inputs)
    rounds = tuple(
        Round(
            targets=slice(*targets),
            edges=slice(*chunk_edges),
            indices=hop.block.indices[slice(*chunk_edges)],
            target_slots=torch.arange(*targets),
            slot_sources=all_rows,
            in_place=True,
        )
        for targets, chunk_edges in zip(pairwise(bounds), pairwise(edges), strict=True)
    )
    return Schedule(num_slots=hop.num_inputs, rounds=rounds)
