"""A run that is resumed under other exact strategies and numbers of ranks has the losses of one run of `single`."""

from __future__ import annotations

from random import Random

from tests.campaign.scene import Scene, check, check_same, lines
from tests.campaign.settings import EXACT, Placement, draw_placement, draw_setting

EPOCHS = 9
SINGLE = Placement(strategy="single", workers=1, more=())


def attempt(random: Random, scene: Scene) -> None:
    """Train in two or three legs, and check that each started where the previous one ended."""
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
        scene.run(*run).check_ended(0)
    begun = [line for line in lines(out) if line["kind"] == "config"]
    expected = [(epoch, place.strategy, place.workers) for epoch, place in zip((0, *ends), placements, strict=False)]
    legs_in_record = [(line["epoch"], line["config"]["strategy"], line["ranks"]) for line in begun]
    check(legs_in_record == expected, f"the legs were {legs_in_record}, not {expected}")
    check_same(out, whole.folder)
