"""A module that a file names as the model is not imported, and its name does not reach the terminal unescaped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

from tests.campaign.scene import Done, Missed, Scene, Stage, check
from tests.campaign.settings import SMALL

MODULE = """
from pathlib import Path
from torch import nn
from weft.nn import GCNConv, Stack

Path("imported").touch()

def Net(num_features, num_classes):
    return Stack([GCNConv(num_features, num_classes)])
"""
NAME = "foreign_module:Net"
NAMES = (
    NAME,
    NAME,
    NAME,
    f"./{NAME}",
    f"{NAME}.__class__",
    f"{NAME}\n",
    f" {NAME}",
    f"{NAME}:Net",
    "foreign_module",
    "foreign_module:",
    ":Net",
    "os:abort",
    "builtins:exit",
    "\u202efoo:teN",
    "\x1b[2J:Net",
    "[red]gcn[/x]:Net",
    "gcn:" + "x" * 5000,
)
RUN_FILES = ("config.toml", "metrics.jsonl", "model.safetensors")
"""Files of a run that have the name of its model."""


def attempt(random: Random, scene: Scene) -> None:
    """Let a file name a module, then run a command that reads the file without `--model`."""
    (scene.working_folder / "foreign_module.py").write_text(MODULE)
    imported = scene.working_folder / "imported"
    name = random.choice(NAMES)
    run = scene.folder / "run"
    shutil.copytree(trained(scene.stage, custom := random.random() < 0.5), run)
    if name_in_run(random, run, NAME if custom else "gcn", name) == 0:
        raise Missed("no file of the run has the name of its model")
    options = scene.folder / "options.toml"
    options.write_text(f"[data]\ngraph = {quoted(SMALL)}\n[model]\nmodel = {quoted(name)}\n[training]\nepochs = 2\n")
    search = scene.folder / "search.toml"
    search.write_text(f'[model]\nmodel = ["gcn", {quoted(name)}]\n')
    commands = (
        ("predict", run, "--out", scene.folder / "logits.npy"),
        ("train", "--out", run, "--resume", "--epochs", 4),
        ("report", run, "--out", scene.folder / "report.html"),
        ("train", "--config", options, "--out", scene.folder / "new"),
        ("compare", "--config", options, "--strategies", "single"),
        ("plan", "--config", options),
        ("sweep", search, "--config", options, "--out", scene.folder / "sweep"),
    )
    scene.notes.append(f"the model is named {name!r}, custom: {custom}")
    for command in random.sample(commands, 2):
        done = scene.run(*command)
        check(done.code in (0, 1, 2), f"exit code {done.code}")
        if command[0] != "sweep":  # it has a line for each run that failed
            done.check_ended(0, 1, 2)
        check(not imported.exists(), f"{command[0]} has imported a module that a file names")
        check_printable(done)


def trained(stage: Stage, custom: bool) -> Path:
    """Return the folder of a run with two checkpoints, whose model is a person's own or a GCN."""
    folder = stage.folder / f"named-{custom}"
    if not folder.exists():
        with Scene(stage) as scene:
            (scene.working_folder / "foreign_module.py").write_text(MODULE)
            model = NAME if custom else "gcn"
            words = ("train", SMALL, "--model", model, "--epochs", 2, "--checkpoint-every", 1, "--out", folder)
            scene.run(*words).check_ended(0)
            check((scene.working_folder / "imported").exists() == custom, "the module does not show its import")
    return folder


def name_in_run(random: Random, run: Path, old: str, new: str) -> int:
    """Replace the model's name in all files of a run, or in some of them; return the number of changed files."""
    if old == NAME and random.random() < 0.5:
        return 1  # as it is: the folder of somebody who trained a model of their own
    paths = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    if random.random() < 0.5:
        paths = [run / random.choice(RUN_FILES)]
    changed = 0
    for path in paths:
        data = path.read_bytes()
        text, rest = data, b""
        if path.suffix == ".safetensors":  # a length of 8 bytes, a JSON text, the tensors
            size = int.from_bytes(data[:8], "little")
            text, rest = data[8 : 8 + size], data[8 + size :]
        names = ((quoted(old), quoted(new)), (quoted(quoted(old))[1:-1], quoted(quoted(new))[1:-1]))
        other = text
        for before, after in names:
            other = other.replace(before.encode(), after.encode())
        if other != text:
            changed += 1
            length = len(other).to_bytes(8, "little") if path.suffix == ".safetensors" else b""
            path.write_bytes(length + other + rest)
    return changed


def quoted(text: str) -> str:
    """Return a text as a string of JSON and of TOML."""
    return json.dumps(text)


def check_printable(done: Done) -> None:
    """Check that a command has printed no control characters, and none that change the direction of writing."""
    bad = [c for c in done.out + done.errors if not (c.isprintable() or c in "\n\r")]
    check(not bad, f"unescaped characters: {bad[:5]}")
