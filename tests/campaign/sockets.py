"""Only this machine can connect to the ranks of a run, at any time."""

from __future__ import annotations

import time
from random import Random

from tests.campaign.scene import Missed, Scene, check
from tests.campaign.settings import draw_placement, draw_setting
from tests.lib.running import LOOPBACK, listening, members

EPOCHS = 12


def attempt(random: Random, scene: Scene) -> None:
    """Check the addresses on which the processes of a run listen, until it ends."""
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
        addresses = listening(members(process.pid))
        check(addresses <= LOOPBACK, f"listens on {sorted(addresses - LOOPBACK)}")
        seen |= addresses
        time.sleep(0.02)
    scene.finish(process).check_ended(0)
    if placement.workers > 1 and not seen:
        raise Missed("gloo's own sockets were not seen, so others would not have been")
