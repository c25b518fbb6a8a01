"""What keeps copies and the host in order, on a faked device; and that it sees a wait that is not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.streams import DEVICE_NAME, FakeStreams, RaceError
from weft.core.streams import COMPUTE, LOAD, STORE, Guard, InOrder, Staging, streams_of, to_host

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


def test_the_cpu_has_nothing_to_wait_for() -> None:
    streams, rows = streams_of(torch.device("cpu")), torch.ones(SHAPE)
    assert isinstance(streams, InOrder)
    assert streams.mark() is None
    assert to_host(streams, rows) is rows
    assert streams.to_device(rows) is rows
    with streams.on(LOAD, None), Staging(streams).lend(*SHAPE, torch.float64) as found:
        assert (found.shape, found.dtype) == (SHAPE, torch.float64)
