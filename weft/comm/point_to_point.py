"""Messages from rank to rank, each sent as soon as it is ready, while others do something else."""

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
    """A message to come: which it is, and how many numbers it has."""

    key: Key
    numbers: int


class Messages:
    """Messages under way between the hosts of a group's ranks, by gloo: NCCL knows no tags, and its waits do not wait.

    expected: by rank, what that sends here, in the order in which it is waited for. A thread for each rank waits, and
    one for all that leaves, so that the caller sees what is here without waiting. Receives begin at once, since gloo's
    pairs have one queue, in which a peer's leave to send would wait behind a message.
    """

    def __init__(
        self, group: Group, expected: Mapping[int, Sequence[Expected]], dtype: torch.dtype, *, tag: str
    ) -> None:
        self._group, self._tag = group, tag
        self._bell = threading.Condition()
        self._here: dict[tuple[int, Key], Tensor] = {}
        self._failed: RuntimeError | None = None
        self._leaving = SimpleQueue[tuple[int, Key, Tensor, dist.Work | None, Any] | None]()
        self.num_come = 0
        """How many messages have come so far."""
        self.spans: list[Span] = []
        """When the caller waited."""
        self._threads = [threading.Thread(target=self._see_off, daemon=True)]
        for rank, ones in expected.items():
            coming = [(one.key, torch.empty(one.numbers, dtype=dtype)) for one in ones]
            with group.named("messages", tag):
                works = [
                    dist.irecv(buffer, group=group.process_group, group_src=rank, tag=key.slot)
                    for key, buffer in coming
                ]
            self._threads.append(threading.Thread(target=self._listen, args=(rank, coming, works), daemon=True))
        for thread in self._threads:
            thread.start()

    def send(self, rank: int, key: Key, values: Tensor) -> None:
        """Begins to send a contiguous tensor of the host, which is not to be changed. RunError where a peer is lost."""
        since = self._group.meter.stamp()
        with self._group.named("messages", self._tag):
            work = dist.isend(values, group=self._group.process_group, group_dst=rank, tag=key.slot)
        self._leaving.put((rank, key, values, work, since))

    def here(self, rank: int, key: Key) -> bool:
        """Whether a message has come that is not taken yet."""
        return (rank, key) in self._here

    def take(self, rank: int, key: Key) -> Tensor:
        """A message that is here, flat, on the host."""
        return self._here.pop((rank, key))

    def idle(self, seen: int) -> None:
        """Waits until more messages have come than `seen`. RunError where a peer is lost."""
        with self._timed(), self._bell:
            while self.num_come <= seen and self._failed is None:
                self._bell.wait()
            if self._failed is not None:
                raise self._failed

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        self._leaving.put(None)
        with self._timed():
            for thread in self._threads:
                thread.join()
            if self._failed is not None:
                raise self._failed

    def _see_off(self) -> None:
        """Waits for what leaves."""
        while (one := self._leaving.get()) is not None:
            rank, key, values, work, since = one
            if not self._waited(work):
                return
            self._note("send", key, values, since, to=rank)

    def _listen(self, rank: int, coming: Sequence[tuple[Key, Tensor]], works: Sequence[dist.Work | None]) -> None:
        for (key, buffer), work in zip(coming, works, strict=True):
            since = self._group.meter.stamp()
            if not self._waited(work):
                return
            self._note("receive", key, buffer, since, **{"from": rank})
            with self._bell:
                self._here[rank, key] = buffer
                self.num_come += 1
                self._bell.notify()

    def _waited(self, work: dist.Work | None) -> bool:
        """Waits for a message; False if a peer is lost, which the caller hears of."""
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
        self._group.meter.ended(stream, self._tag, since, message=message, bytes=values.nbytes, **peer)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        clock = self._group.meter.clock
        start = clock.now()
        with self._group.named("messages", self._tag):
            yield
        self.spans.append(Span(start, clock.now()))
