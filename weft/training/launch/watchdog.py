"""Watchdog that reports which operation a rank has been in for too long, such as a collective that does not return."""

from __future__ import annotations

import os
import threading
import time

from weft.runtime.meter import Meter
from weft.utils.log import LOGGER


class Watchdog:
    """Prints a line when a rank has been in the same operation for too long, once for each operation.

    Args:
        meter: The meter, which knows the current operation.
        rank: Number of the rank.
        seconds: Duration after which the line is printed.
    """

    def __init__(self, meter: Meter, rank: int, seconds: float) -> None:
        self._meter, self._rank, self._seconds = meter, rank, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        """Compare the duration of the current operation with the limit until the watchdog ends."""
        reported = 0.0
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            operation, since = self._meter.status
            if since != reported and time.monotonic() - since > self._seconds:
                reported = since
                LOGGER.info(
                    f"rank {self._rank} has been in {operation} for {self._seconds:.0f} s; "
                    f"kill -USR1 {os.getpid()} prints its stack trace"
                )
