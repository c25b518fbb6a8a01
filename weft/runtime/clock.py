"""Clocks that a meter reads: the host's, or a GPU's events, for which nothing waits until their seconds are asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Gives stamps; the seconds between two of them are known once the clock has been waited for."""

    def now(self) -> Any:
        """A stamp of this moment."""
        ...

    def wait(self) -> None:
        """Returns when all that was stamped has happened."""
        ...

    def seconds(self, start: Any, stop: Any) -> float:
        """Between two stamps."""
        ...


class HostClock:
    """Seconds of the process."""

    def now(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        """Nothing is under way."""

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class EventClock:
    """Seconds of a GPU: events take their place in its stream, so that neither it nor the host stands still.

    make: an event such as `torch.cuda.Event(enable_timing=True)`. stream: the one in whose order the event happens.
    wait_for_all: returns when the GPU has done all. Not measured on a GPU yet.
    """

    def __init__(self, make: Callable[[], Any], stream: Callable[[], Any], wait_for_all: Callable[[], None]) -> None:
        self._make, self._stream, self._wait_for_all = make, stream, wait_for_all

    @classmethod
    def of(cls, device: torch.device) -> EventClock:
        """Of a CUDA device's current streams, in whichever thread: others' present device may be another."""
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
