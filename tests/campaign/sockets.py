"""Who can reach the ranks of a run, from its first instant to its last: this machine alone."""

from __future__ import annotations

import time
from random import Random

from tests.campaign.scene import Missed, Scene, require
from tests.campaign.settings import draw_placement, draw_setting
from tests.lib.running import LOOPBACK, listening, members

EPOCHS = 12


def attempt(random: Random, scene: Scene) -> None:
    """What every process of the run listens on, looked at again and again."""
    setting = draw_setting(random, scene.stage.typed)
    placement = draw_placement(random)
    process = scene.start(
        *setting.train(),
        *placement.flags,
        "--epochs",
        EPOCHS,
        "--out",
        scene.folder / "run",
        executed=random.random() < 0.1,
    )
    seen: set[str] = set()
    while process.returncode is None:
        found = listening(members(process.pid))
        require(found <= LOOPBACK, f"listens on {sorted(found - LOOPBACK)}")
        seen |= found
        time.sleep(0.02)
    scene.finish(process).require_ended(0)
    if placement.workers > 1 and not seen:
        raise Missed("gloo's own sockets were not seen, so others would not have been")
