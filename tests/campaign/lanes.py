"""Run attempts of all classes, each for its share of the time, in several concurrent lanes."""

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
    changes,
    contents,
    corruption,
    determinism,
    disk,
    foreign_names,
    kills,
    odd_files,
    optimized,
    resumes,
    sockets,
    streams,
    together,
    users,
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
    "names": (foreign_names.attempt, 3),
    "files": (odd_files.attempt, 4),
    "streams": (streams.attempt, 3),
    "optimized": (optimized.attempt, 4),
    "users": (users.attempt, 2),
    "contents": (contents.attempt, 4),
    "changes": (changes.attempt, 3),
}
"""Function and share of the time of each class."""
SEEDS = 1_000_000
"""Largest number of attempts of one campaign seed."""


class Outcome(NamedTuple):
    """Outcome of an attempt."""

    kind: str
    """held, missed or broken"""
    reason: str
    """Description of the broken promise, or reason why the fault did not happen."""
    notes: list[str]
    """Commands and faults of the attempt, in order."""
    faults: int
    """Number of faults that happened."""


def run_attempt(name: str, seed: int, stage: Stage) -> Outcome:
    """Run one attempt of a class. An unexpected error of the attempt counts as a broken promise."""
    scene = Scene(stage)
    kind, reason = "held", ""
    try:
        with scene:
            CLASSES[name][0](Random(seed), scene)
    except Missed as error:
        kind, reason = "missed", str(error)
    except Broken as error:
        kind, reason = "broken", str(error)
    except Exception:
        kind, reason = "broken", "the attempt failed: " + traceback.format_exc()
    return Outcome(kind, reason, scene.notes, scene.faults or int(kind != "missed"))


class Tally(NamedTuple):
    """Outcomes of a lane's attempts, by class; tallies of several lanes can be added."""

    counts: Counter[tuple[str, str]]
    """Number of attempts by (class, kind of outcome); the kind `faults` counts the faults that happened."""
    seconds: Counter[str]
    """Total time of each class in seconds."""
    misses: Counter[str]
    """Number of missed attempts, by class and reason."""


def lane(number: int, lanes: int, seconds: float, seed: int, names: list[str]) -> Tally:
    """Run attempts of the classes in turn, each for its share of the time, with every `lanes`-th seed."""
    tally = Tally(Counter(), Counter(), Counter())
    tries = Counter[str]()
    begun = time.monotonic()
    with Stage() as stage:
        while time.monotonic() - begun < seconds:
            name = min(names, key=lambda other: tally.seconds[other] / CLASSES[other][1])
            attempt_seed = seed * SEEDS + tries[name] * lanes + number
            tries[name] += 1
            started = time.monotonic()
            outcome = run_attempt(name, attempt_seed, stage)
            tally.seconds[name] += time.monotonic() - started  # type: ignore[assignment]
            tally.counts[name, outcome.kind] += 1
            tally.counts[name, "faults"] += outcome.faults
            if outcome.kind == "broken":
                report(name, attempt_seed, outcome)
            elif outcome.kind == "missed":
                tally.misses[f"{name}: {outcome.reason}"] += 1
    return tally


def report(name: str, seed: int, outcome: Outcome) -> None:
    """Print what was broken, what the attempt did, and the command that repeats it."""
    repeat = f"python -m tests.campaign --only {name} --repeat {seed}"
    print(f"{name} {seed} {outcome.kind}: {outcome.reason}  [{repeat}]", flush=True)
    for note in outcome.notes:
        print(f"    {note}", flush=True)
