"""Messages between pairs of ranks, sent and received by threads while the caller computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.exchange_key import Key
from weft.comm.group import Group
from weft.runtime.meter import Span


class Expected(NamedTuple):
    """Message that this rank will receive."""

    key: Key
    """Key of the message."""
    numbers: int
    """Number of elements."""


class Messages:
    """Messages between the ranks' hosts, through gloo: NCCL has no tags, and its `wait` does not block the host.

    A thread for each peer waits for received messages, and one thread waits for sent ones, so the caller can ask what
    has arrived without waiting. All receives start at once: gloo has one queue for each pair of ranks, in which the
    permission for a peer to send would otherwise wait for a whole message.

    Args:
        group: All ranks.
        expected: Messages from each rank, in the order in which they are waited for.
        dtype: Dtype of the elements.
        tag: Name under which the meter counts and shows the messages.
    """

    def __init__(
        self, group: Group, expected: Mapping[int, Sequence[Expected]], dtype: torch.dtype, *, tag: str
    ) -> None:
        self._group, self._tag = group, tag
        self._bell = threading.Condition()
        self._arrived: dict[tuple[int, Key], Tensor] = {}
        self._failed: RuntimeError | None = None
        self._leaving = SimpleQueue[tuple[int, Key, Tensor, dist.Work | None, Any] | None]()
        self.num_received = 0
        """Number of messages received so far."""
        self.spans: list[Span] = []
        """Times at which the caller waited."""
        self._threads = [threading.Thread(target=self._wait_for_sends, daemon=True)]
        for rank, messages in expected.items():
            buffers = [(message.key, torch.empty(message.numbers, dtype=dtype)) for message in messages]
            with group.named("messages", tag):
                works = [
                    dist.irecv(buffer, group=group.process_group, group_src=rank, tag=key.slot)
                    for key, buffer in buffers
                ]
            self._threads.append(
                threading.Thread(target=self._wait_for_receives, args=(rank, buffers, works), daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def send(self, rank: int, key: Key, values: Tensor) -> None:
        """Start to send a tensor.

        Args:
            rank: Receiver.
            key: Key of the message.
            values: Contiguous tensor on the host. The caller must not change it afterwards.

        Raises:
            RunError: The connection to a peer is lost.
        """
        since = self._group.meter.stamp()
        with self._group.named("messages", self._tag):
            work = dist.isend(values, group=self._group.process_group, group_dst=rank, tag=key.slot)
        self._leaving.put((rank, key, values, work, since))

    def has_arrived(self, rank: int, key: Key) -> bool:
        """Return True if a message has arrived and was not taken yet.

        Args:
            rank: Sender.
            key: Key of the message.
        """
        return (rank, key) in self._arrived

    def take(self, rank: int, key: Key) -> Tensor:
        """Remove a message that has arrived, and return its elements, in one dimension, on the host.

        Args:
            rank: Sender.
            key: Key of the message.
        """
        return self._arrived.pop((rank, key))

    def wait_for_more(self, seen: int) -> None:
        """Wait until more than `seen` messages have arrived.

        Raises:
            RunError: The connection to a peer is lost.
        """
        with self._timed(), self._bell:
            while self.num_received <= seen and self._failed is None:
                self._bell.wait()
            if self._failed is not None:
                raise self._failed

    def finish(self) -> None:
        """Wait until all messages are sent and all expected ones received."""
        self._leaving.put(None)
        with self._timed():
            for thread in self._threads:
                thread.join()
            if self._failed is not None:
                raise self._failed

    def _wait_for_sends(self) -> None:
        """Wait for the sent messages in their order until `finish` is called. Runs in a thread."""
        while (message := self._leaving.get()) is not None:
            rank, key, values, work, since = message
            if not self._wait(work):
                return
            self._note("send", key, values, since, to=rank)

    def _wait_for_receives(
        self, rank: int, buffers: Sequence[tuple[Key, Tensor]], works: Sequence[dist.Work | None]
    ) -> None:
        """Wait for the messages from one rank in their order. Runs in a thread."""
        for (key, buffer), work in zip(buffers, works, strict=True):
            since = self._group.meter.stamp()
            if not self._wait(work):
                return
            self._note("receive", key, buffer, since, **{"from": rank})
            with self._bell:
                self._arrived[rank, key] = buffer
                self.num_received += 1
                self._bell.notify()

    def _wait(self, work: dist.Work | None) -> bool:
        """Wait for a message. Return False if a peer is lost; the caller's thread then raises the error."""
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            with self._bell:
                self._failed = error
                self._bell.notify()
            return False
        return True

    def _note(self, stream: str, key: Key, values: Tensor, since: Any, **peer: int) -> None:
        message = f"{key.what} {key.number}"
        self._group.meter.note_since(stream, self._tag, since, message=message, bytes=values.nbytes, **peer)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        clock = self._group.meter.clock
        start = clock.now()
        with self._group.named("messages", self._tag):
            yield
        self.spans.append(Span(start, clock.now()))
