"""Full disks and read-only folders fail with one line that names the path; with room, the run can be resumed.

A full disk is a small file system, if mounting is allowed, or a limit on the size of files. Root may write everywhere,
so commands that must fail to write run without root's privileges.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import subprocess
from functools import partial
from pathlib import Path
from random import Random

from tests.campaign.scene import Missed, Scene, begun, check, check_same, epochs_recorded, until
from tests.campaign.settings import Placement, Setting, draw_placement, draw_setting
from tests.lib.running import keep_files_in

EPOCHS = 24
CAPABILITIES = 0x20080522
"""Version of the data layout of capset, from linux/capability.h."""
SIZES = {"out": (4, 60), "tmp": (4, 80), "scratch": (4, 200), "store": (4, 560), "book": (4, 8)}
"""Range of a disk's size in kB, by its contents: from nearly nothing to nearly enough."""


def attempt(random: Random, scene: Scene) -> None:
    """Run a command on a full disk, with a file size limit, or without permission."""
    way = random.choice((full, full, limited, forbidden))
    if way is full and not scene.stage.mounts:
        way = limited
    way(random, scene)


def full(random: Random, scene: Scene) -> None:
    """Use a small file system for a run's folder, temporary or scratch files, or for a graph's store or a book."""
    what = random.choice(("out", "out", "out", "tmp", "scratch", "store", "book"))
    num_bytes = 1024 * random.randint(*SIZES[what])
    disk = scene.small_disk("disk", num_bytes)
    scene.notes.append(f"a disk of {num_bytes // 1024} kB for {what}")
    if what in ("store", "book"):
        words = ("data", "import", "digits") if what == "store" else ("partition", "digits", "--parts", 2)
        done = scene.run(*words, "--out", disk / "made")
        done.check_ended(0, 1, 2)
        if done.code == 0:
            raise Missed("there was room")
        check(str(disk) in done.error_lines()[0], f"the line does not name the disk: {done.error_lines()[0]}")
        check(not list(disk.iterdir()), f"left on the disk: {sorted(path.name for path in disk.iterdir())}")
        return
    setting, placement = draw_run(random, scene, what)
    out = scene.folder / "run" if what != "out" else disk / "run"
    more: tuple[object, ...] = ("--scratch", disk) if what == "scratch" else ()
    prepare = partial(keep_files_in, str(disk)) if what == "tmp" else None
    run = (*setting.train(), *placement.flags, *more, "--epochs", EPOCHS, "--checkpoint-every", 2, "--out", out)
    done = scene.run(*run, prepare=prepare)
    done.check_ended(0, 1, 2)
    if done.code == 0:
        raise Missed("there was room")
    line = done.error_lines()[0]
    check(str(disk) in line, f"the line does not name the disk: {line}")
    if what != "out":
        left = [path.name for path in disk.iterdir() if not path.name.startswith("torchinductor")]
        check(not left, f"left on the disk: {left}")
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    go_on(scene, setting, placement, run, out)


def limited(random: Random, scene: Scene) -> None:
    """Limit the size of files, which fails in the same way as a full disk."""
    setting, placement = draw_run(random, scene, random.choice(("out", "tmp", "scratch")))
    num_bytes = 1024 * random.randint(1, 60)
    scene.notes.append(f"files of {num_bytes // 1024} kB at most")
    out = scene.folder / "run"
    run = (*setting.train(), *placement.flags, "--epochs", EPOCHS, "--checkpoint-every", 2, "--out", out)
    done = scene.run(*run, prepare=partial(limit_files, num_bytes))
    done.check_ended(0, 1, 2)
    if done.code == 0:
        raise Missed("there was room")
    line = done.error_lines()[0]
    check(str(scene.folder) in line, f"the line does not name a path: {line}")
    go_on(scene, setting, placement, run, out)


def forbidden(random: Random, scene: Scene) -> None:
    """Deny write or read permission for a folder or a file, from the start or from some epoch on."""
    setting, placement = draw_run(random, scene, "out")
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
        scene.run(*run, "--epochs", 4, prepare=without_privileges).check_ended(0)
        names = ("config.toml", "metrics.jsonl", "checkpoints", "checkpoints/epoch-00000004", ".")
        shut = out / random.choice(names)
        mode = random.choice((0o000, 0o444)) if shut.is_file() else random.choice((0o000, 0o555))
        shut.chmod(mode)
        scene.notes.append(f"{shut.relative_to(above)} has mode {mode:o}")
        done = scene.run(*run, "--epochs", EPOCHS, "--resume", prepare=without_privileges)
    done.check_ended(0, 1, 2)
    if done.code == 0:
        raise Missed("that needed no permission")
    line = done.error_lines()[0]
    check(str(above) in line, f"the line does not name the path: {line}")
    for path in (above, *above.rglob("*")):
        path.chmod(0o755)
    if when == "during":
        return
    go_on(scene, setting, placement, (*run, "--epochs", EPOCHS), out)


def draw_run(random: Random, scene: Scene, what: str) -> tuple[Setting, Placement]:
    """Return a run that writes the files that are to fail."""
    setting = draw_setting(random, scene.stage.typed)
    if what == "scratch":
        return setting, draw_placement(random, ("offload",), 2)
    if what == "tmp":
        return setting, Placement(strategy="tensor", workers=2, more=())
    return setting, draw_placement(random, ("single", "single", "tensor", "cached"), 2)


def go_on(scene: Scene, setting: Setting, placement: Placement, run: tuple[object, ...], out: Path) -> None:
    """Start or resume the run, now with room, and compare it with an uninterrupted run."""
    whole = scene.stage.whole(setting, placement, "--epochs", EPOCHS)
    resume = ("--resume",) if begun(out) else ()
    scene.run(*run, *resume).check_ended(0)
    check_same(out, whole.folder)


def limit_files(num_bytes: int) -> None:
    """Limit the size of files in a command's process; its output is smaller than the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def without_privileges() -> None:
    """Drop root's privileges in a command's process, so that it obeys the modes of files."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")
