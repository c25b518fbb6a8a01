"""Another user of the host, without a home folder, can train, and cannot change or lock the runs of this one."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from random import Random

from tests.campaign.scene import Missed, Scene, check, check_same, files_of
from tests.campaign.settings import PLAIN_GRAPHS, PLAIN_TASKS, Placement, Setting, draw_placement

USER = 12345
"""Id of a user whom the host does not know, as in a container with `--user 12345`."""
LATE = ("http.server", "multiprocessing.popen_forkserver")
"""Modules that a command imports while it runs."""
DONE, EPOCHS = 4, 6
SINGLE = Placement(strategy="single", workers=1, more=())


def attempt(random: Random, scene: Scene) -> None:
    """Run a command as another user, in folders that are open to it, or on a run that is not its own."""
    if os.getuid():
        raise Missed("only root can start a command as another user")
    scene.folder.chmod(0o755)
    for folder in (scene.temporary, scene.working_folder):
        folder.chmod(0o1777)
    task = (*random.choice(PLAIN_TASKS), "--hidden", "8", "--dtype", "float64")
    setting = Setting(graph=random.choice(PLAIN_GRAPHS), task=task)
    random.choice((train, use_run))(random, scene, setting)


def become_user() -> None:
    """Make a command's process that of a user without a name and a home folder."""
    for name in LATE:  # Python may be installed where only root can read
        importlib.import_module(name)
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    for name in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)


def train(random: Random, scene: Scene, setting: Setting) -> None:
    """Train as the other user, next to temporary folders of this one that look as if they were left behind."""
    placement = draw_placement(random, max_workers=2)
    left = scene.temporary / "weft-0123456789abcdef"
    left.mkdir(0o777)
    os.utime(left, (0, 0))
    out = scene.working_folder / "run"
    run = (*setting.train(), *placement.flags, "--epochs", EPOCHS, "--out", out)
    scene.run(*run, prepare=become_user).check_ended(0)
    check(left.is_dir(), "a folder of another user was removed")
    left.rmdir()
    check_same(out, scene.stage.whole(setting, placement, "--epochs", EPOCHS).folder)


def use_run(random: Random, scene: Scene, setting: Setting) -> None:
    """Let the other user resume, predict from, or report a run that it may read or not."""
    half = scene.stage.whole(setting, SINGLE, "--epochs", DONE, "--checkpoint-every", 2)
    run = scene.folder / "run"
    shutil.copytree(half.folder, run)
    mode = random.choice((0o700, 0o755))
    run.chmod(mode)
    scene.notes.append(f"a run of another user with mode {mode:o}")
    before = files_of(run)
    out = scene.working_folder / "out"
    link = "--task" in setting.task
    commands: list[tuple[object, ...]] = [
        (*setting.train(), "--out", run, "--resume", "--epochs", EPOCHS),
        ("report", run, "--out", out.with_suffix(".html")),
        ("predict", run, "--what", "embeddings" if link else "logits", "--out", out.with_suffix(".npy")),
    ]
    number = random.randrange(len(commands))
    done = scene.run(*commands[number], prepare=become_user)
    done.check_ended(0, 1, 2)
    check(files_of(run) == before, "a run of another user was changed")
    allowed = mode == 0o755 and number > 0
    check((done.code == 0) == allowed, f"exit code {done.code} of a command that is{'' if allowed else ' not'} allowed")
    if not allowed:
        check(str(run) in done.error_lines()[0], f"the line does not name the run: {done.error_lines()[0]}")
    check(owners(run) == {0}, "the other user has written into the run")


def owners(folder: Path) -> set[int]:
    """Return the owners of everything in a folder."""
    return {path.lstat().st_uid for path in (folder, *folder.rglob("*"))}
