"""Streams and the host wait for each other, on a fake device, and missing waits are detected."""

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
    """Let streams and the host read and write a buffer of the host in turn."""
    pinned, guard = streams.pinned(SHAPE, torch.float32), Guard(streams)
    for _ in range(2):
        guard.host_writes()
        pinned.fill_(1)
        with streams.on(LOAD, None), guard.stream_reads():
            loaded = streams.lend(streams.to_device(pinned), COMPUTE)
            loaded_mark = streams.mark()
        streams.join(loaded_mark)
        result = loaded + 1
        with streams.on(STORE, streams.mark()), guard.stream_writes():
            pinned.copy_(streams.lend(result, STORE), non_blocking=True)
        with streams.on(LOAD, None), guard.stream_reads():
            streams.to_device(pinned)
        guard.host_reads()
        assert pinned.sum().item() == 2 * 12
        with streams.on(STORE, streams.mark()), guard.stream_writes():
            pinned.copy_(result, non_blocking=True)


def buffers_of_staging(streams: FakeStreams) -> None:
    """Copy rows one after the other through two buffers."""
    staging, slots = Staging(streams), torch.zeros(SHAPE, device=DEVICE_NAME)
    with streams.on(LOAD, streams.mark()):
        for number in range(5):
            with staging.lend(*SHAPE, torch.float32) as buffer:
                buffer.fill_(number)
                slots.copy_(buffer, non_blocking=True)
        loaded_mark = streams.mark()
    streams.join(loaded_mark)
    assert to_host(streams, slots * 2).sum().item() == 2 * 4 * 12


WORKS = {function.__name__: function for function in (rows_of_a_guard, buffers_of_staging)}
WAITS = {
    "rows_of_a_guard": ("host_writes", "stream_reads", "stream_writes", "host_reads"),
    "buffers_of_staging": ("_buffer", "to_host"),
}
"""Functions of weft that wait, for each function of WORKS that needs them."""


@pytest.mark.parametrize("name", WORKS)
def test_no_race(name: str) -> None:
    with FakeStreams() as streams:
        WORKS[name](streams)
    waits = {place.split(" in ")[1] for place in streams.places}
    assert waits >= set(WAITS[name])


@pytest.mark.parametrize(("name", "wait"), [(name, wait) for name, waits in WAITS.items() for wait in waits])
def test_a_missing_wait_is_detected(name: str, wait: str) -> None:
    way = "join" if wait.startswith("stream") else "finish"
    with pytest.raises(RaceError, match="does not wait for"), FakeStreams(f"{way} in {wait}") as streams:
        WORKS[name](streams)


def test_a_missing_lend_is_detected() -> None:
    def use(streams: FakeStreams, *, lent: bool) -> None:
        with streams.on(LOAD, None):
            loaded = streams.to_device(torch.ones(SHAPE))
            loaded_mark = streams.mark()
        streams.join(loaded_mark)
        if lent:
            streams.lend(loaded, COMPUTE)
        (loaded + 1).sum()

    with FakeStreams() as streams:
        use(streams, lent=True)
    with pytest.raises(RaceError, match=r"memory of load is free while .* on compute is under way"):  # noqa: SIM117
        with FakeStreams() as streams:
            use(streams, lent=False)


def test_mixed_operands_are_detected() -> None:
    with pytest.raises(RaceError, match="add has operands of the host and of the device"), FakeStreams() as streams:
        streams.pinned(SHAPE, torch.float32) + torch.zeros(SHAPE, device=DEVICE_NAME)


@pytest.mark.parametrize("writer", ["host", "stream"])
def test_the_next_writer_waits_for_a_concurrent_reader(writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer of a buffer waits for a reader of other rows that started during the previous write."""
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


def test_pinned_memory_is_a_power_of_two() -> None:
    assert [pinned_bytes(num_bytes) for num_bytes in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]


def test_the_cpu_waits_for_nothing() -> None:
    streams, rows = streams_of(torch.device("cpu")), torch.ones(SHAPE)
    assert isinstance(streams, InOrder)
    assert streams.mark() is None
    assert to_host(streams, rows) is rows
    assert streams.to_device(rows) is rows
    with streams.on(LOAD, None), Staging(streams).lend(*SHAPE, torch.float64) as buffer:
        assert (buffer.shape, buffer.dtype) == (SHAPE, torch.float64)


class FakeCuda:
    """A fake of torch.cuda that records the calls of CudaStreams."""

    def __init__(self) -> None:
        self.present, self.calls, self.names = "default", list[str](), iter(("first", "second", "third", "fourth"))

    def Stream(self, _device: torch.device) -> FakeCudaStream:
        return FakeCudaStream(self, next(self.names))

    def Event(self, *, blocking: bool) -> FakeCudaEvent:
        assert blocking
        return FakeCudaEvent(self)

    def current_stream(self, device: torch.device) -> FakeCudaStream:
        assert device.index == 3, "of the rank's GPU, not that of the thread"
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
        self.cuda.calls.append(f"{self.name} waits for {event.of}")


@dataclass
class FakeCudaEvent:
    cuda: FakeCuda
    of: str = ""

    def record(self, stream: FakeCudaStream) -> None:
        self.of = stream.name

    def synchronize(self) -> None:
        self.cuda.calls.append(f"host waits for {self.of}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replace torch.cuda by a fake, because no other test on the CPU runs the code for CUDA."""
    cuda = FakeCuda()
    for name in ("Stream", "Event", "current_stream", "current_device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


class Lent(Tensor):
    """A tensor that records the streams that use it."""

    def record_stream(self, stream: Any) -> None:
        stream.cuda.calls.append(f"lent to {stream.name}")


def test_kernels_run_in_the_current_stream(cuda: FakeCuda) -> None:
    """Kernels run in the current stream, also in a second run with a custom stream."""
    for name in ("default", "custom"):
        with cuda.stream(FakeCudaStream(cuda, name)):
            streams = streams_of(torch.device("cuda", 3))
            with streams.on(LOAD, streams.mark()):
                streams.lend(torch.ones(1).as_subclass(Lent), COMPUTE)
    assert cuda.calls == ["first waits for default", "lent to default", "third waits for custom", "lent to custom"]


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
    assert cuda.calls == ["first waits for default", "default waits for first", "host waits for first"]
