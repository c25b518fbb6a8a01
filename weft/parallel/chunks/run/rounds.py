"""A chunk of a rank as it runs: what moves before and after it, and which slot of the rank's buffer has which row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.partition import Hop

IN_PLACE = 2  # chunks that read rows where they are pass over them so many times an edge at most


NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """A chunk of this rank, and what moves before and after it. Numbers are the block's sources; tensors are int64.

    Where ranks do not share, rows come from their owners' hosts, and go there: serve and take are local rows then.
    """

    targets: slice
    """Its local rows."""
    edges: slice
    """Its part of the block's."""
    indices: Tensor
    """As the block's [e], the slot of each edge's source."""
    own_slots: Tensor
    """[n], those of the targets' own rows, or empty."""
    held: Tensor
    """[slots], the number that each slot holds, -1 for none."""
    in_place: bool = False
    """Whether rows are read, and gradients added, where they are: slot i is row i, and nothing moves."""
    load: Tensor = NOTHING
    """The local rows that come from the host, ascending."""
    load_slots: Tensor = NOTHING
    """Where to."""
    fetch_slots: Tensor = NOTHING
    """Where remote rows arrive, by owner, ascending in each."""
    fetch_counts: tuple[int, ...] = (0,)
    """How many of each rank."""
    serve: Tensor = NOTHING
    """What each rank fetches of this one, in its order: the slots that local rows are in once those of `load` are."""
    serve_counts: tuple[int, ...] = (0,)
    flush: Tensor = NOTHING
    """The local rows that leave after the round."""
    flush_slots: Tensor = NOTHING
    """Where from."""
    give_slots: Tensor = NOTHING
    """The remote rows that leave, by owner."""
    give_counts: tuple[int, ...] = (0,)
    take: Tensor = NOTHING
    """The slots of the local rows that others give back to this rank, by giver."""
    take_counts: tuple[int, ...] = (0,)


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A rank's rounds, in order, and the slots of its buffer."""

    num_slots: int
    rounds: tuple[Round, ...]


def pays_in_place(hop: Hop, count: int) -> bool:
    """Whether so many chunks, each of which passes over all rows, had better read them where they are."""
    return count * hop.num_inputs <= IN_PLACE * hop.block.num_edges


def in_place(hop: Hop, bounds: Sequence[int]) -> Schedule:
    """The rounds of a rank alone whose rows are in the memory that it works in."""
    edges = hop.block.indptr[torch.tensor(bounds, dtype=torch.int64)].tolist()
    held = torch.arange(hop.num_inputs)
    rounds = tuple(
        Round(
            targets=slice(*targets),
            edges=slice(*its_edges),
            indices=hop.block.indices[slice(*its_edges)],
            own_slots=torch.arange(*targets),
            held=held,
            in_place=True,
        )
        for targets, its_edges in zip(pairwise(bounds), pairwise(edges), strict=True)
    )
    return Schedule(num_slots=hop.num_inputs, rounds=rounds)
