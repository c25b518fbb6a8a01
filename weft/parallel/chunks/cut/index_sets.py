"""Sets of row numbers, one set per round: what changes between rounds, and the buffer slot of each row.

Source: HongTu, sections 5.1 and 6. All tensors are on the CPU.
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

GROUPED_VALUES = 1 << 22
"""Number of values of which `IndexSets.of_groups` finds the distinct ones at once, if no group has more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexSets:
    """Sets of distinct numbers, ascending within each set, stored one after the other."""

    numbers: Tensor
    """Numbers of all sets, int64: set j is `numbers[starts[j]:starts[j + 1]]`."""
    starts: Tensor
    """Position of the first number of each set, and the total, int64 [sets + 1]."""

    @classmethod
    def of(cls, sets: Sequence[Tensor]) -> IndexSets:
        """Return the given sets, each an ascending int64 tensor."""
        return cls(numbers=join(sets), starts=starts_of([len(each) for each in sets]))

    @classmethod
    def of_groups(cls, values: Tensor, starts: Tensor, num_numbers: int, ranges: Tensor | None = None) -> IndexSets:
        """Return the distinct numbers of each group of values, ascending.

        Args:
            values: Numbers below `num_numbers` in any order and with duplicates, int32 or int64.
            starts: Position in `values` of each group's first number, and the end of the last group, int64
                [groups + 1].
            num_numbers: Upper bound (exclusive) of the numbers.
            ranges: If given, the numbers from `ranges[i]` to `ranges[i + 1]` also belong to group i, int64
                [groups + 1].
        """
        values, room = values.contiguous(), starts.diff() if ranges is None else starts.diff() + ranges.diff()
        ends, last = room.cumsum(0), 0
        sets: list[Tensor] = []
        while last < len(room):  # a few groups at a time, because most numbers occur several times
            first, done = last, int(ends[last - 1]) if last else 0
            last = max(first + 1, int(torch.searchsorted(ends, done + GROUPED_VALUES, right=True)))
            part, counts = slice(first, last + 1), torch.empty(last - first, dtype=torch.int64)
            distinct = torch.empty(int(room[first:last].sum()), dtype=torch.int64)
            of_ranges = None if ranges is None else ranges[part]
            _native.distinct(values, starts[part], of_ranges, num_numbers, distinct, counts, torch.get_num_threads())
            groups = distinct.split(room[first:last].tolist())
            sets += [group[:count].clone() for group, count in zip(groups, counts.tolist(), strict=True)]
        return cls.of(sets)

    def __getitem__(self, number: int) -> Tensor:
        """Return the numbers of one set."""
        first, end = self._bounds[number : number + 2]
        return self.numbers[first:end]

    @cached_property
    def _bounds(self) -> list[int]:
        bounds: list[int] = self.starts.tolist()
        return bounds

    @cached_property
    def delta(self) -> Delta:
        """The numbers that each set has in addition to the set before it, and to the set after it."""
        fresh, leaving = torch.empty(2, len(self.numbers), dtype=torch.bool)
        _native.find_changes(self.numbers, self.starts, fresh, leaving, torch.get_num_threads())
        return Delta(fresh, leaving)

    def sizes(self, *, ahead: bool) -> Tensor:
        """Return the number of rows resident with each set, int64 [sets].

        Args:
            ahead: Count the next set's new numbers as well, because they are loaded while this set is in use.
        """
        sizes = self.starts.diff()
        if ahead:
            fresh = torch.cat([self.starts.new_zeros(1), self.delta.fresh.cumsum(0)])[self.starts].diff()
            sizes[:-1] += fresh[1:]
        return sizes

    def retaining(self, free_slots: Tensor, num_numbers: int, *, ahead: bool) -> IndexSets:
        """Return the sets, each extended by numbers of earlier sets that a later set uses again.

        A retained row need not be loaded again. Where the free slots do not suffice, the numbers that are needed
        soonest stay (Belady 1966).

        Args:
            free_slots: Number of numbers that may be added to each set, int64 [sets].
            num_numbers: Upper bound (exclusive) of the numbers.
            ahead: The next set is loaded while a set is in use, so its numbers do not count against `free_slots`.
        """
        until = torch.empty_like(self.numbers)  # for each use of a number, the set up to which its row stays
        _native.stay_until(self.numbers, self.starts, num_numbers, free_slots, ahead, until)
        starts = torch.empty_like(self.starts)
        _native.extended_starts(self.starts, until, starts)
        numbers = torch.empty(int(starts[-1]), dtype=torch.int64)
        _native.extend_sets(self.numbers, self.starts, until, numbers)
        return IndexSets(numbers=numbers, starts=starts)

    def split(self, values: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return values that belong to the numbers, split by set.

        Args:
            values: One value for each number of `numbers`.
            positions: If given, return only the values at these positions, int64, ascending.
        """
        if positions is None:
            return tuple(values.split(self.starts.diff().tolist()))
        counts = torch.searchsorted(positions, self.starts).diff()
        return tuple(values[positions].split(counts.tolist()))

    def select(self, mask: Tensor) -> IndexSets:
        """Return the sets with only the numbers for which `mask` (bool, one for each number) is true.

        These sets share the memory of this object if all are.
        """
        if mask.all():
            return self
        positions = positions_of(mask)
        return IndexSets(numbers=self.numbers[positions], starts=torch.searchsorted(positions, self.starts))

    def followed_by(self, others: IndexSets, shift: int) -> IndexSets:
        """Return, for each set, its numbers followed by the numbers of the same set of `others`.

        Args:
            others: As many sets as this object has.
            shift: Added to the numbers of `others`, which makes them larger than all numbers of this object.
        """
        if not len(others.numbers):
            return self
        pairs = zip(self.split(self.numbers), others.split(others.numbers + shift), strict=True)
        return IndexSets(numbers=join([each for pair in pairs for each in pair]), starts=self.starts + others.starts)


class Delta(NamedTuple):
    """Numbers of each set that a neighbouring set does not contain, as masks over `IndexSets.numbers`."""

    fresh: Tensor
    """True for a number that the previous set lacks: its row arrives before the round."""
    leaving: Tensor
    """True for a number that the next set lacks: its row leaves after the round."""


class Slots(NamedTuple):
    """Buffer slots of the rows of every round."""

    slots: Tensor
    """Slot of each number of the sets, int64."""
    indices: Tensor
    """Slot of each edge's source, in the order and dtype of the block's `indices`."""
    target_slots: Tensor | None
    """Slot of each target's own row, int64 [targets]; None if targets are not read."""
    size: int
    """Number of slots of the buffer."""


def assign_slots(
    resident: IndexSets,
    delta: Delta,
    block: Adjacency,
    bounds: Sequence[int],
    order: Sequence[int],
    *,
    ahead: bool,
    loops: bool,
) -> Slots:
    """Assign a buffer slot to every row that a round needs; a row that stays keeps its slot.

    Every other row gets the lowest free slot, which needs the fewest slots possible. See csrc/schedule.h.

    Args:
        resident: For each round, the numbers of the source rows in the buffer; these include the sources of its edges.
        delta: The rows that arrive before and leave after each round.
        block: Adjacency whose source numbers the sets contain.
        bounds: Boundaries of the ranges of targets, [chunks + 1].
        order: Number of the target range that round j works on.
        ahead: Rows arrive while the previous round still needs all of its slots.
        loops: Rounds read the rows of their targets too.

    Returns:
        The slots of all rounds.
    """
    slots, indices = torch.empty_like(resident.numbers), torch.empty_like(block.indices)
    target_slots = torch.empty(block.num_targets, dtype=torch.int64) if loops else None
    count = _native.assign_slots(
        resident.numbers,
        resident.starts,
        *delta,
        block.num_sources,
        block.indptr.contiguous(),
        block.indices.contiguous(),
        torch.tensor(bounds, dtype=torch.int64),
        torch.tensor(order, dtype=torch.int64),
        ahead,
        slots,
        indices,
        target_slots,
        torch.get_num_threads(),
    )
    return Slots(slots, indices, target_slots, count)


def positions_of(mask: Tensor) -> Tensor:
    """Return the positions at which a mask is true, int64."""
    return mask.nonzero().view(-1)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Return int64 tensors concatenated; an empty tensor if there are none."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *tensors])


def starts_of(counts: Sequence[int]) -> Tensor:
    """Return the start of each of several consecutive parts, and the total, int64 [counts + 1]."""
    return torch.tensor([0, *counts]).cumsum(0)
