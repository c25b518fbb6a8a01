"""A chunk of a rank as it runs: what moves before and after it, and which slot of the rank's buffer has which row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.partition import Hop

IN_PLACE = 2  # chunks that read rows where they are pass over them so many times an edge at most


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """A chunk of this rank, and what moves before and after it. Numbers are the block's sources; tensors are int64.

    targets: its local rows. edges: its part of the block's. indices: as the block's [e], the slot
    of each edge's source. own_slots: [n], those of the targets' own rows, or empty. held: [slots], the number that
    each slot holds, -1 for none.

    load, load_slots: the local rows that come from the host, ascending, and where to. fetch_slots, fetch_counts: where
    remote rows arrive, by owner, ascending in each, and how many of each rank. serve, serve_counts: what each rank
    fetches of this one, in its order: the slots that local rows are in once those of `load` are.

    flush, flush_slots: the local rows that leave after the round. give_slots, give_counts: the remote rows that do, by
    owner; take, take_counts: the slots of the local rows that others give back to this rank, by giver.

    Where ranks do not share, rows come from their owners' hosts, and go there: serve and take are local rows then.
    """

    targets: slice
    edges: slice
    indices: Tensor
    own_slots: Tensor
    held: Tensor
    load: Tensor
    load_slots: Tensor
    fetch_slots: Tensor
    fetch_counts: tuple[int, ...]
    serve: Tensor
    serve_counts: tuple[int, ...]
    flush: Tensor
    flush_slots: Tensor
    give_slots: Tensor
    give_counts: tuple[int, ...]
    take: Tensor
    take_counts: tuple[int, ...]
    in_place: bool = False
    """Whether rows are read, and gradients added, where they are: slot i is row i, and nothing moves."""


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
    held, nothing, none = torch.arange(hop.num_inputs), torch.empty(0, dtype=torch.int64), (0,)
    rounds = tuple(
        Round(
            targets=slice(*targets),
            edges=slice(*its_edges),
            indices=hop.block.indices[slice(*its_edges)],
            own_slots=torch.arange(*targets),
            held=held,
            load=nothing,
            load_slots=nothing,
            fetch_slots=nothing,
            fetch_counts=none,
            serve=nothing,
            serve_counts=none,
            flush=nothing,
            flush_slots=nothing,
            give_slots=nothing,
            give_counts=none,
            take=nothing,
            take_counts=none,
            in_place=True,
        )
        for targets, its_edges in zip(pairwise(bounds), pairwise(edges), strict=True)
    )
    return Schedule(num_slots=hop.num_inputs, rounds=rounds)
