"""Sets of numbers, one for each round: what changes from one to the next, and where the rows of each lie.

(HongTu, sections 5.1 and 6.) Tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.runtime.native import _native


@dataclass(frozen=True, kw_only=True, eq=False)
class Sets:
    """Distinct numbers, ascending in each set: set j from starts[j] to starts[j + 1].

    numbers: int64. starts: int64 [sets + 1].
    """

    numbers: Tensor
    starts: Tensor

    @classmethod
    def of(cls, sets: Sequence[Tensor]) -> Sets:
        """These, each int64 and ascending."""
        return cls(numbers=join(sets), starts=starts_of([len(each) for each in sets]))

    @classmethod
    def of_groups(cls, values: Tensor, starts: Tensor, num_numbers: int, ranges: Tensor | None = None) -> Sets:
        """The distinct numbers of each group of values, which ascend within none.

        values: int32 or int64, below `num_numbers`; starts: int64 [groups + 1], where each group begins. ranges: int64
        [groups + 1]; the numbers from ranges[i] to ranges[i + 1] belong to group i too.
        """
        begins = starts - starts[0] if ranges is None else starts - starts[0] + ranges - ranges[0]
        found = torch.empty(int(begins[-1]), dtype=torch.int64)
        counts = torch.empty(len(starts) - 1, dtype=torch.int64)
        _native.distinct(values.contiguous(), starts, ranges, num_numbers, found, counts, torch.get_num_threads())
        places = zip(begins.tolist(), counts.tolist(), strict=False)
        return cls.of([found[begin : begin + count] for begin, count in places])

    def __getitem__(self, number: int) -> Tensor:
        """Set `number`."""
        first, end = self._bounds[number : number + 2]
        return self.numbers[first:end]

    @cached_property
    def _bounds(self) -> list[int]:
        bounds: list[int] = self.starts.tolist()
        return bounds

    @cached_property
    def changes(self) -> Changes:
        """What is new in each set, and what the next lacks."""
        fresh, leaving = torch.empty(2, len(self.numbers), dtype=torch.bool)
        _native.find_changes(self.numbers, self.starts, fresh, leaving, torch.get_num_threads())
        return Changes(fresh, leaving)

    def sizes(self, *, ahead: bool) -> Tensor:
        """How many numbers each set has, with those of the next one if that comes `ahead`: int64 [sets]."""
        sizes = self.starts.diff()
        if ahead:
            fresh = torch.cat([self.starts.new_zeros(1), self.changes.fresh.cumsum(0)])[self.starts].diff()
            sizes[:-1] += fresh[1:]
        return sizes

    def lasting(self, room: Tensor, num_numbers: int, *, ahead: bool) -> Sets:
        """The same, each with those of earlier sets that wait in it for a later one, the soonest of them (Belady 1966).

        room: int64 [sets], how many each may have on top; not those of the next set where that comes `ahead`.
        """
        until = torch.empty_like(self.numbers)
        _native.stay_until(self.numbers, self.starts, num_numbers, room, ahead, until)
        own = torch.arange(len(self.starts) - 1).repeat_interleave(self.starts.diff())
        waits = until - own - 1
        ends = waits.cumsum(0)
        place = torch.arange(int(ends[-1]) if len(ends) else 0) - (ends - waits).repeat_interleave(waits)
        added = (own + 1).repeat_interleave(waits) + place
        sets, numbers = torch.cat([own, added]), torch.cat([self.numbers, self.numbers.repeat_interleave(waits)])
        order = (sets * num_numbers + numbers).argsort()
        return Sets(numbers=numbers[order], starts=starts_of(torch.bincount(sets, minlength=len(room)).tolist()))

    def split(self, values: Tensor, places: Tensor | None = None) -> tuple[Tensor, ...]:
        """By set, what stands in values beside the numbers; of those at `places`, int64 and ascending, or of all."""
        if places is None:
            return tuple(values.split(self.starts.diff().tolist()))
        counts = torch.searchsorted(places, self.starts).diff()
        return tuple(values[places].split(counts.tolist()))

    def where(self, mask: Tensor) -> Sets:
        """The numbers where `mask` holds, bool."""
        places = places_of(mask)
        return Sets(numbers=self.numbers[places], starts=torch.searchsorted(places, self.starts))

    def followed_by(self, others: Sets, shift: int) -> Sets:
        """Set by set, these and then those of others, to which `shift` is added and which then are the larger ones."""
        pairs = zip(self.split(self.numbers), others.split(others.numbers + shift), strict=True)
        return Sets(numbers=join([each for pair in pairs for each in pair]), starts=self.starts + others.starts)


class Changes(NamedTuple):
    """Which numbers of a set the one before it lacks, and which the one after it lacks: bool, one for each number."""

    fresh: Tensor
    leaving: Tensor


class Slots(NamedTuple):
    """Where each round keeps its rows: the slots of its numbers, of its edges' sources and of its targets' own rows.

    slots: int64, one for each number. indices: as the block's. own: int64 [targets], or None. size: of the buffer.
    """

    slots: Tensor
    indices: Tensor
    own: Tensor | None
    size: int


def assign_slots(
    held: Sets,
    changes: Changes,
    block: Adjacency,
    bounds: Sequence[int],
    order: Sequence[int],
    *,
    ahead: bool,
    own: bool,
) -> Slots:
    """A slot for all that each round holds; what is not fresh stays where it was. See csrc/schedule.h.

    held: the sources of the block that rounds hold, those of their edges among them. Batch j has the edges into the
    range order[j] of targets, of those that `bounds` [C + 1] says. ahead: what is fresh comes while the round before
    still needs all of its slots. own: a round holds its targets too.
    """
    slots, indices = torch.empty_like(held.numbers), torch.empty_like(block.indices)
    own_slots = torch.empty(block.num_targets, dtype=torch.int64) if own else None
    count = _native.assign_slots(
        held.numbers,
        held.starts,
        *changes,
        block.num_sources,
        block.indptr.contiguous(),
        block.indices.contiguous(),
        torch.tensor(bounds, dtype=torch.int64),
        torch.tensor(order, dtype=torch.int64),
        ahead,
        slots,
        indices,
        own_slots,
        torch.get_num_threads(),
    )
    return Slots(slots, indices, own_slots, count)


def places_of(mask: Tensor) -> Tensor:
    """Where a mask holds, int64."""
    return mask.nonzero().view(-1)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """These int64 tensors, one after the other; there may be none."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *tensors])


def starts_of(counts: Sequence[int]) -> Tensor:
    """Where each of so many begins, and where the last ends: int64 [counts + 1]."""
    return torch.tensor([0, *counts]).cumsum(0)
