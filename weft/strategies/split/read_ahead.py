"""What is made ahead of its use, by a thread beside the one that uses it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

from weft.runtime.meter import Meter

Value = TypeVar("Value")


def ahead(made: Iterator[Value], most: int, meter: Meter) -> Iterator[Value]:
    """The values of an iterator, of which a thread makes up to `most` ahead; 0: none is made before it is asked for.

    An error in the thread is raised here. meter: is charged for the time that nothing is ready, as `batches`.
    """
    if not most:
        yield from timed(made, meter)
        return
    ready: queue.Queue[Value | BaseException | None] = queue.Queue(most)
    stopped = threading.Event()

    def put(value: Value | BaseException | None) -> bool:
        while not stopped.is_set():
            with suppress(queue.Full):
                ready.put(value, timeout=0.1)
                return True
        return False

    def work() -> None:
        try:
            for value in made:
                if not put(value):
                    return
            put(None)
        except BaseException as error:  # whoever waits raises it
            put(error)

    def values() -> Iterator[Value]:
        while (value := ready.get()) is not None:
            if isinstance(value, BaseException):
                raise value
            yield value

    thread = threading.Thread(target=work, name="weft-batches", daemon=True)
    thread.start()
    try:
        yield from timed(values(), meter)
    finally:
        stopped.set()


def timed(values: Iterator[Value], meter: Meter) -> Iterator[Value]:
    """The values, the time for which each is waited for charged to the timer `batches`."""
    while True:
        with meter.timer("batches"):
            try:
                value = next(values)
            except StopIteration:
                return
        yield value
