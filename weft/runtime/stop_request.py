"""SIGTERM, Ctrl-C and a closed terminal as a request that the training loop reads between two epochs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from weft.utils.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def handle_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> dict[signal.Signals, Any]:
    """Sets a handler for SIGNALS but a SIGHUP that is ignored, as under nohup; what they had before."""
    heard = [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


@contextmanager
def blocked_signals() -> Iterator[None]:
    """SIGNALS wait while entered, and in a process that is started meanwhile until that unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
            self._before = handle_signals(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        if self.signal and self._impatient:
            name = signal.Signals(number).name
            raise Stopped(f"stopped at once by {name}; --resume goes on from the last checkpoint", number)
        self.signal = number
