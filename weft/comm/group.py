"""The ranks of a run, and the only door to the network: every byte that moves is counted here."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.exchange_key import Key
from weft.comm.gloo import new_gloo_group
from weft.comm.missing_ranks import missing_ranks
from weft.runtime.clock import EventClock
from weft.runtime.meter import Meter, Span
from weft.runtime.streams import Streams, streams_of, to_host
from weft.utils.errors import RunError


class Group:
    """All ranks of a run, as one of them sees them.

    `join` makes it; a single rank may make it directly and communicates with nobody.

    Args:
        rank: Number of this rank, from 0.
        size: Number of ranks.
        meter: Counter of bytes and seconds; default: a new one.
        device: Device of this rank's tensors.
        process_group: PyTorch's process group of all ranks; None for a single rank.
        name: Prefix of the names of collectives in the meter.
        timeout: Time after which a peer that does not answer counts as lost.
        staged: True if tensors on the device are copied to the host before they are sent, because the ranks have gloo
            alone.
        shares: True if several ranks share a GPU.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        meter: Meter | None = None,
        device: str | torch.device = "cpu",
        *,
        process_group: dist.ProcessGroup | None = None,
        name: str = "",
        timeout: timedelta | None = None,
        staged: bool = False,
        shares: bool = False,
    ) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.staged, self.shares = staged, shares
        self.process_group, self.name, self.timeout = process_group, name, timeout
        self.streams: Streams = streams_of(self.device)
        """Of the device, for whoever moves rows between it and the host."""
        self.meter = meter or Meter()
        if self.device.type == "cuda":
            self.meter.use(EventClock.of(self.device))
        self.under_way: set[int] = set()
        """Slots of the exchanges that have begun here and are not done."""
        self._num_keys: Counter[str] = Counter()

    @cached_property
    def beside(self) -> Group:
        """Group of the same ranks on the host, with connections and a meter of its own, for a thread.

        All ranks must make it.
        """
        process_group = new_gloo_group(self.timeout) if self.size > 1 else None
        return Group(self.rank, self.size, process_group=process_group, name="beside ", timeout=self.timeout)

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], *, tag: str) -> Tensor:
        """Sends slice q of the flat `send` to rank q; returns what the ranks sent here, in rank order, flat.

        Counts are elements per rank; zero is legal.
        """
        return self.all_to_all_async(send, send_counts, recv_counts, tag=tag).wait()

    def all_to_all_async(
        self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], *, tag: str, key: Key | None = None
    ) -> Pending:
        """Begins an `all_to_all`; other work can be done until it is waited for.

        key: by which ranks tell it from others under way; None: by its place among the group's with this tag.
        """
        return (
            Ready(send) if self.size == 1 else PendingExchange(self, send, send_counts, recv_counts, tag=tag, key=key)
        )

    def next_key(self, what: str) -> Key:
        """The next key of its kind, for exchanges that all ranks begin in one order among those of that kind."""
        self._num_keys[what] += 1
        return Key(what, self._num_keys[what])

    def all_reduce(self, values: Tensor, *, tag: str) -> Tensor:
        """The sum of `values` over the ranks, in a fixed order; bytes are those of a ring."""
        if self.size == 1:
            return values
        total = self.sendable(values).clone(memory_format=torch.contiguous_format)
        payload = 2 * values.numel() * values.element_size() * (self.size - 1) // self.size
        with self._collective("all_reduce", tag, payload, payload):
            dist.all_reduce(total, group=self.process_group)
        return self.received(total, values)

    def broadcast(self, values: Tensor, *, tag: str) -> None:
        """Overwrites `values` with rank 0's."""
        if self.size > 1:
            payload = values.numel() * values.element_size()
            sent = self.sendable(values)
            with self._collective("broadcast", tag, 0 if self.rank else payload, payload if self.rank else 0):
                dist.broadcast(sent, group_src=0, group=self.process_group)
            if sent is not values:
                values.copy_(sent)

    def all_gather_object(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's `report` (plain JSON values), in rank order, on every rank."""
        if self.size == 1:
            return [report]
        text = torch.frombuffer(bytearray(json.dumps(report).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._collective("all_gather", "report", 8 * (self.size - 1), 8 * (self.size - 1)):
            dist.all_gather(lengths, torch.tensor([len(text)]), group=self.process_group)
        counts = [int(length) for length in lengths]
        texts = self.all_to_all(text.repeat(self.size), [len(text)] * self.size, counts, tag="report")
        return [json.loads(part.cpu().numpy().tobytes()) for part in texts.split(counts)]

    def sendable(self, values: Tensor) -> Tensor:
        """A tensor where the ranks' network takes it from."""
        return to_host(self.streams, values) if self.staged else values

    def received(self, values: Tensor, like: Tensor) -> Tensor:
        """What the network has brought, where another tensor is."""
        return self.streams.to_device(values) if self.staged and self.streams.holds(like) else values

    def close(self) -> None:
        """Leave the process group and that of `beside`: when all ranks are done, or this one cannot go on."""
        try:
            self.close_beside()
        finally:
            self._leave()

    def close_beside(self) -> None:
        """Leave the process group of `beside`, if there is one: its threads wake up many times a second."""
        if beside := vars(self).pop("beside", None):
            beside._leave()

    def _leave(self) -> None:
        if self.process_group is not None and dist.is_initialized():
            dist.destroy_process_group(self.process_group)
        self.process_group = None  # the last hold on connections, whose end the others see

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def _collective(self, operation: str, tag: str, sent: int, received: int) -> Iterator[None]:
        key, start = self.next_key(tag), self.meter.clock.now()
        with self.named(operation, tag):
            yield
        span = Span(start, self.meter.clock.now())
        self.count(tag, sent, received, key, [span])
        self.note(tag, sent, received, span)

    def count(self, tag: str, sent: int, received: int, key: Key, spans: Sequence[Span]) -> None:
        """Notes an exchange that is done: bytes to and from other ranks, and when this rank waited for it."""
        self.meter.collective(tag, sent, received, name=f"{self.name}{key.what} {key.number}", spans=spans)

    def note(self, tag: str, sent: int, received: int, span: Span) -> None:
        """Notes in the timeline when an exchange was under way."""
        self.meter.note("send", tag, span, bytes=sent)
        self.meter.note("receive", tag, span, bytes=received)

    @contextmanager
    def named(self, operation: str, tag: str) -> Iterator[None]:
        """Shows what this rank is at; a peer that does not answer becomes an error that names rank and phase."""
        self.meter.show(f"{self.meter.where}, {operation} '{tag}'")
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            seconds = time.perf_counter() - start
            reason = str(error).splitlines()[0].partition(". ")[0]
            lost = missing_ranks(self.rank, self.size)
            raise RunError(
                f"rank {self.rank} lost {lost} in {self.meter.where}, {operation} '{tag}', "
                f"after {seconds:.1f} s ({reason})"
            ) from error
        self.meter.show(self.meter.where)


class Pending(Protocol):
    """Numbers on their way here."""

    def wait(self) -> Tensor:
        """All of them, flat, as soon as they are here."""
        ...


@dataclass(frozen=True)
class Ready:
    """What one rank sends itself."""

    values: Tensor

    def wait(self) -> Tensor:
        return self.values


class PendingExchange:
    """An exchange under way: slice q of the flat `send` goes to rank q, and what the ranks send arrives in rank order.

    Counts are elements per rank. ring: each pair of ranks for itself, the next rank in the ring first, so that no two
    ranks send to the same one first and what has arrived can be used (NeutronStar, section 4.3); else, and on GPUs, by
    the backend's own all_to_all: under NCCL one group of sends and receives, in a stream of its own, for which this
    rank's present stream waits, and not the host. Counted as one collective when all is here; its seconds are those
    spent in here, not those in which the caller does something else.

    key: in a ring, ranks may begin exchanges of different keys in different orders; the backend's own have no key, and
    all ranks begin them in one order. One that is under way is not begun again.
    """

    def __init__(
        self,
        group: Group,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        tag: str,
        key: Key | None = None,
        ring: bool = True,
    ) -> None:
        key = key or group.next_key(tag)
        assert key.slot not in group.under_way, f"exchange {key} is under way already"
        group.under_way.add(key.slot)
        self._group, self._tag, self._key, self._given = group, tag, key, send
        self._send = group.sendable(send.contiguous())
        self._sent, self._received = _others(send, send_counts, group), _others(send, recv_counts, group)
        self._buffer = torch.empty(sum(recv_counts), dtype=send.dtype, device=self._send.device)
        self._parts: Sequence[Tensor] = self._buffer.split(list(recv_counts))
        self._sends: list[dist.Work] = []
        self._receives: dict[int, dist.Work] = {}
        self._spans: list[Span] = []
        self._done = False
        with self._timed():
            if ring and self._send.device.type == "cpu":
                self._start_ring(self._send.split(list(send_counts)))
            elif group.size > 1:
                counts = list(recv_counts), list(send_counts)
                whole = dist.all_to_all_single(
                    self._buffer, self._send, *counts, group=group.process_group, async_op=True
                )
                self._receives = dict.fromkeys(range(group.size), whole)

    def wait(self, rank: int | None = None) -> Tensor:
        """What one rank sent, or what all did, flat, as soon as it is here."""
        ranks = list(self._receives) if rank is None else [rank] if rank in self._receives else []
        with self._timed():
            for one in ranks:
                self._receives.pop(one).wait()
            while self._sends and rank is None:
                self._sends.pop().wait()  # once: gloo would wait for another message
        if rank is not None:
            return self._group.received(self._parts[rank], self._given)
        if not self._done:
            self._done = True
            self._group.under_way.remove(self._key.slot)
            self._group.count(self._tag, self._sent, self._received, self._key, self._spans)
            under_way = Span(self._spans[0].start, self._spans[-1].stop)
            self._group.note(self._tag, self._sent, self._received, under_way)
        return self._group.received(self._buffer, self._given)

    def _start_ring(self, parts: Sequence[Tensor]) -> None:
        """Receives first: gloo's pairs have one queue, in which a peer's leave to send would wait behind a message."""
        size, rank, slot, network = self._group.size, self._group.rank, self._key.slot, self._group.process_group
        self._parts[rank].copy_(parts[rank])
        for before in ((rank - step) % size for step in range(1, size)):
            part = self._parts[before]
            work = dist.irecv(part, group=network, group_src=before, tag=slot) if part.numel() else None
            if work:
                self._receives[before] = work
        for after in ((rank + step) % size for step in range(1, size)):
            part = parts[after]
            work = dist.isend(part, group=network, group_dst=after, tag=slot) if part.numel() else None
            if work:
                self._sends.append(work)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        clock = self._group.meter.clock
        start = clock.now()
        with self._group.named("all_to_all", self._tag):
            yield
        self._spans.append(Span(start, clock.now()))


def _others(values: Tensor, counts: Sequence[int], group: Group) -> int:
    return (sum(counts) - counts[group.rank]) * values.element_size()
