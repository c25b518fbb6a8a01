"""Closed, full or broken standard streams change no result of a run."""

from __future__ import annotations

from functools import partial
from random import Random

from tests.campaign.scene import Scene, check, check_same
from tests.campaign.settings import draw_placement, draw_setting
from tests.lib.broken_streams import close, end_reader, fill, leave_early

EPOCHS = 6
NUMBERS = ((1,), (2,), (1, 2), (0, 1, 2))


def attempt(random: Random, scene: Scene) -> None:
    """Train with unusable streams, half of the time in two legs, and compare the run with an ordinary one."""
    setting, placement = draw_setting(random, scene.stage.typed), draw_placement(random, max_workers=2)
    whole = scene.stage.whole(setting, placement, "--epochs", EPOCHS)
    out = scene.folder / "run"
    run = (*setting.train(), *placement.flags, "--checkpoint-every", 2, "--out", out)
    ends = random.choice(((EPOCHS,), (EPOCHS // 2, EPOCHS)))
    if placement.strategy == "stale":  # stale rows are not checkpointed, so the losses of two legs differ
        ends = (EPOCHS,)
    for leg, end in enumerate(ends):
        numbers = random.choice(NUMBERS)
        way = random.choice((close, fill, end_reader, leave_early))
        scene.notes.append(f"{way.__name__} {numbers}")
        more = (*(("--resume",) if leg else ()), *random.choice(((), ("--json",), ("--eval-every", 1))))
        process = scene.start(*run, *more, "--epochs", end, prepare=partial(way, *numbers))
        done = scene.finish(process)
        check(done.code == 0, f"exit code {done.code}")
        check("Traceback" not in done.errors, "a traceback")
    check_same(out, whole.folder)
