"""Links, FIFOs, devices and sockets in place of files: no command waits for one, or writes to what a link leads to."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.campaign.scene import Missed, Scene, check, check_same, files_of
from tests.campaign.settings import SMALL, Placement, Setting

SECONDS = 60.0
"""Time limit of a command."""
SINGLE = Placement(strategy="single", workers=1, more=())
SETTING = Setting(graph=(SMALL,), task=("--dtype", "float64"))
DONE, EPOCHS = 4, 6
MINE = b"a file of somebody else\n"
DEVICES = ("/dev/zero", "/dev/full", "/dev/null", "/dev/urandom", "/dev/tty", "/proc/self/mem", "/proc/kmsg")
WRITTEN = ("lock", "model.safetensors", "card.md", "timeline.json", "metrics.jsonl", "epochs.jsonl", "checkpoints")
"""Files of a run that training writes."""


def attempt(random: Random, scene: Scene) -> None:
    """Put something else in the place of a file that a command reads or writes."""
    random.choice((in_run, in_run, in_run, in_store, in_argument, in_output))(random, scene)


def put(random: Random, scene: Scene, path: Path) -> None:
    """Replace a file or folder, which need not exist, by something else, and note it."""
    if path.is_dir() and not path.is_symlink():
        path.rename(scene.folder / "moved")
    elif path.exists():
        shutil.copy(path, scene.folder / "moved")
        path.unlink()
    target = scene.folder / "target"
    target.write_bytes(MINE)
    ways: dict[str, Callable[[], object]] = {
        "link to another file": lambda: path.symlink_to(target),
        "link to a copy": lambda: path.symlink_to(scene.folder / "moved"),
        "broken link": lambda: path.symlink_to(scene.folder / "nowhere"),
        "link to itself": lambda: path.symlink_to(path),
        "link to a folder": lambda: path.symlink_to(scene.folder),
        "FIFO": lambda: os.mkfifo(path),
        "link to a FIFO": lambda: (os.mkfifo(scene.folder / "fifo"), path.symlink_to(scene.folder / "fifo")),
        "socket": lambda: bind(path),
        "device": lambda: path.symlink_to(random.choice(DEVICES)),
        "folder": path.mkdir,
    }
    way = random.choice(sorted(ways))
    ways[way]()
    scene.notes.append(f"{path.relative_to(scene.folder)}: {way} {os.readlink(path) if path.is_symlink() else ''}")


def bind(path: Path) -> None:
    """Create a socket."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


def check_untouched(scene: Scene, moved: dict[str, bytes]) -> None:
    """Check that no file outside of the folder was written or created through a link."""
    check((scene.folder / "target").read_bytes() == MINE, "a file was overwritten through a link")
    check(not (scene.folder / "nowhere").exists(), "a file was created through a link")
    check(moved_files(scene) == moved, "a file was changed through a link")


def moved_files(scene: Scene) -> dict[str, bytes]:
    """Return the contents of what `put` has moved away."""
    here = scene.folder / "moved"
    return files_of(here) if here.is_dir() else {"": here.read_bytes()} if here.exists() else {}


def in_run(random: Random, scene: Scene) -> None:
    """Replace a file of a run, then resume it, predict with it, or write its report."""
    half = scene.stage.whole(SETTING, SINGLE, "--epochs", DONE, "--checkpoint-every", 2)
    run = scene.folder / "run"
    shutil.copytree(half.folder, run)
    names = [str(path.relative_to(run)) for path in sorted(run.rglob("*"))]
    put(random, scene, run / random.choice((*names, *WRITTEN)))
    moved = moved_files(scene)
    command = random.choice(("train", "train", "predict", "report"))
    if command == "train":
        words: tuple[object, ...] = (*SETTING.train(), "--out", run, "--resume", "--epochs", EPOCHS)
    else:
        words = (command, run, "--out", scene.folder / {"predict": "logits.npy", "report": "report.html"}[command])
    done = scene.run(*words, seconds=SECONDS)
    done.check_ended(0, 1, 2)
    check_untouched(scene, moved)
    if done.code == 0 and command == "train":
        check_same(run, scene.stage.whole(SETTING, SINGLE, "--epochs", EPOCHS).folder)


def in_store(random: Random, scene: Scene) -> None:
    """Replace a file of a graph folder, then open it."""
    graph = scene.folder / "graph"
    scene.run("data", "import", SMALL, "--out", graph).check_ended(0)
    put(random, scene, random.choice([*sorted(graph.iterdir()), graph / "checked.json"]))
    moved = moved_files(scene)
    done = scene.run("data", "info", graph, seconds=SECONDS)
    done.check_ended(0, 1, 2)
    check_untouched(scene, moved)


def in_argument(random: Random, scene: Scene) -> None:
    """Give a command something else than a file."""
    suffix = random.choice((".csv", ".npz", ".npy", ".txt.gz", ".parquet", ""))
    path = scene.folder / f"given{suffix}"
    put(random, scene, path)
    commands = (
        ("data", "info", path),
        ("data", "import", path, "--out", scene.folder / "graph"),
        ("data", "import", "--edges", path, "--out", scene.folder / "graph"),
        ("train", "--config", path, "--out", scene.folder / "run"),
        (*SETTING.train(), "--strategy", "cached", "--partition", path, "--out", scene.folder / "run"),
        (*SETTING.train(), "--strategy", "hybrid", "--machine", path, "--out", scene.folder / "run"),
        (*SETTING.train(), "--choices", path, "--out", scene.folder / "run"),
        ("sweep", path, "--out", scene.folder / "sweep"),
        ("predict", path, "--out", scene.folder / "logits.npy"),
        ("report", path, "--out", scene.folder / "report.html"),
    )
    done = scene.run(*random.choice(commands), seconds=SECONDS)
    done.check_ended(0, 1, 2)
    check_untouched(scene, {})


def in_output(random: Random, scene: Scene) -> None:
    """Put something else where a command is to write, which may only be replaced, and only on request."""
    half = scene.stage.whole(SETTING, SINGLE, "--epochs", DONE, "--checkpoint-every", 2)
    names = {"predict": "logits.npy", "report": "report.html", "import": "graph", "partition": "book.safetensors"}
    command = random.choice(sorted(names))
    out = scene.folder / names[command]
    words: dict[str, tuple[object, ...]] = {
        "predict": ("predict", half.folder),
        "report": ("report", half.folder),
        "import": ("data", "import", SMALL),
        "partition": ("partition", SMALL, "--parts", 2, "--method", "random"),
    }
    put(random, scene, out)
    overwrite = ("--overwrite",) if random.random() < 0.5 and command != "partition" else ()
    done = scene.run(*words[command], "--out", out, *overwrite, seconds=SECONDS)
    done.check_ended(0, 1, 2)
    check_untouched(scene, {})
    if done.code == 0 and not overwrite and not out.is_symlink() and not out.exists():
        raise Missed("nothing was written")
