"""What keeps copies and the host in order, on a faked device; and that it sees a wait that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.streams import DEVICE_NAME, LOADER, FakeStreams, RaceError
from weft.runtime.streams import (
    COMPUTE,
    LOAD,
    STORE,
    CudaStreams,
    Guard,
    InOrder,
    Staging,
    StreamMark,
    pinned_bytes,
    streams_of,
    to_host,
)

SHAPE = (4, 3)
Work = Callable[[FakeStreams], None]


def rows_of_a_guard(streams: FakeStreams) -> None:
    """A buffer of the host that streams and the host read and write in turn."""
    pinned, guard = streams.pinned(SHAPE, torch.float32), Guard(streams)
    for _ in range(2):
        guard.host_writes()
        pinned.fill_(1)
        with streams.on(LOAD, None), guard.stream_reads():
            loaded = streams.lend(streams.to_device(pinned), COMPUTE)
            there = streams.mark()
        streams.join(there)
        made = loaded + 1
        with streams.on(STORE, streams.mark()), guard.stream_writes():
            pinned.copy_(streams.lend(made, STORE), non_blocking=True)
        with streams.on(LOAD, None), guard.stream_reads():
            streams.to_device(pinned)
        guard.host_reads()
        assert pinned.sum().item() == 2 * 12
        with streams.on(STORE, streams.mark()), guard.stream_writes():
            pinned.copy_(made, non_blocking=True)


def buffers_of_staging(streams: FakeStreams) -> None:
    """Copies one after the other through two buffers."""
    staging, slots = Staging(streams), torch.zeros(SHAPE, device=DEVICE_NAME)
    with streams.on(LOAD, streams.mark()):
        for number in range(5):
            with staging.lend(*SHAPE, torch.float32) as found:
                found.fill_(number)
                slots.copy_(found, non_blocking=True)
        there = streams.mark()
    streams.join(there)
    assert to_host(streams, slots * 2).sum().item() == 2 * 4 * 12


WORKS = {one.__name__: one for one in (rows_of_a_guard, buffers_of_staging)}
WAITS = {
    "rows_of_a_guard": ("host_writes", "stream_reads", "stream_writes", "host_reads"),
    "buffers_of_staging": ("_buffer", "to_host"),
}
"""The functions of weft that wait, by what needs them."""


@pytest.mark.parametrize("name", WORKS)
def test_what_waits_has_no_race(name: str) -> None:
    with FakeStreams() as streams:
        WORKS[name](streams)
    waits = {place.split(" in ")[1] for place in streams.places}
    assert waits >= set(WAITS[name])


@pytest.mark.parametrize(("name", "wait"), [(name, wait) for name, waits in WAITS.items() for wait in waits])
def test_a_wait_that_is_taken_out_is_found(name: str, wait: str) -> None:
    way = "join" if wait.startswith("stream") else "finish"
    with pytest.raises(RaceError, match="does not wait for"), FakeStreams(f"{way} in {wait}") as streams:
        WORKS[name](streams)


def test_a_loan_that_is_not_told_is_found() -> None:
    def use(streams: FakeStreams, *, lent: bool) -> None:
        with streams.on(LOAD, None):
            loaded = streams.to_device(torch.ones(SHAPE))
            there = streams.mark()
        streams.join(there)
        if lent:
            streams.lend(loaded, COMPUTE)
        (loaded + 1).sum()

    with FakeStreams() as streams:
        use(streams, lent=True)
    with pytest.raises(RaceError, match=r"memory of load is free while .* on compute is under way"):  # noqa: SIM117
        with FakeStreams() as streams:
            use(streams, lent=False)


def test_memory_of_both_is_found() -> None:
    with pytest.raises(RaceError, match="add has operands of the host and of the device"), FakeStreams() as streams:
        streams.pinned(SHAPE, torch.float32) + torch.zeros(SHAPE, device=DEVICE_NAME)


@pytest.mark.parametrize("writer", ["host", "stream"])
def test_a_reader_beside_a_writer_is_waited_for_by_the_next(writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one buffer: a loader reads the last two while the first two are written."""
    with FakeStreams() as streams:
        pinned, guard = streams.pinned(SHAPE, torch.float32), Guard(streams)
        finish = streams.finish

        def read() -> None:
            with streams.on(LOAD, None), guard.stream_reads():
                streams.to_device(pinned[2:])

        def wait(mark: StreamMark | None) -> None:
            finish(mark)
            monkeypatch.undo()
            read()

        read()
        if writer == "host":
            monkeypatch.setattr(streams, "finish", wait)
            guard.host_writes()
            pinned[:2].fill_(1)
        else:
            with streams.on(STORE, streams.mark()), guard.stream_writes():
                streams.run_as(LOADER, read)
                pinned[:2].copy_(torch.ones(2, 3, device=DEVICE_NAME), non_blocking=True)
        guard.host_writes()
        pinned[2:].fill_(2)


def test_pinned_memory_takes_a_power_of_two() -> None:
    assert [pinned_bytes(one) for one in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]


def test_the_cpu_has_nothing_to_wait_for() -> None:
    streams, rows = streams_of(torch.device("cpu")), torch.ones(SHAPE)
    assert isinstance(streams, InOrder)
    assert streams.mark() is None
    assert to_host(streams, rows) is rows
    assert streams.to_device(rows) is rows
    with streams.on(LOAD, None), Staging(streams).lend(*SHAPE, torch.float64) as found:
        assert (found.shape, found.dtype) == (SHAPE, torch.float64)


class FakeCuda:
    """What CudaStreams asks of torch.cuda, written down."""

    def __init__(self) -> None:
        self.present, self.said, self.names = "default", list[str](), iter(("first", "second", "third", "fourth"))

    def Stream(self, _device: torch.device) -> FakeCudaStream:
        return FakeCudaStream(self, next(self.names))

    def Event(self, *, blocking: bool) -> FakeCudaEvent:
        assert blocking
        return FakeCudaEvent(self)

    def current_stream(self, device: torch.device) -> FakeCudaStream:
        assert device.index == 3, "of the rank's GPU, whichever is the thread's"
        return FakeCudaStream(self, self.present)

    def current_device(self) -> int:
        return 3

    @contextmanager
    def stream(self, stream: FakeCudaStream) -> Iterator[None]:
        before, self.present = self.present, stream.name
        yield
        self.present = before


@dataclass
class FakeCudaStream:
    cuda: FakeCuda = field(compare=False)
    name: str

    def wait_event(self, event: FakeCudaEvent) -> None:
        self.cuda.said.append(f"{self.name} waits for {event.of}")


@dataclass
class FakeCudaEvent:
    cuda: FakeCuda
    of: str = ""

    def record(self, stream: FakeCudaStream) -> None:
        self.of = stream.name

    def synchronize(self) -> None:
        self.cuda.said.append(f"host waits for {self.of}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """In the place of torch.cuda, since nothing else runs the code for CUDA here."""
    cuda = FakeCuda()
    for name in ("Stream", "Event", "current_stream", "current_device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


class Lent(Tensor):
    """A tensor that notes which streams use it."""

    def record_stream(self, stream: Any) -> None:
        stream.cuda.said.append(f"lent to {stream.name}")


def test_kernels_are_in_the_stream_that_is_present(cuda: FakeCuda) -> None:
    """Also of a second run, in a stream of one's own."""
    for own in ("default", "own"):
        with cuda.stream(FakeCudaStream(cuda, own)):
            streams = streams_of(torch.device("cuda", 3))
            with streams.on(LOAD, streams.mark()):
                streams.lend(torch.ones(1).as_subclass(Lent), COMPUTE)
    assert cuda.said == ["first waits for default", "lent to default", "third waits for own", "lent to own"]


def test_marks_of_cuda_are_events(cuda: FakeCuda) -> None:
    streams = CudaStreams(torch.device("cuda"))
    computed = streams.mark()
    with streams.on(LOAD, computed):
        loaded = streams.mark()
    streams.join(loaded)
    streams.finish(loaded)
    streams.join(None)
    streams.finish(None)
    assert [computed.stream, loaded.stream] == [COMPUTE, LOAD]
    assert cuda.said == ["first waits for default", "default waits for first", "host waits for first"]
