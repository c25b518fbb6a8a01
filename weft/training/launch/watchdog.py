"""Says what a rank is at when it is at it for too long: a collective, or anything else that does not return."""

from __future__ import annotations

import os
import sys
import threading
import time

from weft.runtime.meter import Meter


class Watchdog:
    """While entered, prints a line when a rank has been at the same thing for so many seconds; once for each."""

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
        said = 0.0
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            shown, since = self._meter.shown
            if since != said and time.monotonic() - since > self._seconds:
                said = since
                print(
                    f"weft: rank {self._rank} has been in {shown} for {self._seconds:.0f} s; "
                    f"kill -USR1 {os.getpid()} prints where",
                    file=sys.stderr,
                    flush=True,
                )
