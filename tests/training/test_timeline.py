"""All strategies write a timeline, which matches the recorded seconds and shows operations that overlap."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.lib.running import command
from weft.runtime.timeline import STREAMS, Slice, write_timeline
from weft.strategies import STRATEGIES

GRAPH = "sbm:vertices=300,degree=6,classes=3,features=8"
Event = dict[str, Any]
Timeline = dict[tuple[int, str], list[Event]]
"""Slices by rank and stream, with their start and end in seconds."""


def train(out: Path, strategy: str, workers: int = 2, **options: Any) -> Timeline:
    settings = {"strategy": strategy, "epochs": 3, "timeline": 2, "out": out, **options}
    flags = [str(word) for name, value in settings.items() for word in ("--" + name.replace("_", "-"), value)]
    assert command("train", GRAPH, *flags, workers=workers).result == 0
    return read_timeline(out / "timeline.json")


def read_timeline(path: Path) -> Timeline:
    events = json.loads(path.read_text())["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    timeline: Timeline = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            stop = event["ts"] + event["dur"]
            timeline[event["pid"], names[event["pid"], event["tid"]]].append(
                event | {"start": event["ts"] / 1e6, "stop": stop / 1e6}
            )
    return timeline


def seconds(events: list[Event]) -> float:
    return float(sum(event["stop"] - event["start"] for event in events))


def waiting(events: list[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event["name"].startswith(tuple(f"wait: {kind}" for kind in kinds or ("",)))]


def chunks(events: list[Event]) -> list[Event]:
    return [event for event in events if "segment" in event["args"]]


def common(some: list[Event], others: list[Event]) -> float:
    """Return the seconds in which slices of both lists overlap; those of one list do not."""
    spans = ((max(a["start"], b["start"]), min(a["stop"], b["stop"])) for a in some for b in others)
    return sum(max(0.0, stop - start) for start, stop in spans)


@pytest.mark.parametrize("strategy", [name for name, plan in STRATEGIES.items() if plan.__module__.startswith("weft.")])
def test_every_strategy_writes_a_timeline_of_the_recorded_seconds(tmp_path: Path, strategy: str) -> None:
    workers = 1 if strategy == "single" else 2
    timeline = train(tmp_path / "run", strategy, workers)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {rank for rank, _ in timeline} == set(range(workers))
    assert {stream for _, stream in timeline} <= set(STREAMS)
    for rank in range(workers):
        counted = [line for line in lines if line["kind"] == "rank" and line["rank"] == rank and line["epoch"] < 2]
        exposed = sum(
            line["communication_seconds"] + line["waiting_seconds"]
            for line in counted
            if line["phase"] in ("train", "eval")
        )
        compute = timeline[rank, "compute"]
        phases = [event for event in compute if event["name"] in ("train", "eval")]
        waits = [event for event in waiting(compute) if event["name"] != "wait: load" and common([event], phases)]
        assert seconds(waits) == pytest.approx(exposed, abs=1e-5)
        assert bool(timeline[rank, "receive"]) == (workers > 1)
        assert_nested(compute)


def assert_nested(events: list[Event]) -> None:
    """Check that slices of a stream are nested or disjoint."""
    around: list[Event] = []
    for event in sorted(events, key=lambda event: (event["start"], -event["stop"])):
        while around and around[-1]["stop"] <= event["start"] + 1e-9:
            around.pop()
        assert not around or event["stop"] <= around[-1]["stop"] + 1e-9, (event, around[-1])
        around.append(event)


def test_pipeline_receives_while_it_computes(tmp_path: Path) -> None:
    timeline = train(tmp_path / "run", "pipeline", chunks=4, model="sage", layers=3)
    for rank in (0, 1):
        done = chunks(timeline[rank, "compute"])
        assert {event["args"]["chunk"] for event in done} >= {0, 1, 2, 3}
        assert {event["name"] for event in done} >= {"forward 1", "forward 2", "backward 1", "backward 2"}
        received = [event for event in timeline[rank, "receive"] if "message" in event["args"]]
        sent = [event for event in timeline[1 - rank, "send"] if "message" in event["args"]]
        assert sorted(event["args"]["message"] for event in received) == sorted(
            event["args"]["message"] for event in sent
        )
        assert {event["start"] for event in received} <= {event["start"] for event in sent}
        assert any(common([event], done) > 0 for event in received)


def test_offload_loads_while_it_computes(tmp_path: Path) -> None:
    options = {"chunks": 4, "device_memory": "1GB"}
    together = train(tmp_path / "ahead", "offload", 1, **options)
    alone = train(tmp_path / "turns", "offload", 1, disable="prefetch", **options)
    for timeline, at_once in ((together, True), (alone, False)):
        done = chunks(timeline[0, "compute"])
        inside = [(load, task) for load in timeline[0, "load"] for task in done if common([load], [task])]
        assert inside
        waits = waiting(timeline[0, "compute"], "load")
        assert bool(waits) == at_once


def test_a_timeline_in_rows(tmp_path: Path) -> None:
    """Overlapping slices of a rank are on separate rows, and a received message begins when it was sent."""
    message = {"message": "rows 0", "bytes": 8}
    first = [
        Slice("compute", "train", 10.0, 13.0, {}),
        Slice("send", "halo", 10.5, 11.5, {**message, "to": 1}),
        Slice("send", "halo", 11.0, 12.0, {**message, "to": 1, "message": "rows 1"}),
    ]
    second = [
        Slice("receive", "halo", 9.0, 11.6, {**message, "from": 0}),
        Slice("receive", "halo", 9.0, 12.5, {**message, "from": 0, "message": "rows 1"}),
    ]
    write_timeline(tmp_path / "timeline.json", [first, second])
    timeline = read_timeline(tmp_path / "timeline.json")
    spans = {key: [(event["start"], event["stop"]) for event in events] for key, events in timeline.items()}
    assert sum(spans[0, "send"], ()) == pytest.approx((0.5, 1.5, 1.0, 2.0))
    assert sum(spans[1, "receive"], ()) == pytest.approx((0.5, 1.6, 1.0, 2.5))
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    rows = defaultdict[tuple[int, int], list[Event]](list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    assert len(rows) == 5
    for row in rows.values():
        assert all(event["ts"] + event["dur"] <= other["ts"] for event, other in pairwise(row))
