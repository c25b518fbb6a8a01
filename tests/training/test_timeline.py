"""The timeline: that all strategies draw one, that it agrees with what is counted, and shows what is done at once."""

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
Drawn = dict[tuple[int, str], list[Event]]
"""Slices by rank and stream, with their start and end in seconds."""


def train(out: Path, strategy: str, workers: int = 2, **options: Any) -> Drawn:
    given = {"strategy": strategy, "epochs": 3, "timeline": 2, "out": out, **options}
    flags = [str(one) for name, value in given.items() for one in ("--" + name.replace("_", "-"), value)]
    assert command("train", GRAPH, *flags, workers=workers).result == 0
    return drawn(out / "timeline.json")


def drawn(path: Path) -> Drawn:
    events = json.loads(path.read_text())["traceEvents"]
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    found: Drawn = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            stop = one["ts"] + one["dur"]
            found[one["pid"], names[one["pid"], one["tid"]]].append(
                one | {"start": one["ts"] / 1e6, "stop": stop / 1e6}
            )
    return found


def seconds(events: list[Event]) -> float:
    return float(sum(one["stop"] - one["start"] for one in events))


def waiting(events: list[Event], *kinds: str) -> list[Event]:
    return [one for one in events if one["name"].startswith(tuple(f"wait: {kind}" for kind in kinds or ("",)))]


def chunks(events: list[Event]) -> list[Event]:
    return [one for one in events if "segment" in one["args"]]


def common(some: list[Event], others: list[Event]) -> float:
    """Seconds in which slices of both go on; those of each do not overlap."""
    spans = ((max(a["start"], b["start"]), min(a["stop"], b["stop"])) for a in some for b in others)
    return sum(max(0.0, stop - start) for start, stop in spans)


@pytest.mark.parametrize("strategy", [name for name, one in STRATEGIES.items() if one.__module__.startswith("weft.")])
def test_every_strategy_draws_what_it_counts(tmp_path: Path, strategy: str) -> None:
    workers = 1 if strategy == "single" else 2
    found = train(tmp_path / "run", strategy, workers)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {rank for rank, _ in found} == set(range(workers))
    assert {stream for _, stream in found} <= set(STREAMS)
    for rank in range(workers):
        counted = [line for line in lines if line["kind"] == "rank" and line["rank"] == rank and line["epoch"] < 2]
        exposed = sum(
            line["communication_seconds"] + line["waiting_seconds"]
            for line in counted
            if line["phase"] in ("train", "eval")
        )
        compute = found[rank, "compute"]
        phases = [one for one in compute if one["name"] in ("train", "eval")]
        waits = [one for one in waiting(compute) if one["name"] != "wait: load" and common([one], phases)]
        assert seconds(waits) == pytest.approx(exposed, abs=1e-5)
        assert bool(found[rank, "receive"]) == (workers > 1)
        assert_nested(compute)


def assert_nested(events: list[Event]) -> None:
    """Slices of one row lie in one another or beside each other."""
    around: list[Event] = []
    for one in sorted(events, key=lambda one: (one["start"], -one["stop"])):
        while around and around[-1]["stop"] <= one["start"] + 1e-9:
            around.pop()
        assert not around or one["stop"] <= around[-1]["stop"] + 1e-9, (one, around[-1])
        around.append(one)


def test_pipeline_receives_while_it_computes(tmp_path: Path) -> None:
    found = train(tmp_path / "run", "pipeline", chunks=4, model="sage", layers=3)
    for rank in (0, 1):
        done = chunks(found[rank, "compute"])
        assert {one["args"]["chunk"] for one in done} >= {0, 1, 2, 3}
        assert {one["name"] for one in done} >= {"forward 1", "forward 2", "backward 1", "backward 2"}
        come = [one for one in found[rank, "receive"] if "message" in one["args"]]
        left = [one for one in found[1 - rank, "send"] if "message" in one["args"]]
        assert sorted(one["args"]["message"] for one in come) == sorted(one["args"]["message"] for one in left)
        assert {one["start"] for one in come} <= {one["start"] for one in left}
        assert any(common([one], done) > 0 for one in come)


def test_offload_loads_while_it_computes(tmp_path: Path) -> None:
    options = {"chunks": 4, "device_memory": "1GB"}
    together = train(tmp_path / "ahead", "offload", 1, **options)
    alone = train(tmp_path / "turns", "offload", 1, disable="prefetch", **options)
    for found, at_once in ((together, True), (alone, False)):
        done = chunks(found[0, "compute"])
        inside = [(one, task) for one in found[0, "load"] for task in done if common([one], [task])]
        assert inside
        waits = waiting(found[0, "compute"], "load")
        assert bool(waits) == at_once


def test_a_timeline_in_rows(tmp_path: Path) -> None:
    """Ranks by turns; what overlaps has rows of its own; what comes begins where it was sent."""
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
    found = drawn(tmp_path / "timeline.json")
    spans = {key: [(one["start"], one["stop"]) for one in events] for key, events in found.items()}
    assert sum(spans[0, "send"], ()) == pytest.approx((0.5, 1.5, 1.0, 2.0))
    assert sum(spans[1, "receive"], ()) == pytest.approx((0.5, 1.6, 1.0, 2.5))
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    rows = defaultdict[tuple[int, int], list[Event]](list)
    for one in events:
        if one["ph"] == "X":
            rows[one["pid"], one["tid"]].append(one)
    assert len(rows) == 5
    for row in rows.values():
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(row))
