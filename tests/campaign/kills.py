"""A signal at a random instant to a random process of a run: what it says, what it leaves, and how it goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.campaign.scene import (
    Broken,
    Missed,
    Scene,
    command_line,
    epochs_recorded,
    lines,
    losses,
    require,
    require_same,
    summary,
    until,
)
from tests.campaign.settings import Placement, draw_placement, draw_setting
from tests.lib.running import Command, handled, members, ranks
from weft.training.artifacts.run_folder import UNBEGUN

EPOCHS = 24
BLOWS = 6
"""How often a run is hit, at most."""
START_SECONDS = 5.0
"""What a new Python takes before it is where a forked one begins, about."""
RUN_SECONDS = 3.0
"""What a run takes, about."""
STILL_SECONDS = 12.0
"""How long a process is stopped at most: longer than peers wait for it."""
SIGNALS = (
    signal.SIGKILL,
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGSTOP,
)
MOMENTS = ("instant", "instant", "opened", "meeting", "epoch", "checkpoint", "end")


def attempt(random: Random, scene: Scene) -> None:
    """A run that signals hit, one after the other, each time it goes on, until it is let come to its end."""
    setting, placement = draw_setting(random, scene.stage.typed), draw_placement(random)
    run = (*setting.train(), *placement.flags, "--epochs", EPOCHS)
    whole = scene.stage.whole(setting, placement, "--epochs", EPOCHS)
    out = scene.folder / "run"
    interrupted = False
    for blow in range(random.randint(1, BLOWS)):
        if begun(out) and finished(out):
            break
        try:
            interrupted = strike(random, scene, placement, run, out) or interrupted
        except Missed:
            if not blow:
                raise
    go_on(random, scene, setting.graph[0], run, out)
    if placement.strategy == "stale" and interrupted:  # old rows are in no checkpoint: not the run that nobody stopped
        require(len(losses(out)) == EPOCHS, "the run that went on has not all epochs")
        summary(out)
    else:
        require_same(out, whole.folder)


def strike(random: Random, scene: Scene, placement: Placement, run: tuple[object, ...], out: Path) -> bool:
    """Begins a run or goes on with it, and sends a signal to it; whether that ended it before its time."""
    number, moment = random.choice(SIGNALS), random.choice(MOMENTS)
    targets = ["launcher", "group"] if placement.workers == 1 else ["rank", "rank", "launcher", "server", "group"]
    random.shuffle(targets)
    executed, twice, briefly = random.random() < 0.1, random.random() < 0.15, random.random() < 0.7
    every = 1 if moment == "checkpoint" else random.choice((0, 1, 3, 10))
    still = number == signal.SIGSTOP
    timeout = 60 if not still or briefly else 3
    more = ("--checkpoint-every", every, "--timeout", timeout, "--out", out, *(("--resume",) if begun(out) else ()))

    process = scene.start(*run, *more, executed=executed)
    try:
        wait_for(moment, random, process, out, scene, executed)
        target, pids = choose(targets, random, process)
        there = members(process.pid)
        found = f"{epochs_recorded(out)} epochs recorded, {len(there)} processes"
        scene.notes.append(f"{number.name} to {target} {pids}, {moment}: {found}")
        hit(pids, number)
    except Missed:
        scene.finish(process).require_ended(0)
        raise
    scene.faults += 1
    if still:
        go_on_later(process, pids, random.uniform(0.05, 0.8) if briefly else STILL_SECONDS)
    elif twice and target in ("launcher", "group"):
        time.sleep(random.uniform(0, 0.2))
        for pid in pids:
            kill(pid, number)
    done = scene.finish(process)
    done.require_ended(*allowed_codes(number, target, lost=still and not briefly))
    if number == signal.SIGKILL and set(there) <= set(pids):  # nobody is left to remove anything
        scene.remove_temporary_files()
    scene.require_nothing_left()
    return done.code != 0


def wait_for(moment: str, random: Random, process: Command, out: Path, scene: Scene, executed: bool) -> None:
    """Until a moment of a run has come; in a new Python, not before that has begun to run weft."""
    if executed:
        until(lambda: signal.SIGTERM in handled(process.pid), process)
    epoch, part, more = random.randrange(EPOCHS - 5), random.random(), random.random()
    if moment == "instant":
        time.sleep(part * (RUN_SECONDS + START_SECONDS * executed))
        return
    happened: dict[str, Callable[[], bool]] = {
        "opened": out.exists,
        "meeting": lambda: any(scene.temporary.glob("weft-*")) or epochs_recorded(out) > 0,
        "epoch": lambda: epochs_recorded(out) > epoch,
        "checkpoint": lambda: epochs_recorded(out) > epoch / 2 and any(out.glob("checkpoints/.epoch-*")),
        "end": lambda: any(out.glob("model.*")),
    }
    until(happened[moment], process)
    seconds = {"opened": 0.003, "meeting": 0.4, "epoch": 0.02, "checkpoint": 0.004, "end": 0.01}[moment]
    time.sleep(seconds * more)


def choose(targets: list[str], random: Random, process: Command) -> tuple[str, list[int]]:
    """The first of some kinds of target that is there now, and its processes."""
    there = members(process.pid)
    found = ranks(process)
    others = [pid for pid in there if pid != process.pid and pid not in found]
    others = [pid for pid in others if "resource_tracker" not in command_line(pid)]  # Python's own, which nobody needs
    if process.pid not in there:
        raise Missed("the command had ended")
    for target in targets:
        if target == "launcher":
            return target, [process.pid]
        if target == "group":
            return target, there
        if target == "rank" and found:
            return target, [random.choice(found)]
        if target == "server" and others and found:  # with ranks: a command that is forked has no second server
            return target, [others[0]]
    raise AssertionError(targets)


def hit(pids: list[int], number: int) -> None:
    """Sends a signal, to all at once; Missed if the command has ended."""
    sent = [kill(pid, number) for pid in pids]
    if not any(sent):
        raise Missed("the command had ended")


def kill(pid: int, number: int) -> bool:
    """Sends a signal; whether there was anybody to get it."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def go_on_later(process: Command, pids: list[int], seconds: float) -> None:
    """Lets stopped processes go on, after a while or when the command has ended."""
    deadline = time.monotonic() + seconds
    while process.returncode is None and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in pids:
        kill(pid, signal.SIGCONT)


def allowed_codes(number: int, target: str, *, lost: bool) -> set[int]:
    """The exit codes that a signal to a target may lead to; 0: it came when all was done.

    lost: others may have given up waiting.
    """
    if number == signal.SIGSTOP:  # gloo counts the time in which all stand still, too
        return {0, 1} if lost and target in ("rank", "group") else {0}
    if target in ("launcher", "group"):  # as told, or by the signal's own doing: a shell says 128 + number for both
        return {0, -number} if number == signal.SIGKILL else {0, 128 + number, -number}
    return {0, 1, 128 + number} if number in (signal.SIGTERM, signal.SIGINT) else {0, 1}


def go_on(random: Random, scene: Scene, graph: str, run: tuple[object, ...], out: Path) -> None:
    """Brings a run to its end: resumes it, or begins where it had not begun. Broken where neither can be."""
    if not begun(out):
        scene.run(*run, "--out", out).require_ended(0)
    elif finished(out):
        said = scene.run(*run, "--out", out, "--resume").require_refused()
        require("has finished its" in said, said)
    else:
        words = ("train", graph) if random.random() < 0.5 else run
        scene.run(*words, "--out", out, "--resume").require_ended(0)


def begun(out: Path) -> bool:
    """Whether there is a run to resume; Broken if there is something else."""
    names = sorted(path.name for path in out.iterdir() if path.name not in UNBEGUN) if out.exists() else []
    require(not names or "config.toml" in names, f"neither begun nor to be resumed: {names}")
    return bool(names)


def finished(out: Path) -> bool:
    """Whether a run has its summary; a last line may be cut."""
    try:
        return bool(lines(out)[-1]["kind"] == "summary")
    except (Broken, IndexError):
        return False
