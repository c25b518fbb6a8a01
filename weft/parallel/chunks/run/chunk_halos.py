"""Rows that chunks send to other ranks as soon as they are computed, and the gradients that come back.

Source: G3, section 5.2. Sums do not depend on the time at which messages arrive: a rank adds its own gradients first,
then those of the other ranks in the order of ranks.
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
StepId = tuple[int, int]
"""An aggregate step: number of the segment before the aggregate, number of the step. Also names its source rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HaloPlan:
    """Rows that each chunk of a rank sends and waits for; the same for all aggregates.

    The local rows come first, chunk by chunk. Rows of other ranks follow, by rank and by chunk of that rank.
    """

    sends: tuple[tuple[Tensor, ...], ...]
    """For each chunk and rank, the chunk's rows that the rank reads, int64, ascending."""
    receives: tuple[tuple[slice, ...], ...]
    """For each rank and chunk of that rank, the range of local row numbers that its rows get."""
    reads_own: tuple[int, ...]
    """For each chunk, the number of this rank's chunks that must be done before it."""
    reads: tuple[tuple[int, ...], ...]
    """For each chunk and rank, the number of chunks of that rank whose rows must have arrived."""
    own_done: tuple[int, ...]
    """For each chunk, the number of chunks after whose backward its rows have all gradients of this rank."""
    done_after: tuple[tuple[tuple[int, int], ...], ...]
    """For each chunk, the pairs (rank, chunk) whose rows have all gradients of this rank after its backward."""
    at_once: bool = False
    """True if all rows of a step are sent together when its last chunk is done."""

    @property
    def num_sent(self) -> int:
        """Number of rows sent before an aggregate, one for each rank that reads it."""
        return sum(len(rows) for by_rank in self.sends for rows in by_rank)

    @property
    def num_received(self) -> int:
        """Number of rows received before an aggregate."""
        return sum(span.stop - span.start for by_chunk in self.receives for span in by_chunk)

    @property
    def num_messages(self) -> int:
        """Number of messages sent and received before an aggregate."""
        sent = [rows for by_rank in self.sends for rows in by_rank if len(rows)]
        received = [span for by_chunk in self.receives for span in by_chunk if span.stop > span.start]
        return len(sent) + len(received)

    @property
    def num_chunks(self) -> int:
        """Number of chunks, the same on every rank."""
        return len(self.sends)


class HaloFlow:
    """Messages in one direction of a pass: rows in the forward, gradients in the backward direction.

    Args:
        plan: Rows that chunks send and wait for.
        group: The ranks.
        widths: Columns of the rows of each step, in the order in which the steps run.
        dtype: Type of the rows.
    """

    back: bool
    """True if gradients are sent."""

    def __init__(self, plan: HaloPlan, group: Group, widths: dict[StepId, int], dtype: torch.dtype) -> None:
        self.plan, self.group, self.widths, self.dtype = plan, group, widths, dtype
        self._received, self._sent = Counter[StepId](), Counter[StepId]()
        expected: dict[int, list[Expected]] = {}
        for rank in range(group.size if group.size > 1 else 0):
            for step, width in widths.items():
                for chunk in range(plan.num_chunks):
                    if num_rows := self._num_rows(rank, chunk):  # also of width 0, since they are sent
                        expected.setdefault(rank, []).append(Expected(self._key(step, chunk), num_rows * width))
                        self._received[step] += num_rows * width
        self.messages = Messages(group, expected, dtype, tag="halo")
        self._pending: list[tuple[int, Key, Tensor]] = []

    def wait_for(self, look: Callable[[], Result | None]) -> Result:
        """Return the first result of `look` that is not None; `look` is called again whenever a message has arrived.

        Args:
            look: Checks what can run.

        Raises:
            RunError: If a peer is lost.
        """
        while True:
            num_before = self.messages.num_received
            result = look()
            if result is not None:
                return result
            self.messages.wait_for_more(num_before)

    def finish(self) -> None:
        """Wait until all messages have left, and count their bytes."""
        self.messages.finish()
        spans = self.messages.spans
        for number, step in enumerate(self.widths if self.group.size > 1 else ()):
            sent, received = (count[step] * self.dtype.itemsize for count in (self._sent, self._received))
            self.group.count("halo", sent, received, self.group.next_key(self._name(step)), [] if number else spans)

    def _num_rows(self, rank: int, chunk: int) -> int:
        """Return the number of rows in a message from a rank."""
        raise NotImplementedError

    def _name(self, step: StepId) -> str:
        return f"halo {step[0]}.{step[1]} {'gradients' if self.back else 'rows'}"

    def _key(self, step: StepId, chunk: int) -> Key:
        return Key(self._name(step), chunk)

    def _send(self, rank: int, step: StepId, chunk: int, rows: Tensor) -> None:
        self._sent[step] += rows.numel()
        self._pending.append((rank, self._key(step, chunk), to_host(self.group.streams, rows.reshape(-1).contiguous())))

    def _flush(self, *, last: bool) -> None:
        """Send the pending messages, unless all rows of a step leave together and this is not its last chunk."""
        if last or not self.plan.at_once:
            for message in self._pending:
                self.messages.send(*message)
            self._pending.clear()

    def _receive(self, rank: int, step: StepId, chunk: int) -> Tensor:
        return self.messages.take(rank, self._key(step, chunk)).view(self._num_rows(rank, chunk), self.widths[step])


class RowFlow(HaloFlow):
    """Rows on their way to the ranks that read them."""

    back = False

    def __init__(self, plan: HaloPlan, group: Group, widths: dict[StepId, int], dtype: torch.dtype) -> None:
        super().__init__(plan, group, widths, dtype)
        self._num_taken = Counter[tuple[StepId, int]]()

    def send(self, step: StepId, chunk: int, rows: Tensor, first: int) -> None:
        """Send the rows of a chunk to the ranks that read them.

        Args:
            step: Aggregate step that reads the rows.
            chunk: Number of the chunk.
            rows: Rows of the chunk, [n, F].
            first: Local row number of the first of them.
        """
        for rank, rows_to_send in enumerate(self.plan.sends[chunk]):
            if len(rows_to_send):
                self._send(rank, step, chunk, rows.index_select(0, (rows_to_send - first).to(rows.device)))
        self._flush(last=chunk == self.plan.num_chunks - 1)

    def has_arrived(self, step: StepId, chunk: int) -> bool:
        """Return True if all rows of other ranks that a chunk reads have arrived.

        Args:
            step: Aggregate step that reads the rows.
            chunk: Number of the chunk.
        """
        return all(
            self.messages.has_arrived(rank, self._key(step, remote_chunk))
            for rank, remote_chunk in self._due(step, chunk)
        )

    def receive(self, step: StepId, chunk: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows that a chunk reads and no earlier chunk has received, with their local row numbers.

        Args:
            step: Aggregate step that reads the rows.
            chunk: Number of the chunk.
        """
        for rank, remote_chunk in list(self._due(step, chunk)):
            yield self.plan.receives[rank][remote_chunk], self._receive(rank, step, remote_chunk)
        for rank, count in enumerate(self.plan.reads[chunk]):
            self._num_taken[step, rank] = max(self._num_taken[step, rank], count)

    def _due(self, step: StepId, chunk: int) -> Iterator[tuple[int, int]]:
        for rank, count in enumerate(self.plan.reads[chunk]):
            for remote_chunk in range(self._num_taken[step, rank], count):
                if self._num_rows(rank, remote_chunk):
                    yield rank, remote_chunk

    def _num_rows(self, rank: int, chunk: int) -> int:
        span = self.plan.receives[rank][chunk]
        return int(span.stop - span.start)


class GradFlow(HaloFlow):
    """Gradients of rows on their way to the ranks that own the rows."""

    back = True

    def send(self, step: StepId, chunk: int, read: Callable[[slice], Tensor]) -> None:
        """Send the gradients that are complete after the backward of a chunk.

        Args:
            step: Aggregate step that read the rows.
            chunk: Number of the chunk.
            read: Returns the gradients [n, F] of a range of local row numbers.
        """
        for rank, remote_chunk in self.plan.done_after[chunk]:
            self._send(rank, step, remote_chunk, read(self.plan.receives[rank][remote_chunk]))
        self._flush(last=chunk == self.plan.num_chunks - 1)

    def has_arrived(self, step: StepId, chunk: int) -> bool:
        """Return True if all gradients of a chunk's rows have arrived.

        Args:
            step: Aggregate step that read the rows.
            chunk: Number of the chunk.
        """
        return all(self.messages.has_arrived(rank, self._key(step, chunk)) for rank in self._due(chunk))

    def receive(self, step: StepId, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the received gradients of a chunk's rows with the numbers of these rows, in the order of ranks.

        Args:
            step: Aggregate step that read the rows.
            chunk: Number of the chunk.
        """
        for rank in self._due(chunk):
            yield self.plan.sends[chunk][rank], self._receive(rank, step, chunk)

    def _due(self, chunk: int) -> Iterator[int]:
        return (rank for rank, rows_sent in enumerate(self.plan.sends[chunk]) if len(rows_sent))

    def _num_rows(self, rank: int, chunk: int) -> int:
        return len(self.plan.sends[chunk][rank])
