"""Signals that ask a run to stop (SIGTERM, Ctrl-C, a closed terminal), which the training loop reads between epochs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from weft.utils.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a run to stop."""


def handle_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> dict[signal.Signals, Any]:
    """Set a handler for SIGNALS, and return their former handlers. An ignored SIGHUP (nohup) stays ignored."""
    handled = [
        number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
    return {number: signal.signal(number, handler) for number in handled}


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Block SIGNALS in the `with` block. A process started there has them blocked until it unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequest:
    """Context manager that stores the first signal in `signal` (0: none yet), for the training loop to read.

    Args:
        impatient: True to stop at once at a second signal. False for a rank of a launcher: it gets one Ctrl-C twice,
            from the terminal and from the launcher.
    """

    def __init__(self, *, impatient: bool) -> None:
        self.signal = 0
        self._impatient = impatient
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = handle_signals(self._store_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _store_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal and self._impatient:
            name = signal.Signals(number).name
            raise Stopped(f"stopped at once by {name}; --resume continues from the last checkpoint", number)
        self.signal = number
