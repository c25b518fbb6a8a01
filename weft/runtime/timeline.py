"""What ranks do when, by stream: the trace format of Chrome's profiler, which https://ui.perfetto.dev draws."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from weft.runtime.clock import Clock
from weft.utils.migrate import VERSIONS

STREAMS = ("compute", "send", "receive", "load", "store")
MICROSECONDS = 1e6


class Slice(NamedTuple):
    """Something that a rank did without a break."""

    stream: str
    """One of STREAMS. In compute slices lie in one another: a phase, a stage, a chunk, and its waiting."""
    name: str
    start: float
    """Seconds of the machine's clock, as is stop."""
    stop: float
    about: dict[str, Any]
    """segment, chunk, bytes; `to` or `from` another rank, and then the `message`."""


class Timeline:
    """The slices of one rank, in stamps of a clock until they are taken."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since, self._at = clock.now(), time.time()
        self._slices: list[tuple[str, str, Any, Any, dict[str, Any]]] = []

    def add(self, stream: str, name: str, start: Any, stop: Any, **about: Any) -> None:
        """Notes a slice between two stamps; any thread may."""
        self._slices.append((stream, name, start, stop, about))

    def take(self) -> list[Slice]:
        """All slices since the last time."""
        self._clock.wait()
        slices, self._slices = self._slices, []
        return [
            Slice(stream, name, self._when(start), self._when(stop), about)
            for stream, name, start, stop, about in slices
        ]

    def _when(self, stamp: Any) -> float:
        return self._at + self._clock.seconds(self._since, stamp)


def write_timeline(path: Path, ranks: Sequence[Iterable[Slice]]) -> None:
    """Writes the slices of each rank; what was received begins where its sender began to send it. OSError."""
    sent = defaultdict[tuple[int, int, str], deque[float]](deque)
    for rank, slices in enumerate(ranks):
        for one in slices:
            if one.stream == "send" and "to" in one.about:
                sent[rank, one.about["to"], one.about["message"]].append(one.start)
    drawn = [[_from_its_send(one, sent, rank) for one in slices] for rank, slices in enumerate(ranks)]
    begun = min((one.start for slices in drawn for one in slices), default=0.0)
    events: list[dict[str, Any]] = []
    numbers = count()
    for rank, slices in enumerate(drawn):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for stream in STREAMS:
            mine = [one for one in slices if one.stream == stream]
            for those in [mine] if stream == "compute" else _lanes(mine):
                thread = {"pid": rank, "tid": next(numbers)}
                events.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": stream}})
                events += ({"ph": "X", **thread, **_event(one, begun)} for one in those)
    drawing = {"traceEvents": events, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(drawing | {"version": VERSIONS["timeline"]}))  # last, since viewers do not know it


def _from_its_send(one: Slice, sent: dict[tuple[int, int, str], deque[float]], rank: int) -> Slice:
    """What was received, from when it was sent: its receiver knows alone when it came."""
    if one.stream != "receive" or "from" not in one.about:
        return one
    starts = sent[one.about["from"], rank, one.about["message"]]
    return one._replace(start=min(starts.popleft(), one.stop)) if starts else one


def _lanes(slices: list[Slice]) -> list[list[Slice]]:
    """The slices in as few rows as there are at once, since those of one row may not overlap."""
    lanes: list[list[Slice]] = []
    for one in sorted(slices, key=lambda one: one.start):
        free = next((lane for lane in lanes if lane[-1].stop <= one.start), None)
        if free is None:
            lanes.append([one])
        else:
            free.append(one)
    return lanes or [[]]


def _event(one: Slice, begun: float) -> dict[str, Any]:
    start, seconds = one.start - begun, one.stop - one.start
    return {"name": one.name, "ts": start * MICROSECONDS, "dur": seconds * MICROSECONDS, "args": one.about}
