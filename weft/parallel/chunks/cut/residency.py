"""Rounds of all ranks: which rows each rank loads, receives, keeps in its buffer, sends and writes back.

Source: HongTu, sections 4.1, 5.1 to 5.3 and 6. All ranks have the same number of chunks; chunks that run at the same
time are a round. A rank has one buffer for the rows that its chunk reads and for its own rows that other chunks of the
round read. Rows that the next round needs too keep their slot. Rows that a later round needs keep it while no other row
needs the slot. Every rank computes its rounds by itself from the chunks of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from weft.cost import Rates
from weft.parallel.chunks.cut.index_sets import Delta, IndexSets, Slots, assign_slots, join, positions_of, starts_of
from weft.parallel.chunks.cut.ranges import RankHop, chunk_sources, same_count
from weft.parallel.chunks.run.rounds import EMPTY_ROWS, Round, Schedule
from weft.partition.dependencies import Hop
from weft.runtime import native


@dataclass(frozen=True, kw_only=True)
class Volumes:
    """Number of rows that one pass of an aggregate moves, all ranks together (HongTu, section 5.3)."""

    neighbours: int
    """Distinct sources of all chunks (V_ori)."""
    shared: int
    """Rows to load if ranks share what they load (V_+p2p)."""
    loaded: int
    """Rows to load if ranks share what they load, and rows stay in the buffer between rounds (V_+ru)."""
    fetched: int
    """Rows that ranks send to each other if they share what they load, and rows stay in the buffer."""

    def seconds(self, rates: Rates) -> float:
        """Return the seconds that moving the rows takes (equation 4).

        Args:
            rates: Rows per second from the host, between ranks, and within the device.
        """
        # Loaded rows come from the host. Rows that another rank loads come from there (between). Rows that are still in
        # the buffer are read again on the device (again).
        between, again = self.neighbours - self.shared, self.shared - self.loaded
        return self.loaded / rates.host + between / rates.ranks + again / rates.inplace

    def as_record(self) -> dict[str, int]:
        """Return the numbers by the names that run records use for them."""
        return {
            "neighbours": self.neighbours,
            "shared": self.shared,
            "kept": self.loaded,
            "fetched": self.fetched,
        }


class ChunkSources:
    """Rows that the chunks of all ranks read in each round; computes volumes and the rounds of any rank.

    All ranks compute the same result from the same `parts`.

    Args:
        parts: The aggregate of each rank.
        bounds: Boundaries of each rank's ranges of targets; the same number for all ranks.
        loops: Targets read their own rows too.
        orders: For each rank, the number of the chunk that runs j-th; None: ascending.
        ahead: Rows of the next round arrive while a round still needs all of its slots.

    Raises:
        ValueError: If ranks differ in their number of chunks, or an order is not a permutation.
    """

    def __init__(
        self,
        parts: Sequence[RankHop],
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
            raise ValueError(f"each order must contain all chunks from 0 to {num_chunks - 1} once")
        starts = [[0, *_owner_ends(part.hop)] for part in parts]
        self._ranks = []
        for part, cuts, order, begins in zip(parts, bounds, self.orders, starts, strict=True):
            sources = chunk_sources(part.hop.block, cuts, loops=loops)
            rows_at_owner = [
                owner.rows_of(part.hop.fetched[first:end])
                for owner, (first, end) in zip(parts, pairwise(begins), strict=True)
            ]
            self._ranks.append(
                _RankSources(part.hop, IndexSets.of([sources[chunk] for chunk in order]), join(rows_at_owner))
            )

    @cached_property
    def volumes(self) -> Volumes:
        """Rows that one pass moves, summed over all ranks."""
        return Volumes(
            neighbours=sum(len(one_rank.sources.numbers) for one_rank in self._ranks),
            shared=sum(len(loads.numbers) for loads in self._shared_loads),
            loaded=sum(
                int(self._retaining(rank, loads).delta.fresh.sum()) for rank, loads in enumerate(self._shared_loads)
            ),
            fetched=sum(int(one_rank.remote.delta.fresh.sum()) for one_rank in self._ranks),
        )

    def schedule(self, rank: int, *, share: bool = True, keep: bool = True) -> Schedule:
        """Return the rounds of one rank.

        Args:
            rank: Rank whose rounds to compute.
            share: A row that several chunks of a round read is loaded once, by its owner, which sends it to the others.
            keep: Rows that the next round needs keep their slots, and so do local rows that later rounds need while
                their slots are free.
        """
        this_rank, bounds, order = self._ranks[rank], self.bounds[rank], self.orders[rank]
        local = self._shared_loads[rank] if share else this_rank.local
        resident = (self._retaining(rank, local) if keep else local).followed_by(
            this_rank.remote, this_rank.hop.num_inputs
        )
        delta = resident.delta if keep else Delta(*torch.ones(2, len(resident.numbers), dtype=torch.bool))
        slots = assign_slots(resident, delta, this_rank.hop.block, bounds, order, ahead=self.ahead, loops=self.loops)
        requests = [
            (sources.fresh, sources.leaving) if keep else (sources.pieces, sources.pieces) for sources in self._ranks
        ]
        rounds = _rounds(this_rank.hop, rank, requests, resident, delta, slots, bounds, order, share=share)
        return Schedule(num_slots=slots.size, rounds=rounds)

    def _retaining(self, rank: int, local: IndexSets) -> IndexSets:
        """Return the local rows in the buffer per round, with those that wait for a later round; adds no slot."""
        used_slots = local.sizes(ahead=self.ahead) + self._ranks[rank].remote.sizes(ahead=self.ahead)
        return local.retaining(used_slots.max() - used_slots, self._ranks[rank].hop.num_inputs, ahead=self.ahead)

    @cached_property
    def _shared_loads(self) -> list[IndexSets]:
        """Local rows that each rank loads per round for all ranks (HongTu, section 5.1).

        These are the rows that its own chunk or another chunk of the round reads.
        """
        if len(self._ranks) == 1:
            return [self._ranks[0].local]
        result = []
        for rank, owner in enumerate(self._ranks):
            wanted_rows = [
                [local, *(reader.pieces[round_ * len(self._ranks) + rank] for reader in self._ranks)]
                for round_, local in enumerate(owner.local.split(owner.local.numbers))
            ]
            starts = starts_of([sum(len(rows) for rows in each) for each in wanted_rows])
            values = join([rows for each in wanted_rows for rows in each])
            result.append(IndexSets.of_groups(values, starts, owner.hop.num_inputs))
        return result


class _RankSources:
    """Rows that the chunks of one rank read, in the order of rounds.

    Args:
        hop: The aggregate of the rank.
        sources: Source numbers that each round reads.
        rows_at_owner: For each fetched vertex, its row number on the rank that owns it, int64 [h].
    """

    def __init__(self, hop: Hop, sources: IndexSets, rows_at_owner: Tensor) -> None:
        local = sources.numbers < hop.num_inputs
        self.hop, self.sources, self._rows_at_owner = hop, sources, rows_at_owner
        self.local = sources.select(local)
        remote = sources.select(~local)
        self.remote = IndexSets(numbers=remote.numbers - hop.num_inputs, starts=remote.starts)

    @cached_property
    def pieces(self) -> IndexSets:
        """Rows that each round needs from each owner, as row numbers of the owner: by round, then by owner."""
        begins = torch.tensor([0, *_owner_ends(self.hop)[:-1]])
        rounds = zip(self.remote.split(self.remote.numbers), self.remote.starts[:-1], strict=True)
        starts = [first + torch.searchsorted(numbers, begins) for numbers, first in rounds]
        return IndexSets(
            numbers=self._rows_at_owner[self.remote.numbers], starts=join([*starts, self.remote.starts[-1:]])
        )

    @cached_property
    def fresh(self) -> IndexSets:
        """Rows of `pieces` that the previous round does not need: they are received before the round."""
        return self.pieces.select(self.remote.delta.fresh)

    @cached_property
    def leaving(self) -> IndexSets:
        """Rows of `pieces` that the next round does not need: their gradients are sent after the round."""
        return self.pieces.select(self.remote.delta.leaving)


def _rounds(
    hop: Hop,
    rank: int,
    requests: Sequence[tuple[IndexSets, IndexSets]],
    resident: IndexSets,
    delta: Delta,
    slots: Slots,
    bounds: Sequence[int],
    order: Sequence[int],
    *,
    share: bool,
) -> tuple[Round, ...]:
    """Return the rounds of one rank.

    Steps:

    1. Split the arriving and leaving rows of each round into local and remote ones, and find their slots.
    2. For each round, find the local rows that other ranks receive, and those whose gradients they send.

    Args:
        hop: The aggregate of the rank.
        rank: The rank.
        requests: For each rank, the rows that it receives before each round, and the rows whose gradients it sends
            after the round; both by round, then by owner.
        resident: Source numbers in the buffer in each round.
        delta: Rows that arrive before and leave after each round.
        slots: Slots of all rows.
        bounds: Boundaries of the ranges of targets.
        order: Number of the chunk that runs j-th.
        share: Ranks exchange rows between their slots, not from their hosts.
    """
    dtype = native.id_dtype(max(hop.block.num_sources, slots.size))
    received_rows, sent_grads = zip(*requests, strict=True)
    slot_of = torch.empty(hop.num_inputs, dtype=dtype)  # slot of each local row that is in the buffer
    edges = hop.block.indptr[torch.tensor(bounds, dtype=torch.int64)].tolist()
    by_number = resident.numbers, slots.slots, delta.fresh, delta.leaving
    rounds = []
    for j, (numbers, slots_of_set, fresh, leaving) in enumerate(zip(*map(resident.split, by_number), strict=True)):
        numbers, row_slots = numbers.to(dtype), slots_of_set.to(dtype)  # in half the bytes
        targets = slice(bounds[order[j]], bounds[order[j] + 1])
        chunk_edges = slice(edges[order[j]], edges[order[j] + 1])
        num_local = int(torch.searchsorted(numbers, hop.num_inputs))
        slot_of[numbers[:num_local]] = row_slots[:num_local]
        load, write_back = (positions_of(change[:num_local]) for change in (fresh, leaving))
        received, sent_back = (num_local + positions_of(change[num_local:]) for change in (fresh, leaving))
        owners = range(j * len(requests), (j + 1) * len(requests))
        rows_by_rank, grads_by_rank = (
            [each[owners[rank]] for each in request] for request in (received_rows, sent_grads)
        )
        send_rows, recv_grads = join(rows_by_rank), join(grads_by_rank)
        rounds.append(
            Round(
                targets=targets,
                edges=chunk_edges,
                indices=slots.indices[chunk_edges],
                target_slots=EMPTY_ROWS if slots.target_slots is None else slots.target_slots[targets],
                slot_sources=numbers.new_full((slots.size,), -1).index_copy_(0, slots_of_set, numbers),
                load=numbers[load],
                load_slots=row_slots[load],
                recv_row_slots=row_slots[received],
                recv_row_counts=_lengths([received_rows[rank][owner] for owner in owners]),
                send_rows=slot_of[send_rows] if share else send_rows,
                send_row_counts=_lengths(rows_by_rank),
                write_back=numbers[write_back],
                write_back_slots=row_slots[write_back],
                send_grad_slots=row_slots[sent_back],
                send_grad_counts=_lengths([sent_grads[rank][owner] for owner in owners]),
                recv_grads=slot_of[recv_grads] if share else recv_grads,
                recv_grad_counts=_lengths(grads_by_rank),
            )
        )
    return tuple(rounds)


def _lengths(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(len(each) for each in tensors)


def _owner_ends(hop: Hop) -> list[int]:
    """Return the end of each owner's vertices among the fetched vertices."""
    return starts_of(hop.received)[1:].tolist()
