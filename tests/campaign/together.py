"""One of two concurrent runs in a folder is refused, and the other is not affected."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random

from tests.campaign.scene import Done, Missed, Scene, check, check_same, epochs_recorded, losses, until
from tests.campaign.settings import draw_placement, draw_setting
from tests.lib.running import Command

EPOCHS = 100_000
MORE = 3
"""Number of epochs for which the run is resumed, to compare it."""


def attempt(random: Random, scene: Scene) -> None:
    """Start the second run together with the first or later, as a new run or as a resumed one."""
    setting, placement = draw_setting(random, scene.stage.typed), draw_placement(random, max_workers=2)
    other = draw_placement(random, max_workers=2)
    out = scene.folder / "run"
    fixed = (*setting.train(), "--checkpoint-every", random.choice((1, 3)), "--out", out)
    resume = random.random() < 0.6
    late = resume or random.random() < 0.5
    first = scene.start(*fixed, *placement.flags, "--epochs", EPOCHS)
    if late:
        until(lambda: epochs_recorded(out) > 3, first)
    second = scene.start(*fixed, *other.flags, "--epochs", EPOCHS, *(("--resume",) if resume else ()))
    loser, winner = loser_and_winner(scene, out, first, second)
    done = scene.finish(loser)
    message = done.errors.strip().splitlines()[-1:]
    check(not late or loser is second, f"the run that was there first ended with exit code {done.code}: {message}")
    done.check_refused()
    before = epochs_recorded(out)
    until(lambda: epochs_recorded(out) > before + 1, winner)
    os.kill(winner.pid, signal.SIGTERM)
    scene.finish(winner).check_ended(128 + signal.SIGTERM)
    num_done = len(losses(out))

    going_on = placement if winner is first else other
    epochs = num_done + MORE
    scene.run(*fixed, *going_on.flags, "--epochs", epochs, "--resume").check_ended(0)
    if going_on.strategy != "stale":
        check_same(out, scene.stage.whole(setting, going_on, "--epochs", epochs).folder)


def loser_and_winner(scene: Scene, out: Path, first: Command, second: Command) -> tuple[Command, Command]:
    """Return the run that has ended and the one that continues; raise Broken if both continue or both end."""
    deadline = time.monotonic() + 30
    while first.returncode is None and second.returncode is None:
        if time.monotonic() > deadline or epochs_recorded(out) > 2000:
            check(False, "both runs go on in one folder")
        time.sleep(0.02)
    if first.returncode is not None and second.returncode is not None:
        codes: list[Done] = [scene.finish(command) for command in (first, second)]
        check(False, f"both runs ended: {[done.code for done in codes]}")
    if not out.exists():
        raise Missed("nobody has begun")
    return (first, second) if first.returncode is not None else (second, first)
