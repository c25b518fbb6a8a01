"""Tries class after class of attacks until the time is spent; the table at the end counts what held."""

from __future__ import annotations

import argparse
import os
import sys
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
    "kills": (kills.attempt, 4),
    "resumes": (resumes.attempt, 2),
    "corruption": (corruption.attempt, 3),
    "flags": (bad_flags.attempt, 1),
    "graphs": (bad_graphs.attempt, 1),
    "disk": (disk.attempt, 2),
    "together": (together.attempt, 1),
    "sockets": (sockets.attempt, 1),
    "determinism": (determinism.attempt, 1),
}
"""The attempt of each class, and its share of the time."""
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


def tried(name: str, seed: int, stage: Stage) -> Outcome:
    """One attempt of a class. An error of its own counts as a broken promise: it has seen what it does not know."""
    scene = Scene(stage)
    try:
        with scene:
            CLASSES[name][0](Random(seed), scene)
    except Missed as error:
        return Outcome("missed", str(error), scene.notes)
    except Broken as error:
        return Outcome("broken", str(error), scene.notes)
    except Exception:
        return Outcome("broken", "the attempt failed: " + traceback.format_exc(), scene.notes)
    return Outcome("held", "", scene.notes)


def campaign(seconds: float, seed: int, names: list[str]) -> int:
    """Attempts of the classes in turn, each for its share of the time; the number of promises broken."""
    counts = {name: Counter[str]() for name in names}
    misses = Counter[str]()
    spent = dict.fromkeys(names, 0.0)
    begun = time.monotonic()
    with Stage() as stage:
        while time.monotonic() - begun < seconds:
            name = min(names, key=lambda one: spent[one] / CLASSES[one][1])
            one = seed * SEEDS + counts[name].total()
            started = time.monotonic()
            outcome = tried(name, one, stage)
            spent[name] += time.monotonic() - started
            counts[name][outcome.kind] += 1
            if outcome.kind == "broken":
                tell(name, one, outcome)
            elif outcome.kind == "missed":
                misses[f"{name}: {outcome.said}"] += 1
    print(f"{'class':14}{'tried':>7}{'held':>7}{'missed':>8}{'broken':>8}{'seconds':>9}")
    for name, count in counts.items():
        figures = (count.total(), count["held"], count["missed"], count["broken"])
        print(f"{name:14}" + "{:7}{:7}{:8}{:8}".format(*figures) + f"{spent[name]:9.0f}")
    for said, times in misses.most_common():
        print(f"missed {times} times, {said}")
    return sum(count["broken"] for count in counts.values())


def tell(name: str, seed: int, outcome: Outcome) -> None:
    """What was broken, what was done, and the command that repeats it."""
    repeat = f"python -m tests.campaign --only {name} --repeat {seed}"
    print(f"{name} {seed} {outcome.kind}: {outcome.said}  [{repeat}]", flush=True)
    for note in outcome.notes:
        print(f"    {note}", flush=True)


def main() -> int:
    """The command: 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    given = os.environ.get
    parser.add_argument("--seconds", type=float, default=float(given("WEFT_CAMPAIGN_SECONDS", "3600")))
    parser.add_argument("--seed", type=int, default=int(given("WEFT_CAMPAIGN_SEED", "0")))
    parser.add_argument("--only", choices=CLASSES, action="append", help="classes (all)")
    parser.add_argument("--repeat", type=int, help="a single attempt of the class --only, by the seed that was told")
    options = parser.parse_args()
    names = options.only or list(CLASSES)
    if options.repeat is None:
        print(f"seed {options.seed}, {options.seconds:.0f} s", flush=True)
        return 1 if campaign(options.seconds, options.seed, names) else 0
    with Stage() as stage:
        outcome = tried(names[0], options.repeat, stage)
    tell(names[0], options.repeat, outcome)
    return 1 if outcome.kind == "broken" else 0


if __name__ == "__main__":
    sys.exit(main())
