"""What a run's timeline.json shows, in rows that do not overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from weft.utils import migrate
from weft.utils.errors import readable

MICROSECONDS = 1e3
"""Of a millisecond."""


class TimelineSpan(NamedTuple):
    """Something that a rank did without a break."""

    rank: int
    stream: str
    name: str
    start: float
    """Milliseconds since the first, as is stop."""
    stop: float
    depth: int
    """How many others of its stream it lies in."""

    @property
    def lane(self) -> str:
        """The row that it is drawn in."""
        return f"rank {self.rank} {self.stream}" + (f" ({self.depth + 1})" if self.depth else "")

    @property
    def kind(self) -> str:
        """What it is coloured by: its stream, or waiting."""
        return "waiting" if self.name.startswith("wait:") else self.stream


def read_slices(path: Path) -> list[TimelineSpan]:
    """The slices of a timeline by rank and stream, each in the order of its start. InputError for a damaged file."""
    with readable(path, "remove it, or train again with --timeline"):
        events: list[dict[str, Any]] = migrate.timeline(json.loads(path.read_text()), path)["traceEvents"]
        streams = {(one["pid"], one["tid"]): str(one["args"]["name"]) for one in events if one["name"] == "thread_name"}
        slices = [
            TimelineSpan(
                rank=int(one["pid"]),
                stream=streams[one["pid"], one["tid"]],
                name=str(one["name"]),
                start=one["ts"] / MICROSECONDS,
                stop=(one["ts"] + one["dur"]) / MICROSECONDS,
                depth=0,
            )
            for one in events
            if one["ph"] == "X"
        ]
    order = {name: number for number, name in enumerate(dict.fromkeys(streams.values()))}
    return _nested(sorted(slices, key=lambda one: (one.rank, order[one.stream], one.start, -one.stop)))


def _nested(slices: list[TimelineSpan]) -> list[TimelineSpan]:
    """With the depths of slices that stand by rank, stream and start."""
    found: list[TimelineSpan] = []
    around: list[TimelineSpan] = []
    for one in slices:
        while around and (around[-1][:2] != one[:2] or around[-1].stop <= one.start):
            around.pop()
        around.append(one._replace(depth=len(around)))
        found.append(around[-1])
    return found


def totals(slices: list[TimelineSpan]) -> dict[tuple[int, str, str], tuple[int, float]]:
    """By rank, stream and name, how many slices there are, and their milliseconds together."""
    found: dict[tuple[int, str, str], tuple[int, float]] = {}
    for one in slices:
        number, length = found.get((one.rank, one.stream, one.name), (0, 0.0))
        found[one.rank, one.stream, one.name] = number + 1, length + one.stop - one.start
    return found
