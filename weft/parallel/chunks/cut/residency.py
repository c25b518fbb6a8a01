"""What each rank holds while it works on its chunks: what it loads, gets, keeps, serves and gives back, and where.

(HongTu, sections 4.1, 5.1 to 5.3 and 6.) All ranks have as many chunks; those that run at the same time are a round. A
rank keeps the rows that its chunk reads, and its own that the other chunks of the round read, in one buffer; what two
rounds in a row need stays where it is, and so does what a later one needs while the slot is free. Every rank plans by
itself, from what it knows of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from weft.cost import Rates
from weft.parallel.chunks.cut.index_sets import Changes, Sets, Slots, assign_slots, join, places_of, starts_of
from weft.parallel.chunks.cut.ranges import RankSide, chunk_sources, same_count
from weft.parallel.chunks.run.rounds import NOTHING, Round, Schedule
from weft.partition.dependencies import Hop


@dataclass(frozen=True, kw_only=True)
class Volumes:
    """Rows that one pass of an aggregate moves, of all ranks together (section 5.3).

    neighbours: what the chunks read (V_ori). shared: where ranks share what they load (V_+p2p). kept: where they keep
    besides what the next round needs (V_+ru). fetched: what then crosses between ranks.
    """

    neighbours: int
    shared: int
    kept: int
    fetched: int

    def seconds(self, rates: Rates) -> float:
        """What moving them takes (equation 4)."""
        between, again = self.neighbours - self.shared, self.shared - self.kept
        return self.kept / rates.host + between / rates.ranks + again / rates.inplace


class Sides:
    """What the chunks of all ranks read, in the order of rounds: how much moves, and the rounds of any rank.

    bounds: of each rank's ranges of targets, as many of each. orders: for each rank which of them runs j-th; None: as
    they are. loops: a target reads its own row too. ahead: what a round loads arrives while the one before still needs
    all of its slots. ValueError where ranks differ in their number of chunks or an order is none. Every rank plans the
    same from all `parts`.
    """

    def __init__(
        self,
        parts: Sequence[RankSide],
        bounds: Sequence[Sequence[int]],
        *,
        loops: bool,
        orders: Sequence[Sequence[int]] | None = None,
        ahead: bool = True,
    ) -> None:
        num_chunks = same_count([len(each) - 1 for each in bounds])
        self.bounds, self.loops, self.ahead = bounds, loops, ahead
        self.orders = [range(num_chunks)] * len(parts) if orders is None else orders
        if any(sorted(order) != list(range(num_chunks)) for order in self.orders):
            raise ValueError(f"each order must hold all chunks from 0 to {num_chunks - 1} once")
        starts = [[0, *_owner_ends(part.hop)] for part in parts]
        self._sides = []
        for part, cuts, order, begins in zip(parts, bounds, self.orders, starts, strict=True):
            sources = chunk_sources(part.hop.block, cuts, loops=loops)
            asked = [
                owner.places(part.hop.fetched[first:end])
                for owner, (first, end) in zip(parts, pairwise(begins), strict=True)
            ]
            self._sides.append(_Side(part.hop, Sets.of([sources[chunk] for chunk in order]), join(asked)))

    @cached_property
    def volumes(self) -> Volumes:
        """Those of all ranks, however they share and keep."""
        return Volumes(
            neighbours=sum(len(side.sources.numbers) for side in self._sides),
            shared=sum(len(transit.numbers) for transit in self._transits),
            kept=sum(int(self._lasting(rank, each).changes.fresh.sum()) for rank, each in enumerate(self._transits)),
            fetched=sum(int(side.remote.changes.fresh.sum()) for side in self._sides),
        )

    def schedule(self, rank: int, *, share: bool = True, keep: bool = True) -> Schedule:
        """The rounds of one rank.

        Args:
            share: a row that several chunks of a round read is loaded by its owner, who serves the others.
            keep: what the next round needs as well stays where it is, and local rows that later rounds need while no
                other row needs the slot.
        """
        here, bounds, order = self._sides[rank], self.bounds[rank], self.orders[rank]
        local = self._transits[rank] if share else here.local
        held = (self._lasting(rank, local) if keep else local).followed_by(here.remote, here.hop.num_inputs)
        changes = held.changes if keep else Changes(*torch.ones(2, len(held.numbers), dtype=torch.bool))
        slots = assign_slots(held, changes, here.hop.block, bounds, order, ahead=self.ahead, own=self.loops)
        requests = [(side.fresh, side.leaving) if keep else (side.pieces, side.pieces) for side in self._sides]
        rounds = _rounds(here.hop, rank, requests, held, changes, slots, bounds, order, share=share)
        return Schedule(num_slots=slots.size, rounds=rounds)

    def _lasting(self, rank: int, local: Sets) -> Sets:
        """The local rows that a rank's rounds hold, those that wait for later ones among them: no slot is added."""
        taken = local.sizes(ahead=self.ahead) + self._sides[rank].remote.sizes(ahead=self.ahead)
        return local.lasting(taken.max() - taken, self._sides[rank].hop.num_inputs, ahead=self.ahead)

    @cached_property
    def _transits(self) -> list[Sets]:
        """What each rank loads for all (section 5.1): local rows that its own or another chunk of the round reads."""
        if len(self._sides) == 1:
            return [self._sides[0].local]
        transits = []
        for rank, side in enumerate(self._sides):
            wanted = [
                [local, *(each.pieces[round_ * len(self._sides) + rank] for each in self._sides)]
                for round_, local in enumerate(side.local.split(side.local.numbers))
            ]
            starts = starts_of([sum(len(rows) for rows in each) for each in wanted])
            values = join([rows for each in wanted for rows in each])
            transits.append(Sets.of_groups(values, starts, side.hop.num_inputs))
        return transits


class _Side:
    """What the chunks of one rank read, in the order of rounds.

    sources: of each round. asked: int64 [h], where the owner of each fetched vertex has it among its own.
    """

    def __init__(self, hop: Hop, sources: Sets, asked: Tensor) -> None:
        local = sources.numbers < hop.num_inputs
        self.hop, self.sources, self._asked = hop, sources, asked
        self.local = sources.where(local)
        remote = sources.where(~local)
        self.remote = Sets(numbers=remote.numbers - hop.num_inputs, starts=remote.starts)

    @cached_property
    def pieces(self) -> Sets:
        """What each round needs of each owner, as the owner's rows: by round and then owner."""
        begins = torch.tensor([0, *_owner_ends(self.hop)[:-1]])
        rounds = zip(self.remote.split(self.remote.numbers), self.remote.starts[:-1], strict=True)
        starts = [first + torch.searchsorted(numbers, begins) for numbers, first in rounds]
        return Sets(numbers=self._asked[self.remote.numbers], starts=join([*starts, self.remote.starts[-1:]]))

    @cached_property
    def fresh(self) -> Sets:
        """Of these, what the round before does not need."""
        return self.pieces.where(self.remote.changes.fresh)

    @cached_property
    def leaving(self) -> Sets:
        """And what the round after does not."""
        return self.pieces.where(self.remote.changes.leaving)


def _rounds(
    hop: Hop,
    rank: int,
    requests: Sequence[tuple[Sets, Sets]],
    held: Sets,
    changes: Changes,
    slots: Slots,
    bounds: Sequence[int],
    order: Sequence[int],
    *,
    share: bool,
) -> tuple[Round, ...]:
    """The rounds of one rank, from what it holds in each.

    requests: what each rank fetches before each round, and gives after it, by round and then owner.
    """
    local = held.numbers < hop.num_inputs
    ours, theirs = ([places_of(change & mask) for change in changes] for mask in (local, ~local))
    load, flush = (held.split(held.numbers, places) for places in ours)
    load_slots, flush_slots = (held.split(slots.slots, places) for places in ours)
    fetch_slots, give_slots = (held.split(slots.slots, places) for places in theirs)
    fetches, gives = zip(*requests, strict=True)
    place = torch.empty(hop.num_inputs, dtype=torch.int64)  # the slot of each local row that the round holds
    edges = hop.block.indptr[torch.tensor(bounds, dtype=torch.int64)].tolist()
    rounds = []
    for j, (numbers, numbers_slots) in enumerate(zip(held.split(held.numbers), held.split(slots.slots), strict=True)):
        targets = slice(bounds[order[j]], bounds[order[j] + 1])
        its_edges = slice(edges[order[j]], edges[order[j] + 1])
        num_local = int(torch.searchsorted(numbers, hop.num_inputs))
        place[numbers[:num_local]] = numbers_slots[:num_local]
        owners = range(j * len(requests), (j + 1) * len(requests))
        served, taken = ([each[owners[rank]] for each in asked] for asked in (fetches, gives))
        serve, take = join(served), join(taken)
        rounds.append(
            Round(
                targets=targets,
                edges=its_edges,
                indices=slots.indices[its_edges],
                own_slots=NOTHING if slots.own is None else slots.own[targets],
                held=numbers.new_full((slots.size,), -1).index_copy_(0, numbers_slots, numbers),
                load=load[j],
                load_slots=load_slots[j],
                fetch_slots=fetch_slots[j],
                fetch_counts=_lengths([fetches[rank][owner] for owner in owners]),
                serve=place[serve] if share else serve,
                serve_counts=_lengths(served),
                flush=flush[j],
                flush_slots=flush_slots[j],
                give_slots=give_slots[j],
                give_counts=_lengths([gives[rank][owner] for owner in owners]),
                take=place[take] if share else take,
                take_counts=_lengths(taken),
            )
        )
    return tuple(rounds)


def _lengths(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(len(each) for each in tensors)


def _owner_ends(hop: Hop) -> list[int]:
    """Where each owner's vertices end among those fetched."""
    return starts_of(hop.received)[1:].tolist()
