"""Full disks and folders that cannot be written: one line with the path, and the run goes on when there is room.

A full disk is a small file system, where mounting is allowed, or a limit on the size of files. Root may write
everywhere, so commands that are to be refused a folder run without root's privileges.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import subprocess
from functools import partial
from pathlib import Path
from random import Random

from tests.campaign.scene import Missed, Scene, epochs_recorded, require, require_same, until
from tests.campaign.settings import Placement, Setting, draw_placement, draw_setting
from tests.lib.running import keep_files_in

EPOCHS = 24
CAPABILITIES = 0x20080522
"""The version of the layout that capset is told, from linux/capability.h."""
SIZES = {"out": (4, 60), "tmp": (4, 80), "scratch": (4, 200), "store": (4, 560), "book": (4, 8)}
"""How many kB a disk may have, by what is on it: from nearly none to nearly enough."""


def attempt(random: Random, scene: Scene) -> None:
    """A disk of some kind."""
    way = random.choice((full, full, limited, forbidden))
    if way is full and not scene.stage.mounts:
        way = limited
    way(random, scene)


def full(random: Random, scene: Scene) -> None:
    """A small file system for a run's folder, its temporary files or its scratch, for a graph's folder or a book."""
    what = random.choice(("out", "out", "out", "tmp", "scratch", "store", "book"))
    num_bytes = 1024 * random.randint(*SIZES[what])
    disk = scene.small_disk("disk", num_bytes)
    scene.notes.append(f"a disk of {num_bytes // 1024} kB for {what}")
    if what in ("store", "book"):
        words = ("data", "import", "digits") if what == "store" else ("partition", "digits", "--parts", 2)
        done = scene.run(*words, "--out", disk / "made")
        done.require_ended(0, 1, 2)
        if done.code == 0:
            raise Missed("there was room")
        require(str(disk) in done.error_lines()[0], f"the line does not name the disk: {done.error_lines()[0]}")
        require(not list(disk.iterdir()), f"left on the disk: {sorted(path.name for path in disk.iterdir())}")
        return
    setting, placement = a_run(random, scene, what)
    out = scene.folder / "run" if what != "out" else disk / "run"
    more: tuple[object, ...] = ("--scratch", disk) if what == "scratch" else ()
    prepare = partial(keep_files_in, str(disk)) if what == "tmp" else None
    run = (*setting.train(), *placement.flags, *more, "--epochs", EPOCHS, "--checkpoint-every", 2, "--out", out)
    done = scene.run(*run, prepare=prepare)
    done.require_ended(0, 1, 2)
    if done.code == 0:
        raise Missed("there was room")
    line = done.error_lines()[0]
    require(str(disk) in line, f"the line does not name the disk: {line}")
    if what != "out":
        left = [path.name for path in disk.iterdir() if not path.name.startswith("torchinductor")]
        require(not left, f"left on the disk: {left}")
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    go_on(scene, setting, placement, run, out)


def limited(random: Random, scene: Scene) -> None:
    """A limit on the size of files, which the system answers as it does a full disk."""
    setting, placement = a_run(random, scene, random.choice(("out", "tmp", "scratch")))
    num_bytes = 1024 * random.randint(1, 60)
    scene.notes.append(f"files of {num_bytes // 1024} kB at most")
    out = scene.folder / "run"
    run = (*setting.train(), *placement.flags, "--epochs", EPOCHS, "--checkpoint-every", 2, "--out", out)
    done = scene.run(*run, prepare=partial(limit_files, num_bytes))
    done.require_ended(0, 1, 2)
    if done.code == 0:
        raise Missed("there was room")
    line = done.error_lines()[0]
    require(str(scene.folder) in line, f"the line does not name a path: {line}")
    go_on(scene, setting, placement, run, out)


def forbidden(random: Random, scene: Scene) -> None:
    """A folder or a file that the command may not write, or not read, from the start or from some epoch on."""
    setting, placement = a_run(random, scene, "out")
    above = scene.folder / "above"
    above.mkdir()
    out = above / "run"
    run = (*setting.train(), *placement.flags, "--checkpoint-every", 2, "--out", out)
    when = random.choice(("before", "during", "after"))
    if when == "before":
        above.chmod(0o555)
        scene.notes.append(f"{above.name} cannot be written")
        done = scene.run(*run, "--epochs", EPOCHS, prepare=without_privileges)
    elif when == "during":
        process = scene.start(*run, "--epochs", 100_000, prepare=without_privileges)
        epoch = random.randrange(2, 30)
        until(lambda: epochs_recorded(out) > epoch and (out / "checkpoints").is_dir(), process)
        shut = out / "checkpoints"
        shut.chmod(0o555)
        scene.notes.append(f"{shut.name} cannot be written from epoch {epoch} on")
        done = scene.finish(process)
    else:
        scene.run(*run, "--epochs", 4, prepare=without_privileges).require_ended(0)
        names = ("config.toml", "metrics.jsonl", "checkpoints", "checkpoints/epoch-00000004", ".")
        shut = out / random.choice(names)
        mode = random.choice((0o000, 0o444)) if shut.is_file() else random.choice((0o000, 0o555))
        shut.chmod(mode)
        scene.notes.append(f"{shut.relative_to(above)} has mode {mode:o}")
        done = scene.run(*run, "--epochs", EPOCHS, "--resume", prepare=without_privileges)
    done.require_ended(0, 1, 2)
    if done.code == 0:
        raise Missed("that needed no permission")
    line = done.error_lines()[0]
    require(str(above) in line, f"the line does not name the path: {line}")
    for path in (above, *above.rglob("*")):
        path.chmod(0o755)
    if when == "during":
        return
    go_on(scene, setting, placement, (*run, "--epochs", EPOCHS), out)


def a_run(random: Random, scene: Scene, what: str) -> tuple[Setting, Placement]:
    """A run that writes what is to fail."""
    setting = draw_setting(random, scene.stage.typed)
    if what == "scratch":
        return setting, draw_placement(random, ("offload",), 2)
    if what == "tmp":
        return setting, Placement(strategy="tensor", workers=2, more=())
    return setting, draw_placement(random, ("single", "single", "tensor", "cached"), 2)


def go_on(scene: Scene, setting: Setting, placement: Placement, run: tuple[object, ...], out: Path) -> None:
    """With room: a run that had not begun begins, another one goes on; to the end of one that nothing stopped."""
    whole = scene.stage.whole(setting, placement, "--epochs", EPOCHS)
    resume = ("--resume",) if out.exists() and any(out.iterdir()) else ()
    scene.run(*run, *resume).require_ended(0)
    require_same(out, whole.folder)


def limit_files(num_bytes: int) -> None:
    """In a command's process; what it prints is less."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def without_privileges() -> None:
    """In a command's process: root obeys the modes of files as their owner does."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")
