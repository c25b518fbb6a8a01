"""Rows that chunks of other ranks read: they leave as soon as the chunk that makes them is done (G3, section 5.2).

Their gradients come back the same way. Sums do not depend on when messages come: a rank adds up its own part first,
then those of the others in the order of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from weft.comm import Expected, Group, Key, Messages
from weft.runtime.streams import to_host

Result = TypeVar("Result")
Level = tuple[int, int]
"""Rows that an aggregate reads at sources: the segment that makes or begins them, and the step of the aggregate."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HaloPlan:
    """Which rows of which chunk a rank sends to whom, and what its chunks wait for; the same for all aggregates.

    A rank's rows are its own, chunk by chunk, and behind them those of other ranks, by rank and chunk.
    """

    sends: tuple[tuple[Tensor, ...], ...]
    """By chunk and rank: the own rows that it reads, int64, ascending."""
    receives: tuple[tuple[slice, ...], ...]
    """By rank and chunk of that rank: where its rows stand here."""
    reads_own: tuple[int, ...]
    """By chunk: how many own chunks are to be done before it."""
    reads: tuple[tuple[int, ...], ...]
    """By chunk and rank: how many of that rank's chunks are to be here."""
    own_done: tuple[int, ...]
    """By chunk: how many chunks are done backward when its rows have all gradients of this rank."""
    done_after: tuple[tuple[tuple[int, int], ...], ...]
    """By chunk: the ranks and chunks whose rows have all gradients of this rank once it is done backward."""
    at_once: bool = False
    """Whether everything of a level leaves together, when its last chunk is done."""

    @property
    def num_sent(self) -> int:
        """Rows that leave, one for each rank that reads them."""
        return sum(len(places) for each in self.sends for places in each)

    @property
    def num_received(self) -> int:
        """Rows that come."""
        return sum(span.stop - span.start for each in self.receives for span in each)

    @property
    def num_messages(self) -> int:
        """Messages that leave and come."""
        leave = [rows for each in self.sends for rows in each if len(rows)]
        come = [span for each in self.receives for span in each if span.stop > span.start]
        return len(leave) + len(come)

    @property
    def num_chunks(self) -> int:
        """Of every rank."""
        return len(self.sends)


class HaloFlow:
    """What crosses in one direction of a pass. widths: the columns of each level, in the order in which they cross."""

    back: bool

    def __init__(self, plan: HaloPlan, group: Group, widths: dict[Level, int], dtype: torch.dtype) -> None:
        self.plan, self.group, self.widths, self.dtype = plan, group, widths, dtype
        self._received, self._sent = Counter[Level](), Counter[Level]()
        expected: dict[int, list[Expected]] = {}
        for rank in range(group.size if group.size > 1 else 0):
            for level, width in widths.items():
                for chunk in range(plan.num_chunks):
                    if (count := self._coming(rank, chunk) * width) > 0:
                        expected.setdefault(rank, []).append(Expected(self._key(level, chunk), count))
                        self._received[level] += count
        self.messages = Messages(group, expected, dtype, tag="halo")
        self._held: list[tuple[int, Key, Tensor]] = []

    def wait_for(self, look: Callable[[], Result | None]) -> Result:
        """What `look` finds, which is asked again whenever a message has come. RunError where a peer is lost."""
        while True:
            seen = self.messages.num_come
            found = look()
            if found is not None:
                return found
            self.messages.idle(seen)

    def finish(self) -> None:
        """Waits until all has left, and counts it."""
        self.messages.finish()
        spans = self.messages.spans
        for number, level in enumerate(self.widths if self.group.size > 1 else ()):
            sent, received = (count[level] * self.dtype.itemsize for count in (self._sent, self._received))
            self.group.count("halo", sent, received, self.group.next_key(self._name(level)), [] if number else spans)

    def _coming(self, rank: int, chunk: int) -> int:
        """The rows of a message from a rank."""
        raise NotImplementedError

    def _name(self, level: Level) -> str:
        return f"halo {level[0]}.{level[1]} {'gradients' if self.back else 'rows'}"

    def _key(self, level: Level, chunk: int) -> Key:
        return Key(self._name(level), chunk)

    def _send(self, rank: int, level: Level, chunk: int, rows: Tensor) -> None:
        self._sent[level] += rows.numel()
        self._held.append((rank, self._key(level, chunk), to_host(self.group.streams, rows.reshape(-1).contiguous())))

    def _let_go(self, *, last: bool) -> None:
        """Sends what a chunk has left; last: it is the level's last one."""
        if last or not self.plan.at_once:
            for one in self._held:
                self.messages.send(*one)
            self._held.clear()

    def _take(self, rank: int, level: Level, chunk: int) -> Tensor:
        return self.messages.take(rank, self._key(level, chunk)).view(-1, self.widths[level])


class RowFlow(HaloFlow):
    """Rows to the ranks that read them."""

    back = False

    def __init__(self, plan: HaloPlan, group: Group, widths: dict[Level, int], dtype: torch.dtype) -> None:
        super().__init__(plan, group, widths, dtype)
        self._taken = Counter[tuple[Level, int]]()

    def send(self, level: Level, chunk: int, rows: Tensor, first: int) -> None:
        """The rows [n, F] of a chunk, of which `first` is the first."""
        for rank, places in enumerate(self.plan.sends[chunk]):
            if len(places):
                self._send(rank, level, chunk, rows.index_select(0, (places - first).to(rows.device)))
        self._let_go(last=chunk == self.plan.num_chunks - 1)

    def here(self, level: Level, chunk: int) -> bool:
        """Whether all rows of other ranks that a chunk reads have come."""
        return all(self.messages.here(rank, self._key(level, one)) for rank, one in self._due(level, chunk))

    def take(self, level: Level, chunk: int) -> Iterator[tuple[slice, Tensor]]:
        """Those that no chunk before has asked for, and where they stand."""
        for rank, one in list(self._due(level, chunk)):
            yield self.plan.receives[rank][one], self._take(rank, level, one)
        for rank, count in enumerate(self.plan.reads[chunk]):
            self._taken[level, rank] = max(self._taken[level, rank], count)

    def _due(self, level: Level, chunk: int) -> Iterator[tuple[int, int]]:
        for rank, count in enumerate(self.plan.reads[chunk]):
            for one in range(self._taken[level, rank], count):
                if self._coming(rank, one):
                    yield rank, one

    def _coming(self, rank: int, chunk: int) -> int:
        span = self.plan.receives[rank][chunk]
        return int(span.stop - span.start)


class GradFlow(HaloFlow):
    """The rows' gradients to the ranks that own them."""

    back = True

    def send(self, level: Level, chunk: int, read: Callable[[slice], Tensor]) -> None:
        """Those that a chunk has completed; read: gives the gradients [n, F] of a range of rows."""
        for rank, one in self.plan.done_after[chunk]:
            self._send(rank, level, one, read(self.plan.receives[rank][one]))
        self._let_go(last=chunk == self.plan.num_chunks - 1)

    def here(self, level: Level, chunk: int) -> bool:
        """Whether all gradients of a chunk's rows have come."""
        return all(self.messages.here(rank, self._key(level, chunk)) for rank in self._due(chunk))

    def take(self, level: Level, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """These, and the own rows that they are of, in the order of ranks."""
        for rank in self._due(chunk):
            yield self.plan.sends[chunk][rank], self._take(rank, level, chunk)

    def _due(self, chunk: int) -> Iterator[int]:
        return (rank for rank, places in enumerate(self.plan.sends[chunk]) if len(places))

    def _coming(self, rank: int, chunk: int) -> int:
        return len(self.plan.sends[chunk][rank])
