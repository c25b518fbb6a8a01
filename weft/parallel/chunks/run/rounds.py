"""Rounds: chunks of a rank, the rows that move before and after each, and the buffer slot of every row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.partition import Hop

MAX_ROWS_PER_EDGE = 2  # limit of `pays_in_place`
EMPTY_ROWS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class RoundSizes:
    """Sizes of one round of a rank."""

    targets: slice
    """Local rows that the chunk computes."""
    edges: slice
    """Edges into the targets, as a range of the block's edges."""
    in_place: bool = False
    """True if rows are read, and gradients added, where they are stored: slot i is row i, and nothing moves."""
    num_loads: int = 0
    """Number of local rows to load from the host before the round."""
    num_write_backs: int = 0
    """Number of local rows whose gradients are added to those on the host after the round."""
    recv_row_counts: tuple[int, ...] = (0,)
    """Number of rows to receive from each rank."""
    send_row_counts: tuple[int, ...] = (0,)
    """Number of rows to send to each rank."""
    send_grad_counts: tuple[int, ...] = (0,)
    """Number of gradients to send to each rank."""
    recv_grad_counts: tuple[int, ...] = (0,)
    """Number of gradients to receive from each rank."""

    @property
    def num_targets(self) -> int:
        """Number of rows that the chunk computes."""
        return int(self.targets.stop - self.targets.start)

    @property
    def num_edges(self) -> int:
        """Number of edges into the targets."""
        return int(self.edges.stop - self.edges.start)

    @property
    def num_forward_ids(self) -> int:
        """Number of row numbers and slots that the forward pass reads."""
        return 2 * self.num_loads + sum(self.recv_row_counts) + sum(self.send_row_counts)

    @property
    def num_backward_ids(self) -> int:
        """Number of row numbers and slots that only the backward pass reads."""
        return 2 * self.num_write_backs + sum(self.send_grad_counts) + sum(self.recv_grad_counts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """One chunk of a rank, with the rows and gradients that move before and after it.

    Rows are counted as sources of the block: first the local rows, then the rows of other ranks. Index tensors are
    int32 or int64.

    With shared loads, ranks exchange rows and gradients between their slots. Without, `send_rows` and `recv_grads` are
    local row numbers: rows are read from the host of their owner, and gradients are written there.
    """

    sizes: RoundSizes
    """Chunk of the round, and number of rows that move."""
    indices: Tensor
    """Slot of each edge's source, [e], in the dtype of the block's `indices`."""
    target_slots: Tensor
    """Slot of each target's own row, [n]; empty if targets are not read."""
    slot_sources: Tensor
    """Source number of the row in each slot, [slots]; -1 for a free slot."""
    load: Tensor = EMPTY_ROWS
    """Local rows to load from the host before the round, ascending."""
    load_slots: Tensor = EMPTY_ROWS
    """Destination slot of each loaded row."""
    recv_row_slots: Tensor = EMPTY_ROWS
    """Destination slot of each row from another rank, grouped by owner, ascending within each owner."""
    send_rows: Tensor = EMPTY_ROWS
    """Slots of the local rows to send, grouped by receiving rank; read after `load` has arrived."""
    write_back: Tensor = EMPTY_ROWS
    """Local rows whose gradients are added to those on the host after the round, ascending."""
    write_back_slots: Tensor = EMPTY_ROWS
    """Slot of each row of `write_back`."""
    send_grad_slots: Tensor = EMPTY_ROWS
    """Slots of other ranks' rows whose gradients are sent to their owners after the round, by owner."""
    recv_grads: Tensor = EMPTY_ROWS
    """Slots of the local rows whose gradients other ranks send, grouped by sender."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The rounds of one rank in order, and the size of its buffer."""

    num_slots: int
    """Number of slots of the buffer."""
    sizes: Sequence[RoundSizes]
    """Sizes of the rounds."""
    make_rounds: Callable[[], Iterator[Round]]
    """Returns the rounds one after the other, since memory may not hold the index tensors of all of them."""

    @property
    def in_place(self) -> bool:
        """True if any round reads rows where they are stored, without slots."""
        return any(sizes.in_place for sizes in self.sizes)


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
    sizes = tuple(
        RoundSizes(targets=slice(*targets), edges=slice(*chunk_edges), in_place=True)
        for targets, chunk_edges in zip(pairwise(bounds), pairwise(edges), strict=True)
    )

    def make_rounds() -> Iterator[Round]:
        all_rows = torch.arange(hop.num_inputs)
        for each in sizes:
            indices, target_slots = hop.block.indices[each.edges], torch.arange(each.targets.start, each.targets.stop)
            yield Round(sizes=each, indices=indices, target_slots=target_slots, slot_sources=all_rows)

    return Schedule(num_slots=hop.num_inputs, sizes=sizes, make_rounds=make_rounds)
