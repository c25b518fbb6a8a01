"""Attempt after attempt of every class, each for its share of the time; several lanes go side by side."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from tests.campaign import (
    bad_flags,
    bad_graphs,
    corruption,
    determinism,
    disk,
    kills,
    resumes,
    sockets,
    together,
)
from tests.campaign.scene import Broken, Missed, Scene, Stage

Attempt = Callable[[Random, Scene], None]
CLASSES: dict[str, tuple[Attempt, float]] = {
    "kills": (kills.attempt, 35),
    "resumes": (resumes.attempt, 8),
    "corruption": (corruption.attempt, 4),
    "flags": (bad_flags.attempt, 2),
    "graphs": (bad_graphs.attempt, 2),
    "disk": (disk.attempt, 3),
    "together": (together.attempt, 2),
    "sockets": (sockets.attempt, 2),
    "determinism": (determinism.attempt, 2),
}
"""The attempt of each class, and its share of the time: in an hour of two cores that other work shares, 500 kills, 150
resumes and 2,000 bad flags and graphs, with a sixth to spare."""
SEEDS = 1_000_000
"""Attempts that one seed of a campaign has, at most."""


class Outcome(NamedTuple):
    """What came of an attempt."""

    kind: str
    """held, missed or broken"""
    said: str
    """Of a broken promise, or of why nothing was tried."""
    notes: list[str]
    """What was done."""
    faults: int
    """Faults that happened."""


def tried(name: str, seed: int, stage: Stage) -> Outcome:
    """One attempt of a class. An error of its own counts as a broken promise: it has seen what it does not know."""
    scene = Scene(stage)
    kind, said = "held", ""
    try:
        with scene:
            CLASSES[name][0](Random(seed), scene)
    except Missed as error:
        kind, said = "missed", str(error)
    except Broken as error:
        kind, said = "broken", str(error)
    except Exception:
        kind, said = "broken", "the attempt failed: " + traceback.format_exc()
    return Outcome(kind, said, scene.notes, scene.faults or int(kind != "missed"))


class Tally(NamedTuple):
    """What attempts came to, by class; of lanes, to be added."""

    counts: Counter[tuple[str, str]]
    """How many of (class, kind of outcome); the kind faults counts those that happened."""
    seconds: Counter[str]
    """What a class took."""
    misses: Counter[str]
    """Why nothing was tried."""


def lane(number: int, lanes: int, seconds: float, seed: int, names: list[str]) -> Tally:
    """Attempts of the classes in turn, each for its share of the time; of the seeds, every lanes-th."""
    tally = Tally(Counter(), Counter(), Counter())
    tries = Counter[str]()
    begun = time.monotonic()
    with Stage() as stage:
        while time.monotonic() - begun < seconds:
            name = min(names, key=lambda one: tally.seconds[one] / CLASSES[one][1])
            one = seed * SEEDS + tries[name] * lanes + number
            tries[name] += 1
            started = time.monotonic()
            outcome = tried(name, one, stage)
            tally.seconds[name] += time.monotonic() - started  # type: ignore[assignment]
            tally.counts[name, outcome.kind] += 1
            tally.counts[name, "faults"] += outcome.faults
            if outcome.kind == "broken":
                tell(name, one, outcome)
            elif outcome.kind == "missed":
                tally.misses[f"{name}: {outcome.said}"] += 1
    return tally


def tell(name: str, seed: int, outcome: Outcome) -> None:
    """What was broken, what was done, and the command that repeats it."""
    repeat = f"python -m tests.campaign --only {name} --repeat {seed}"
    print(f"{name} {seed} {outcome.kind}: {outcome.said}  [{repeat}]", flush=True)
    for note in outcome.notes:
        print(f"    {note}", flush=True)
