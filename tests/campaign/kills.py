"""A signal to a random process of a run at a random time: check its message, that nothing is left, and the resume."""

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
    begun,
    check,
    check_same,
    command_line,
    epochs_recorded,
    lines,
    losses,
    summary,
    until,
)
from tests.campaign.settings import Placement, draw_placement, draw_setting
from tests.lib.running import Command, handled, members, ranks

EPOCHS = 24
BLOWS = 6
"""Largest number of signals per run."""
START_SECONDS = 5.0
"""Approximate time that a new Python needs for the imports, which a forked process already has."""
RUN_SECONDS = 3.0
"""Approximate time of a run."""
STILL_SECONDS = 12.0
"""Longest time that a process is stopped: longer than peers wait for it."""
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
    """Send signals to a run, resume it after each, and at last let it finish."""
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
    finish_run(random, scene, setting.graph[0], run, out)
    if placement.strategy == "stale" and interrupted:  # stale rows are not checkpointed, so the losses differ
        check(len(losses(out)) == EPOCHS, "the run that went on has not all epochs")
        summary(out)
    else:
        check_same(out, whole.folder)


def strike(random: Random, scene: Scene, placement: Placement, run: tuple[object, ...], out: Path) -> bool:
    """Start or resume a run and send a signal to it; return whether that ended it early."""
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
        alive = members(process.pid)
        state = f"{epochs_recorded(out)} epochs recorded, {len(alive)} processes"
        scene.notes.append(f"{number.name} to {target} {pids}, {moment}: {state}")
        hit(pids, number)
    except Missed:
        scene.finish(process).check_ended(0)
        raise
    scene.faults += 1
    if still:
        go_on_later(process, pids, random.uniform(0.05, 0.8) if briefly else STILL_SECONDS)
    elif twice and target in ("launcher", "group"):
        time.sleep(random.uniform(0, 0.2))
        for pid in pids:
            kill(pid, number)
    done = scene.finish(process)
    done.check_ended(*allowed_codes(number, target, lost=still and not briefly))
    dies_with_it = placement.workers == 1 and target == "launcher"  # the kernel kills the child of a killed launcher
    if number == signal.SIGKILL and (dies_with_it or set(alive) <= set(pids)):  # no process is left to remove files
        scene.remove_temporary_files()
    scene.check_nothing_left()
    return done.code != 0


def wait_for(moment: str, random: Random, process: Command, out: Path, scene: Scene, executed: bool) -> None:
    """Wait until a run reaches a moment; in a new Python, first wait until weft runs."""
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
    """Return the first kind of target that exists now, and its processes."""
    alive = members(process.pid)
    rank_pids = ranks(process)
    others = [pid for pid in alive if pid != process.pid and pid not in rank_pids]
    others = [pid for pid in others if "resource_tracker" not in command_line(pid)]  # Python's, which is not needed
    if process.pid not in alive:
        raise Missed("the command had ended")
    for target in targets:
        if target == "launcher":
            return target, [process.pid]
        if target == "group":
            return target, alive
        if target == "rank" and rank_pids:
            return target, [random.choice(rank_pids)]
        if target == "server" and others and rank_pids:  # without ranks, a forked command has no second server
            return target, [others[0]]
    raise AssertionError(targets)


def hit(pids: list[int], number: int) -> None:
    """Send a signal to all processes at once; raise Missed if the command has ended."""
    sent = [kill(pid, number) for pid in pids]
    if not any(sent):
        raise Missed("the command had ended")


def kill(pid: int, number: int) -> bool:
    """Send a signal; return whether the process existed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def go_on_later(process: Command, pids: list[int], seconds: float) -> None:
    """Continue stopped processes after some time, or when the command has ended."""
    deadline = time.monotonic() + seconds
    while process.returncode is None and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in pids:
        kill(pid, signal.SIGCONT)


def allowed_codes(number: int, target: str, *, lost: bool) -> set[int]:
    """Return the exit codes that are correct after a signal to a target; 0: the run had already finished.

    lost: whether peers may have timed out.
    """
    if number == signal.SIGSTOP:  # gloo also counts the time in which all ranks are stopped
        return {0, 1} if lost and target in ("rank", "group") else {0}
    if target in (
        "launcher",
        "group",
    ):  # weft's exit code, or that of an unhandled signal; a shell reports 128 + number for both
        return {0, -number} if number == signal.SIGKILL else {0, 128 + number, -number}
    return {0, 1, 128 + number} if number in (signal.SIGTERM, signal.SIGINT) else {0, 1}


def finish_run(random: Random, scene: Scene, graph: str, run: tuple[object, ...], out: Path) -> None:
    """Resume a run, or start it if it had not started, until it finishes."""
    if not begun(out):
        scene.run(*run, "--out", out).check_ended(0)
    elif finished(out):
        error = scene.run(*run, "--out", out, "--resume").check_refused()
        check("has finished its" in error, error)
    else:
        words = ("train", graph) if random.random() < 0.5 else run
        patient = ("--timeout", 60)  # not the short one that the run may have
        scene.run(*words, *patient, "--out", out, "--resume").check_ended(0)


def finished(out: Path) -> bool:
    """Return whether a run has a summary; its last line may be truncated."""
    try:
        return bool(lines(out)[-1]["kind"] == "summary")
    except (Broken, IndexError):
        return False
