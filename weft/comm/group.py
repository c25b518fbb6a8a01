"""The group of all ranks and its collectives, which count every byte that is sent or received."""

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
    """All ranks of a run, with collectives between them, from the point of view of one rank.

    `join` creates it. A single rank may create it directly; its collectives return their input.

    Args:
        rank: Number of this rank, from 0.
        size: Number of ranks.
        meter: Counter of bytes and seconds; default: a new one.
        device: Device of this rank's tensors.
        process_group: PyTorch's process group of all ranks; None for a single rank.
        name: Prefix of the names of this group's collectives in the meter.
        timeout: Time after which a peer that does not answer counts as lost.
        staged: True if tensors on the device are copied to the host before they are sent, because the only backend is
            gloo.
        shares_gpu: True if several ranks share a GPU.
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
        shares_gpu: bool = False,
    ) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.staged, self.shares_gpu = staged, shares_gpu
        self.process_group, self.name, self.timeout = process_group, name, timeout
        self.streams: Streams = streams_of(self.device)
        """Streams of the device, for copies between it and the host."""
        self.meter = meter or Meter()
        if self.device.type == "cuda":
            self.meter.set_clock(EventClock.of(self.device))
        self.under_way: set[int] = set()
        """Slots of the exchanges that this rank has started and not finished."""
        self._num_keys: Counter[str] = Counter()

    @cached_property
    def host_group(self) -> Group:
        """Second group of the same ranks, on the host, with its own connections and meter, for use by a thread.

        The first access creates it; all ranks must do so.
        """
        process_group = new_gloo_group(self.timeout) if self.size > 1 else None
        return Group(self.rank, self.size, process_group=process_group, name="host ", timeout=self.timeout)

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], *, tag: str) -> Tensor:
        """Send a slice of `send` to each rank, and return what all ranks sent to this one, in rank order.

        Args:
            send: One-dimensional tensor: the slices for rank 0, 1, ...
            send_counts: Number of elements for each rank; may be 0.
            recv_counts: Number of elements from each rank.
            tag: Name under which the meter counts the bytes.
        """
        return self.all_to_all_async(send, send_counts, recv_counts, tag=tag).wait()

    def all_to_all_async(
        self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], *, tag: str, key: Key | None = None
    ) -> Pending:
        """Start an `all_to_all`, and return it without waiting for it.

        Args:
            send: As for `all_to_all`.
            send_counts: As for `all_to_all`.
            recv_counts: As for `all_to_all`.
            tag: As for `all_to_all`.
            key: Key that identifies this exchange on all ranks; None: `next_key(tag)`.
        """
        return (
            Ready(send) if self.size == 1 else PendingExchange(self, send, send_counts, recv_counts, tag=tag, key=key)
        )

    def next_key(self, what: str) -> Key:
        """Return the next key of a kind, for exchanges that all ranks start in the same order within this kind."""
        self._num_keys[what] += 1
        return Key(what, self._num_keys[what])

    def all_reduce(self, values: Tensor, *, tag: str) -> Tensor:
        """Return the sum of `values` over the ranks, added in a fixed order.

        Args:
            values: Tensor of the same shape on every rank.
            tag: Name under which the meter counts the bytes, as for a ring all-reduce: 2 (P - 1) / P of the tensor.
        """
        if self.size == 1:
            return values
        total = self.sendable(values).clone(memory_format=torch.contiguous_format)
        payload = 2 * values.numel() * values.element_size() * (self.size - 1) // self.size
        with self._collective("all_reduce", tag, payload, payload):
            dist.all_reduce(total, group=self.process_group)
        return self.received(total, values)

    def broadcast(self, values: Tensor, *, tag: str) -> None:
        """Overwrite a tensor with that of rank 0.

        Args:
            values: Tensor of the same shape on every rank; changed in place.
            tag: Name under which the meter counts the bytes.
        """
        if self.size > 1:
            payload = values.numel() * values.element_size()
            payload_tensor = self.sendable(values)
            with self._collective("broadcast", tag, 0 if self.rank else payload, payload if self.rank else 0):
                dist.broadcast(payload_tensor, group_src=0, group=self.process_group)
            if payload_tensor is not values:
                values.copy_(payload_tensor)

    def all_gather_object(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the reports of all ranks, in rank order. A report is a dict of values that JSON can represent."""
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
        """Return a tensor in memory from which the backend can send: on the host if `staged`."""
        return to_host(self.streams, values) if self.staged else values

    def received(self, values: Tensor, like: Tensor) -> Tensor:
        """Return a received tensor on the device of another tensor.

        Args:
            values: Tensor that the backend received, on the host if `staged`.
            like: Tensor on the desired device.
        """
        return self.streams.to_device(values) if self.staged and self.streams.holds(like) else values

    def close(self) -> None:
        """Leave the process groups, at the end of a run or if this rank cannot continue."""
        try:
            self.close_host_group()
        finally:
            self._leave()

    def close_host_group(self) -> None:
        """Leave the process group of `host_group`, if it exists; its threads wake up many times a second."""
        if host_group := vars(self).pop("host_group", None):
            host_group._leave()

    def _leave(self) -> None:
        if self.process_group is not None and dist.is_initialized():
            dist.destroy_process_group(self.process_group)
        self.process_group = None  # the last reference: connections close, and the other ranks notice

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
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
        """Count a finished exchange in the meter.

        Args:
            tag: Name under which its bytes are counted.
            sent: Bytes to other ranks.
            received: Bytes from other ranks.
            key: Key of the exchange.
            spans: Times at which this rank waited for it.
        """
        self.meter.collective(tag, sent, received, name=f"{self.name}{key.what} {key.number}", spans=spans)

    def note(self, tag: str, sent: int, received: int, span: Span) -> None:
        """Add an exchange to the timeline.

        Args:
            tag: Name of the exchange.
            sent: Bytes to other ranks.
            received: Bytes from other ranks.
            span: Time from its start to its end.
        """
        self.meter.note("send", tag, span, bytes=sent)
        self.meter.note("receive", tag, span, bytes=received)

    @contextmanager
    def named(self, operation: str, tag: str) -> Iterator[None]:
        """Show a collective as this rank's current activity during the `with` block.

        Args:
            operation: Name of the collective.
            tag: Name of what it exchanges.

        Raises:
            RunError: The collective failed because a peer did not answer. The message names the rank and the phase.
        """
        self.meter.set_status(f"{self.meter.activity}, {operation} '{tag}'")
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            seconds = time.perf_counter() - start
            reason = str(error).splitlines()[0].partition(". ")[0]
            lost = missing_ranks(self.rank, self.size)
            raise RunError(
                f"rank {self.rank} lost {lost} in {self.meter.activity}, {operation} '{tag}', "
                f"after {seconds:.1f} s ({reason})"
            ) from error
        self.meter.set_status(self.meter.activity)


class Pending(Protocol):
    """Exchange that has started."""

    def wait(self) -> Tensor:
        """Wait for the exchange, and return the received elements, in one dimension."""
        ...


@dataclass(frozen=True)
class Ready:
    """Finished exchange of a single rank with itself."""

    values: Tensor

    def wait(self) -> Tensor:
        return self.values


class PendingExchange:
    """Exchange between several ranks that has started.

    On CPUs with `ring`, each pair of ranks exchanges separately. Each rank sends to the next rank of a ring first, so
    that no two ranks send to the same rank at once, and rows of one rank can be used before the others arrive
    (NeutronStar, section 4.3). Otherwise it is one all_to_all of the backend. Under NCCL this is a group of sends and
    receives in a separate stream; the current stream waits for it, the host does not.

    The meter counts one collective when everything has arrived. Its seconds are those spent in this class's methods,
    not those in which the caller does other work.

    Args:
        group: All ranks.
        send: One-dimensional tensor: the slices for rank 0, 1, ...
        send_counts: Number of elements for each rank.
        recv_counts: Number of elements from each rank.
        tag: Name under which the meter counts the bytes.
        key: Key that identifies this exchange on all ranks. With `ring`, ranks may start exchanges with different keys
            in different orders; without, all ranks must start them in the same order. Two exchanges with the same key
            must not be under way at once.
        ring: True to exchange pair by pair if tensors are on the CPU.
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
        self._group, self._tag, self._key, self._original = group, tag, key, send
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
            elif group.size > 1 and not self._send.is_meta:
                counts = list(recv_counts), list(send_counts)
                whole = dist.all_to_all_single(
                    self._buffer, self._send, *counts, group=group.process_group, async_op=True
                )
                self._receives = dict.fromkeys(range(group.size), whole)

    def wait(self, rank: int | None = None) -> Tensor:
        """Wait for the data of a rank, or of all ranks if None, and return it in one dimension, in rank order."""
        ranks = list(self._receives) if rank is None else [rank] if rank in self._receives else []
        with self._timed():
            for sender in ranks:
                self._receives.pop(sender).wait()
            while self._sends and rank is None:
                self._sends.pop().wait()  # never twice: gloo would wait for another message
        if rank is not None:
            return self._group.received(self._parts[rank], self._original)
        if not self._done:
            self._done = True
            self._group.under_way.remove(self._key.slot)
            self._group.count(self._tag, self._sent, self._received, self._key, self._spans)
            under_way = Span(self._spans[0].start, self._spans[-1].stop)
            self._group.note(self._tag, self._sent, self._received, under_way)
        return self._group.received(self._buffer, self._original)

    def _start_ring(self, parts: Sequence[Tensor]) -> None:
        """Start all receives, then all sends.

        Receives come first: gloo has one queue for each pair of ranks, in which the permission for a peer to send would
        otherwise wait for a whole message.
        """
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
