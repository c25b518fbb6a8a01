"""Spans of a run's timeline.json, in lanes in which they do not overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from weft.utils.errors import readable
from weft.utils.files import migrate
from weft.utils.files.file_reading import MAX_RECORD_BYTES, read_text

MICROSECONDS = 1e3
"""Microseconds per millisecond."""


class TimelineSpan(NamedTuple):
    """Interval in which a rank did one thing."""

    rank: int
    """Number of the rank."""
    stream: str
    """Stream in which the rank did it, such as compute or send."""
    name: str
    """Name of the work."""
    start: float
    """Start, in milliseconds since the begin of the timeline."""
    stop: float
    """End, in milliseconds since the begin of the timeline."""
    depth: int
    """Number of spans of the same stream that contain this one."""

    @property
    def lane(self) -> str:
        """Row of the chart in which the span is drawn."""
        return f"rank {self.rank} {self.stream}" + (f" ({self.depth + 1})" if self.depth else "")

    @property
    def kind(self) -> str:
        """Kind that decides the color: the stream, or waiting."""
        return "waiting" if self.name.startswith("wait:") else self.stream


def read_spans(path: Path) -> list[TimelineSpan]:
    """Read the spans of a timeline, ordered by rank, stream and start.

    Raises:
        InputError: The file is damaged.
    """
    with readable(path, "remove it, or train again with --timeline"):
        content = json.loads(read_text(path, MAX_RECORD_BYTES))
        events: list[dict[str, Any]] = migrate.timeline(content, path)["traceEvents"]
        streams = {
            (event["pid"], event["tid"]): str(event["args"]["name"])
            for event in events
            if event["name"] == "thread_name"
        }
        spans = [
            TimelineSpan(
                rank=int(event["pid"]),
                stream=streams[event["pid"], event["tid"]],
                name=str(event["name"]),
                start=event["ts"] / MICROSECONDS,
                stop=(event["ts"] + event["dur"]) / MICROSECONDS,
                depth=0,
            )
            for event in events
            if event["ph"] == "X"
        ]
    order = {name: number for number, name in enumerate(dict.fromkeys(streams.values()))}
    return _with_depths(sorted(spans, key=lambda span: (span.rank, order[span.stream], span.start, -span.stop)))


def _with_depths(spans: list[TimelineSpan]) -> list[TimelineSpan]:
    """Return spans, ordered by rank, stream and start, with their depths."""
    nested: list[TimelineSpan] = []
    containing: list[TimelineSpan] = []  # spans that have not ended where the current one starts, the outermost first
    for span in spans:
        while containing and (containing[-1][:2] != span[:2] or containing[-1].stop <= span.start):
            containing.pop()
        containing.append(span._replace(depth=len(containing)))
        nested.append(containing[-1])
    return nested


def span_totals(spans: list[TimelineSpan]) -> dict[tuple[int, str, str], tuple[int, float]]:
    """Return the number of spans and the sum of their milliseconds, by rank, stream and name."""
    totals: dict[tuple[int, str, str], tuple[int, float]] = {}
    for span in spans:
        number, length = totals.get((span.rank, span.stream, span.name), (0, 0.0))
        totals[span.rank, span.stream, span.name] = number + 1, length + span.stop - span.start
    return totals
