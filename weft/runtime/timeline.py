"""Timeline of each rank in the trace format of Chrome's profiler, which https://ui.perfetto.dev displays."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from weft.runtime.clock import Clock
from weft.utils.files.migrate import VERSIONS

STREAMS = ("compute", "send", "receive", "load", "store")
"""Rows of a timeline."""
MICROSECONDS = 1e6


class Slice(NamedTuple):
    """Activity of a rank without interruption."""

    stream: str
    """One of STREAMS. Slices of `compute` are nested: a phase, a stage, a chunk, and waiting within it."""
    name: str
    """Name of the activity."""
    start: float
    """Start in seconds of the machine's clock."""
    stop: float
    """End in seconds of the machine's clock."""
    about: dict[str, Any]
    """Details: segment, chunk, bytes; for a message also its name (`message`) and the other rank (`to` or `from`)."""


class Timeline:
    """Slices of one rank.

    Args:
        clock: Clock of the stamps.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since, self._at = clock.now(), time.time()
        self._slices: list[tuple[str, str, Any, Any, dict[str, Any]]] = []

    def add(self, stream: str, name: str, start: Any, stop: Any, **about: Any) -> None:
        """Add a slice between two stamps. Any thread may call this.

        Args:
            stream: One of STREAMS.
            name: Name of the activity.
            start: Stamp of its start.
            stop: Stamp of its end.
            **about: Details; see `Slice`.
        """
        self._slices.append((stream, name, start, stop, about))

    def take(self) -> list[Slice]:
        """Return all slices since the last call."""
        self._clock.wait()
        slices, self._slices = self._slices, []
        return [
            Slice(stream, name, self._when(start), self._when(stop), about)
            for stream, name, start, stop, about in slices
        ]

    def _when(self, stamp: Any) -> float:
        return self._at + self._clock.seconds(self._since, stamp)


def write_timeline(path: Path, ranks: Sequence[Iterable[Slice]]) -> None:
    """Write the slices of all ranks to a file.

    A received message is shown from the time at which its sender started to send it, since the receiver only knows when
    it arrived.

    Args:
        path: The file.
        ranks: Slices of each rank.

    Raises:
        OSError: The file cannot be written.
    """
    sent = defaultdict[tuple[int, int, str], deque[float]](deque)
    for rank, slices in enumerate(ranks):
        for activity in slices:
            if activity.stream == "send" and "to" in activity.about:
                sent[rank, activity.about["to"], activity.about["message"]].append(activity.start)
    adjusted = [[_from_send_time(activity, sent, rank) for activity in slices] for rank, slices in enumerate(ranks)]
    first_start = min((activity.start for slices in adjusted for activity in slices), default=0.0)
    events: list[dict[str, Any]] = []
    numbers = count()
    for rank, slices in enumerate(adjusted):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for stream in STREAMS:
            slices_of_stream = [activity for activity in slices if activity.stream == stream]
            for lane in [slices_of_stream] if stream == "compute" else _lanes(slices_of_stream):
                thread = {"pid": rank, "tid": next(numbers)}
                events.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": stream}})
                events += ({"ph": "X", **thread, **_event(activity, first_start)} for activity in lane)
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    # The version comes last, since viewers do not know this key.
    path.write_text(json.dumps(trace | {"version": VERSIONS["timeline"]}))


def _from_send_time(activity: Slice, sent: dict[tuple[int, int, str], deque[float]], rank: int) -> Slice:
    """Return a slice that receives a message with its start moved to the time at which the message was sent."""
    if activity.stream != "receive" or "from" not in activity.about:
        return activity
    starts = sent[activity.about["from"], rank, activity.about["message"]]
    return activity._replace(start=min(starts.popleft(), activity.stop)) if starts else activity


def _lanes(slices: list[Slice]) -> list[list[Slice]]:
    """Distribute slices over as few lanes as possible, since slices of a lane must not overlap."""
    lanes: list[list[Slice]] = []
    for activity in sorted(slices, key=lambda activity: activity.start):
        free = next((lane for lane in lanes if lane[-1].stop <= activity.start), None)
        if free is None:
            lanes.append([activity])
        else:
            free.append(activity)
    return lanes or [[]]


def _event(activity: Slice, first_start: float) -> dict[str, Any]:
    start, seconds = activity.start - first_start, activity.stop - activity.start
    return {"name": activity.name, "ts": start * MICROSECONDS, "dur": seconds * MICROSECONDS, "args": activity.about}
