"""Clocks of a meter: the host's clock, and GPU events, which do not block the host until their seconds are read."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Source of time stamps. The seconds between two stamps are known after `wait`."""

    def now(self) -> Any:
        """Return a stamp of the current moment."""
        ...

    def wait(self) -> None:
        """Wait until the clock has reached all stamps taken so far, as `seconds` requires."""
        ...

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds between two stamps.

        Args:
            start: The earlier stamp.
            stop: The later stamp.
        """
        ...


class HostClock:
    """Clock of the host process."""

    def now(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        """Return at once: the host is never behind its clock."""

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class EventClock:
    """Clock of a GPU: it records events in a stream, so that neither the GPU nor the host waits.

    Not measured on a GPU yet.

    Args:
        make: Function that creates an event, such as `torch.cuda.Event(enable_timing=True)`.
        stream: Function that returns the stream in which the event is recorded.
        wait_for_all: Function that waits until the GPU has finished all work.
    """

    def __init__(self, make: Callable[[], Any], stream: Callable[[], Any], wait_for_all: Callable[[], None]) -> None:
        self._make, self._stream, self._wait_for_all = make, stream, wait_for_all

    @classmethod
    def of(cls, device: torch.device) -> EventClock:
        """Return a clock for the current streams of a CUDA device, in any thread, whatever its current device."""
        cuda = torch.cuda
        make, stream = partial(cuda.Event, enable_timing=True), partial(cuda.current_stream, device)
        return cls(make, stream, partial(cuda.synchronize, device))

    def now(self) -> Any:
        event = self._make()
        event.record(self._stream())
        return event

    def wait(self) -> None:
        self._wait_for_all()

    def seconds(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop)) / 1000
