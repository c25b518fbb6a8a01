"""Under python -O, which leaves out asserts, runs have the same results, and bad graphs are refused as well."""

from __future__ import annotations

from random import Random

from tests.campaign import bad_graphs
from tests.campaign.scene import Scene, check_same
from tests.campaign.settings import EXACT, draw_placement, draw_setting

EPOCHS = 6


def attempt(random: Random, scene: Scene) -> None:
    """Train in two legs under -O, or let an import under -O read a wrong file."""
    if random.random() < 0.4:
        path = random.choice((bad_graphs.bad_table, bad_graphs.bad_array, bad_graphs.bad_archive))(random, scene)
        process = scene.start("data", "import", path, "--out", scene.folder / "out", optimized=True)
        scene.finish(process).check_refused()
        return
    setting, placement = draw_setting(random, scene.stage.typed), draw_placement(random, EXACT, 2)
    out = scene.folder / "run"
    run = (*setting.train(), *placement.flags, "--checkpoint-every", 2, "--out", out)
    for more in (("--epochs", EPOCHS // 2), ("--epochs", EPOCHS, "--resume")):
        scene.finish(scene.start(*run, *more, optimized=True)).check_ended(0)
    check_same(out, scene.stage.whole(setting, placement, "--epochs", EPOCHS).folder)
