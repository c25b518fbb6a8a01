"""Values that a background thread prepares before they are used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

from weft.runtime.meter import Meter

Value = TypeVar("Value")


def prepare_ahead(values: Iterator[Value], limit: int, meter: Meter) -> Iterator[Value]:
    """Yield the values of an iterator, of which a thread prepares up to `limit` in advance.

    An error in the thread is raised here.

    Args:
        values: The iterator.
        limit: Number of prepared values; 0: each value is computed when it is requested.
        meter: Meter whose timer `batches` counts the time in which no value is ready.
    """
    if not limit:
        yield from timed(values, meter)
        return
    ready: queue.Queue[Value | BaseException | None] = queue.Queue(limit)
    stopped = threading.Event()

    def put(value: Value | BaseException | None) -> bool:
        while not stopped.is_set():
            with suppress(queue.Full):
                ready.put(value, timeout=0.1)
                return True
        return False

    def work() -> None:
        try:
            for value in values:
                if not put(value):
                    return
            put(None)
        except BaseException as error:  # raised again where the value is used
            put(error)

    def queued() -> Iterator[Value]:
        while (value := ready.get()) is not None:
            if isinstance(value, BaseException):
                raise value
            yield value

    thread = threading.Thread(target=work, name="weft-batches", daemon=True)
    thread.start()
    try:
        yield from timed(queued(), meter)
    finally:
        stopped.set()


def timed(values: Iterator[Value], meter: Meter) -> Iterator[Value]:
    """Yield the values of an iterator, and count the time of waiting for each in the timer `batches`.

    Args:
        values: The iterator.
        meter: Meter that has the timer.
    """
    while True:
        with meter.timer("batches"):
            try:
                value = next(values)
            except StopIteration:
                return
        yield value
