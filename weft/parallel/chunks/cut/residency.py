"""Rounds of all ranks: which rows each rank loads, receives, keeps in its buffer, sends and writes back.

Source: HongTu, sections 4.1, 5.1 to 5.3 and 6. All ranks have the same number of chunks; chunks that run at the same
time are a round. A rank has one buffer for the rows that its chunk reads and for its own rows that other chunks of the
round read. Rows that the next round needs too keep their slot. Rows that a later round needs keep it while no other row
needs the slot. Every rank computes its rounds by itself from the chunks of all ranks.

A graph may be larger than memory, so rounds are computed one after the other, from a file of the rows that each chunk
reads: memory holds 8 bytes per row, and the rows and edges of a few chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from weft.cost import Rates
from weft.parallel.chunks.cut.ranges import RankHop, chunk_sources, distinct_groups, join, same_count, starts_of
from weft.parallel.chunks.run.rounds import EMPTY_ROWS, Round, RoundSizes, Schedule
from weft.runtime import native
from weft.runtime.native import _native
from weft.storage.unnamed_files import ArrayFile, ArrayMemory, ArrayRef

NEVER = 2**31 - 1
"""Next round of a row that no later round reads; see csrc/schedule.h."""


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


class Needs(NamedTuple):
    """Local rows that a rank loads for each round, in advance of its first round."""

    counts: list[int]
    """Number of these rows, by round."""
    all_counts: list[int]
    """Number of all rows that the rank needs in each round, with those of other ranks."""
    next_uses: list[ArrayRef]
    """For each round, the next round that needs each of these rows, int32; NEVER if there is none."""
    used_slots: list[int]
    """Number of slots that each round needs, without rows that wait for a later round."""


class Buffered(NamedTuple):
    """Rows in the buffer of a rank in one round."""

    rows: Tensor
    """Source numbers, ascending: local rows, then rows of other ranks."""
    num_local: int
    """Number of local rows."""
    fresh: Tensor
    """True for a row that arrives before the round, bool."""
    leaving: Tensor
    """True for a row that leaves after the round, bool."""


class Kept(NamedTuple):
    """Local rows in the buffer after some have been loaded for a round."""

    rows: Tensor
    """Row numbers, ascending."""
    next_uses: Tensor
    """Next round that needs each row, int32; NEVER if there is none."""
    fresh: Tensor
    """True for a row that was not in the buffer before, bool."""
    leaving: Tensor
    """For the rows that were in the buffer before: True if it has left the buffer, bool."""


Pieces = Sequence[Tensor]
"""Rows of other ranks, as row numbers of the rank that owns them, by owner."""


class ChunkSources:
    """Rows that the chunks of all ranks read in each round; computes volumes and the rounds of any rank.

    All ranks compute the same result from the same `parts`.

    Args:
        parts: The aggregate of each rank.
        bounds: Boundaries of each rank's ranges of targets; the same number for all ranks.
        loops: Targets read their own rows too.
        orders: For each rank, the number of the chunk that runs j-th; None: ascending.
        ahead: Rows of the next round arrive while a round still needs all of its slots.
        arrays: File or memory that stores the rows that chunks read. Default: memory.
        chunks: Place of the rows that each chunk of each rank reads in `arrays`, if they are already stored there.

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
        arrays: ArrayFile | ArrayMemory | None = None,
        chunks: Sequence[Sequence[ArrayRef]] | None = None,
    ) -> None:
        num_chunks = same_count([len(each) - 1 for each in bounds])
        self.parts, self.bounds, self.loops, self.ahead = parts, bounds, loops, ahead
        self.orders = [range(num_chunks)] * len(parts) if orders is None else orders
        if any(sorted(order) != list(range(num_chunks)) for order in self.orders):
            raise ValueError(f"each order must contain all chunks from 0 to {num_chunks - 1} once")
        self.arrays = arrays or ArrayMemory()
        self.chunks = chunks or [
            [self.arrays.put(rows) for rows in chunk_sources(part.hop.block, cuts, loops=loops)]
            for part, cuts in zip(parts, bounds, strict=True)
        ]
        self._ranks = [
            _RankSources(part, refs, self.arrays, _rows_at_owner(part, parts), order)
            for part, refs, order in zip(parts, self.chunks, self.orders, strict=True)
        ]
        self._needs: dict[tuple[int, bool], Needs] = {}
        self._sizes: dict[tuple[int, bool, bool], tuple[RoundSizes, ...]] = {}

    def in_order(self, orders: Sequence[Sequence[int]]) -> ChunkSources:
        """Return the same chunks in another order; see the class."""
        return ChunkSources(
            self.parts,
            self.bounds,
            loops=self.loops,
            orders=orders,
            ahead=self.ahead,
            arrays=self.arrays,
            chunks=self.chunks,
        )

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""
        return len(self.orders[0])

    @property
    def num_neighbours(self) -> int:
        """Distinct sources of all chunks of all ranks."""
        return sum(ref.shape[0] for refs in self.chunks for ref in refs)

    def chunk_vertices(self, rank: int) -> Iterator[Tensor]:
        """Yield the vertices that each chunk of a rank reads, int64, in the order of their source numbers."""
        vertices = self.parts[rank].hop.sources(self.parts[rank].rows)
        return (vertices[self.arrays.get(ref)] for ref in self.chunks[rank])

    @cached_property
    def volumes(self) -> Volumes:
        """Rows that one pass moves, summed over all ranks."""
        ranks = range(len(self._ranks))
        sizes = [each for rank in ranks for each in self.schedule(rank).sizes]
        return Volumes(
            neighbours=self.num_neighbours,
            shared=sum(sum(self._needs_of(rank, share=True).counts) for rank in ranks),
            loaded=sum(each.num_loads for each in sizes),
            fetched=sum(sum(each.recv_row_counts) for each in sizes),
        )

    def schedule(self, rank: int, *, share: bool = True, keep: bool = True) -> Schedule:
        """Return the rounds of one rank.

        Args:
            rank: Rank whose rounds to compute.
            share: A row that several chunks of a round read is loaded once, by its owner, which sends it to the others.
            keep: Rows that the next round needs keep their slots, and so do local rows that later rounds need while
                their slots are free.
        """
        if (rank, share, keep) not in self._sizes:
            self._sizes[rank, share, keep] = tuple(sizes for sizes, *_ in self._steps(rank, share=share, keep=keep))
        needs = self._needs_of(rank, share=share)
        used_slots = needs.used_slots
        if not keep:  # a round shares no slot with the next one, which may be loaded at the same time
            following = [*needs.all_counts[1:], 0]
            used_slots = [now + self.ahead * then for now, then in zip(needs.all_counts, following, strict=True)]
        num_slots = max(used_slots, default=0)
        return Schedule(
            num_slots=num_slots,
            sizes=self._sizes[rank, share, keep],
            make_rounds=lambda: self._rounds(rank, num_slots, share=share, keep=keep),
        )

    def _needed(self, rank: int, round_: int, *, share: bool) -> tuple[Tensor, Tensor]:
        """Return the local rows that a rank needs in a round, and the source numbers of other ranks' rows.

        Shared local rows are those that its own chunk or another chunk of the round reads.
        """
        local, remote = self._ranks[rank].split(round_)
        if not share or len(self._ranks) == 1:
            return local, remote
        wanted = [local, *(reader.pieces(reader.split(round_)[1])[rank].to(local.dtype) for reader in self._ranks)]
        starts = torch.tensor([0, sum(map(len, wanted))])
        (rows,) = distinct_groups(join(wanted, local.dtype), starts, self._ranks[rank].part.hop.num_inputs)
        return rows, remote

    def _needs_of(self, rank: int, *, share: bool) -> Needs:
        """Return the rows that a rank loads for each round; computed from the last round to the first, and cached."""
        if (rank, share) in self._needs:
            return self._needs[rank, share]
        one_rank = self._ranks[rank]
        next_use = torch.full((one_rank.part.hop.num_inputs,), NEVER, dtype=torch.int32)
        result, following = Needs([], [], [], []), one_rank.split(None)
        for round_ in reversed(range(self.num_rounds)):
            now = self._needed(rank, round_, share=share)
            result.counts.append(len(now[0]))
            result.all_counts.append(sum(map(len, now)))
            result.next_uses.append(self.arrays.put(next_use[now[0]]))
            next_use[now[0]] = round_
            loaded_ahead = sum(int(missing(*each).sum()) for each in zip(following, now, strict=True))
            result.used_slots.append(result.all_counts[-1] + self.ahead * loaded_ahead)
            following = now
        for each in result:
            each.reverse()
        self._needs[rank, share] = result
        return result

    def _buffered(self, rank: int, *, share: bool, keep: bool) -> Iterator[Buffered]:
        """Yield the rows in the buffer of a rank in each round; rows that wait for a later round add no slot."""
        one_rank, before = self._ranks[rank], None
        no_rows, remote = one_rank.split(None)
        buffer = Kept(no_rows, torch.empty(0, dtype=torch.int32), *torch.empty(2, 0, dtype=torch.bool))
        needs = self._needs_of(rank, share=share) if keep else None
        num_slots = max(needs.used_slots, default=0) if needs else 0
        for round_ in range(self.num_rounds):
            remote_before = remote
            loads, remote = self._needed(rank, round_, share=share)
            if needs is None:
                rows = torch.cat([loads, remote])
                yield Buffered(rows, len(loads), *torch.ones(2, len(rows), dtype=torch.bool))
                continue
            room = num_slots - needs.used_slots[round_]
            buffer = keep_rows(buffer, loads, self.arrays.get(needs.next_uses[round_]), round_, room, ahead=self.ahead)
            if before is not None:
                yield before._replace(leaving=torch.cat([buffer.leaving, missing(remote_before, remote)]))
            rows, fresh = torch.cat([buffer.rows, remote]), torch.cat([buffer.fresh, missing(remote, remote_before)])
            before = Buffered(rows, len(buffer.rows), fresh, torch.ones_like(fresh))
        if before is not None:
            yield before

    def _steps(
        self, rank: int, *, share: bool, keep: bool
    ) -> Iterator[tuple[RoundSizes, Buffered, Sequence[Pieces], Sequence[Pieces]]]:
        """Yield, for each round of a rank, its sizes and its rows.

        Next to them, for each rank: the rows that it receives before the round, and those whose gradients it sends
        after it.
        """
        block, bounds, requests = self._ranks[rank].part.hop.block, self.bounds[rank], []
        edges = block.indptr[torch.tensor(bounds, dtype=torch.int64)].tolist()
        if len(self._ranks) > 1:
            requests = [one_rank.requests(keep=keep) for one_rank in self._ranks]
        nothing = [([EMPTY_ROWS], [EMPTY_ROWS])]
        buffered = self._buffered(rank, share=share, keep=keep)
        for chunk, now, *pieces in zip(self.orders[rank], buffered, *requests, strict=True):
            received, sent = zip(*(pieces or nothing), strict=True)
            sizes = RoundSizes(
                targets=slice(*bounds[chunk : chunk + 2]),
                edges=slice(*edges[chunk : chunk + 2]),
                num_loads=int(now.fresh[: now.num_local].sum()),
                num_write_backs=int(now.leaving[: now.num_local].sum()),
                recv_row_counts=_lengths(received[rank]),
                send_row_counts=_lengths([by_owner[rank] for by_owner in received]),
                send_grad_counts=_lengths(sent[rank]),
                recv_grad_counts=_lengths([by_owner[rank] for by_owner in sent]),
            )
            yield sizes, now, received, sent

    def _rounds(self, rank: int, num_slots: int, *, share: bool, keep: bool) -> Iterator[Round]:
        """Yield the rounds of one rank.

        A row that stays keeps its slot; every other row gets the lowest free slot, which needs the fewest slots.
        """
        block = self._ranks[rank].part.hop.block
        dtype = native.id_dtype(max(block.num_sources, num_slots))
        slot_of, is_free = torch.empty(block.num_sources, dtype=dtype), torch.ones(num_slots, dtype=torch.bool)
        left = torch.empty(0, dtype=dtype)  # slots of the rows that have left after the round before
        for sizes, (rows, num_local, fresh, leaving), received, sent in self._steps(rank, share=share, keep=keep):
            rows = rows.to(dtype)
            if not self.ahead:
                is_free[left] = True
            arriving = rows[fresh]
            slots = positions_of(is_free)[: len(arriving)].to(dtype)
            is_free[slots], slot_of[arriving] = False, slots
            if self.ahead:
                is_free[left] = True
            row_slots = slot_of[rows]
            left = row_slots[leaving]
            load, write_back = (positions_of(change[:num_local]) for change in (fresh, leaving))
            receives, sends_back = (num_local + positions_of(change[num_local:]) for change in (fresh, leaving))
            send_rows, recv_grads = (join([by_owner[rank] for by_owner in each]) for each in (received, sent))
            yield Round(
                sizes=sizes,
                indices=slot_of.index_select(0, block.indices[sizes.edges]).to(block.indices.dtype),
                target_slots=slot_of[sizes.targets].clone() if self.loops else EMPTY_ROWS,
                slot_sources=rows.new_full((num_slots,), -1).index_copy_(0, row_slots.long(), rows),
                load=rows[load],
                load_slots=row_slots[load],
                recv_row_slots=row_slots[receives],
                send_rows=slot_of[send_rows] if share else send_rows,
                write_back=rows[write_back],
                write_back_slots=row_slots[write_back],
                send_grad_slots=row_slots[sends_back],
                recv_grads=slot_of[recv_grads] if share else recv_grads,
            )


class _RankSources(NamedTuple):
    """Rows that the chunks of one rank read, in the order of rounds."""

    part: RankHop
    """The aggregate of the rank."""
    chunks: Sequence[ArrayRef]
    """Source numbers that each chunk reads, ascending."""
    arrays: ArrayFile | ArrayMemory
    """File or memory that stores `chunks`."""
    rows_at_owner: Tensor
    """For each fetched vertex, its row number on the rank that owns it, int64 [h]."""
    order: Sequence[int]
    """Number of the chunk that runs j-th."""

    def split(self, round_: int | None) -> tuple[Tensor, Tensor]:
        """Return the local rows that a round reads, and the source numbers of other ranks' rows; none for None.

        Both ascend.
        """
        if round_ is None:
            no_rows = torch.empty(0, dtype=self.part.hop.block.indices.dtype)
            return no_rows, no_rows
        sources = self.arrays.get(self.chunks[self.order[round_]])
        num_local = int(torch.searchsorted(sources, self.part.hop.num_inputs))
        return sources[:num_local], sources[num_local:]

    def pieces(self, remote: Tensor) -> Pieces:
        """Return rows of other ranks as row numbers of the ranks that own them, int64, by owner.

        Args:
            remote: Source numbers of the rows, ascending.
        """
        fetched = remote - self.part.hop.num_inputs
        ends = torch.searchsorted(fetched, starts_of(self.part.hop.received)[1:]).tolist()
        return [self.rows_at_owner[fetched[first:end]] for first, end in pairwise([0, *ends])]

    def requests(self, *, keep: bool) -> Iterator[tuple[Pieces, Pieces]]:
        """Yield, for each round, the rows that this rank receives before it, and those whose gradients it sends.

        Args:
            keep: Rows that the round before read too are not received again; gradients leave with the last round.
        """
        before, now = self.split(None)[1], self.split(0 if self.order else None)[1]
        for round_ in range(len(self.order)):
            after = self.split(round_ + 1 if round_ + 1 < len(self.order) else None)[1]
            if keep:
                yield self.pieces(now[missing(now, before)]), self.pieces(now[missing(now, after)])
            else:
                yield self.pieces(now), self.pieces(now)
            before, now = now, after


def keep_rows(before: Kept, loads: Tensor, next_uses: Tensor, round_: int, room: int, *, ahead: bool) -> Kept:
    """Return the local rows in the buffer in a round. Of those that wait for a later round, the soonest read stay.

    Args:
        before: Rows in the buffer in the round before.
        loads: Rows that the round needs, ascending.
        next_uses: Next round that needs each of these rows, int32.
        round_: Number of the round.
        room: Number of rows that may wait.
        ahead: The rows of the next round are loaded during this one, so they do not count as waiting.
    """
    most = len(before.rows) + len(loads)
    rows, uses = torch.empty(most, dtype=loads.dtype), torch.empty(most, dtype=torch.int32)
    fresh, leaving = torch.empty(most, dtype=torch.bool), torch.empty(len(before.rows), dtype=torch.bool)
    count = _native.keep_rows(
        before.rows, before.next_uses, loads, next_uses, round_, room, ahead, rows, uses, fresh, leaving
    )
    return Kept(rows[:count], uses[:count], fresh[:count], leaving)


def missing(numbers: Tensor, others: Tensor) -> Tensor:
    """Return which numbers are not among others, bool.

    Args:
        numbers: Numbers, ascending.
        others: Other numbers of the same type, ascending.
    """
    mask = torch.empty(len(numbers), dtype=torch.bool)
    _native.find_missing(numbers, others, mask)
    return mask


def positions_of(mask: Tensor) -> Tensor:
    """Return the positions at which a mask is true, int64."""
    return mask.nonzero().view(-1)


def _rows_at_owner(part: RankHop, parts: Sequence[RankHop]) -> Tensor:
    """Return, for each vertex that a rank fetches, its row on the rank that owns it, int64."""
    spans = pairwise(chain([0], starts_of(part.hop.received)[1:].tolist()))
    return join([owner.rows_of(part.hop.fetched[slice(*span)]) for owner, span in zip(parts, spans, strict=True)])


def _lengths(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(len(each) for each in tensors)
