"""A run in several legs, each under another exact strategy and number of ranks: the losses of an unbroken `single`."""

from __future__ import annotations

from random import Random

from tests.campaign.scene import Scene, lines, require, require_same
from tests.campaign.settings import EXACT, Placement, draw_placement, draw_setting

EPOCHS = 9
SINGLE = Placement(strategy="single", workers=1, more=())


def attempt(random: Random, scene: Scene) -> None:
    """Two or three legs, each of which is seen to have begun where the one before ended."""
    setting = draw_setting(random, scene.stage.typed)
    legs = random.choice((2, 2, 3))
    ends = [*sorted(random.sample(range(1, EPOCHS), legs - 1)), EPOCHS]
    placements = [draw_placement(random, EXACT) for _ in ends]
    every = random.choice((0, 1, 3))
    whole = scene.stage.whole(setting, SINGLE, "--epochs", EPOCHS)

    out = scene.folder / "run"
    for leg, (end, placement) in enumerate(zip(ends, placements, strict=True)):
        resume = ("--resume",) if leg else ()
        run = (*setting.train(), *placement.flags, "--epochs", end, "--checkpoint-every", every, "--out", out, *resume)
        scene.run(*run).require_ended(0)
    begun = [line for line in lines(out) if line["kind"] == "config"]
    wanted = [(epoch, one.strategy, one.workers) for epoch, one in zip((0, *ends), placements, strict=False)]
    found = [(line["epoch"], line["config"]["strategy"], line["ranks"]) for line in begun]
    require(found == wanted, f"the legs were {found}, not {wanted}")
    require_same(out, whole.folder)
