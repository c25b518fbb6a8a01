"""SIGTERM and Ctrl-C as a request that the training loop reads between two epochs."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While entered, the first signal is kept in `signal` (0: none yet) for the loop to stop at the next boundary.

    impatient: a second signal interrupts at once. A launched rank must not be: it hears of one Ctrl-C from the terminal
    and from the launcher.
    """

    def __init__(self, *, impatient: bool) -> None:
        self.signal = 0
        self._impatient = impatient
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        if self.signal and self._impatient:
            raise KeyboardInterrupt
        self.signal = number
