"""Damage to what a run, a graph's folder or a book holds: refused in one line, or of no effect on any number."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from random import Random

from tests.campaign.damage import copy_over, damage_file, put_foreign, swap
from tests.campaign.scene import Missed, Scene, files_of, require, require_same
from tests.campaign.settings import SMALL, Placement, Setting, draw_placement, draw_setting

DONE, EPOCHS = 6, 9
SINGLE = Placement(strategy="single", workers=1, more=())
FORGIVEN = ("name",)
"""Facts of a graph that no check guards: damage to them is damage to a word."""


def attempt(random: Random, scene: Scene) -> None:
    """Of a run's folder most often."""
    random.choice((damaged_run, damaged_run, damaged_run, damaged_store, damaged_book))(random, scene)


def damaged_run(random: Random, scene: Scene) -> None:
    """A run with two checkpoints, finished or stopped, goes on to more epochs."""
    setting = draw_setting(random, scene.stage.typed)
    placement = SINGLE if random.random() < 0.5 else draw_placement(random, ("single", "tensor", "hybrid"), 2)
    half = scene.stage.whole(setting, placement, "--epochs", DONE, "--checkpoint-every", DONE - 2)
    whole = scene.stage.whole(setting, placement, "--epochs", EPOCHS)
    out = scene.folder / "run"
    shutil.copytree(half.folder, out)
    if random.random() < 0.5:
        stop(out)
    before = files_of(out)
    damage(random, scene, setting, placement, out)
    after = files_of(out)
    if after == before and sorted(out.rglob("*")) == sorted(half.folder.rglob("*")):
        raise Missed("nothing was damaged")

    known = losses_known(out)
    short = random.random() < 0.3
    words = ("train", setting.graph[0]) if short else (*setting.train(), *placement.flags)
    done = scene.run(*words, "--out", out, "--resume", "--epochs", EPOCHS)
    done.require_ended(0, 1, 2)
    if done.code == 0:
        require_same(out, whole.folder, known)
    elif done.code == 2:
        require(files_of(out) == after, "a refused run has changed its folder")


def stop(out: Path) -> None:
    """Makes a finished run one that was stopped before it had written its weights."""
    (out / "model.safetensors").unlink()
    record = out / "metrics.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))


def damage(random: Random, scene: Scene, setting: Setting, placement: Placement, out: Path) -> None:
    """Some damage to a run's folder."""
    saved = sorted((out / "checkpoints").iterdir())
    way = random.choice(("file", "file", "file", "file", "swap", "foreign", "other", "remove", "copy"))
    if way == "file":
        files = [path for path in sorted(out.rglob("*")) if path.is_file()]
        files += [path for path in files if path.suffix in (".jsonl", ".json", ".toml")]  # twice as often
        said = damage_file(random, random.choice(files))
    elif way == "swap":
        swap(saved[0], saved[1])
        said = "checkpoints swapped"
    elif way == "foreign":
        said = put_foreign(random, out / "checkpoints")
    elif way == "other":
        seeds = [one for one in ("0", "1", "2") if one != setting.task[-1]]
        task = (*setting.task[:-1], random.choice(seeds))
        run = Setting(graph=setting.graph, task=task)
        other = scene.stage.whole(run, placement, "--epochs", DONE, "--checkpoint-every", DONE - 2)
        copy_over(other.folder / "checkpoints" / saved[-1].name, saved[-1])
        said = "the newest checkpoint is that of a run with another seed"
    elif way == "remove":
        gone = random.choice((saved[:1], saved[1:], saved))
        for one in gone:
            shutil.rmtree(one)
        said = f"checkpoints removed: {[one.name for one in gone]}"
    else:
        number = random.choice((1, DONE + 1, EPOCHS, EPOCHS + 5))
        shutil.copytree(random.choice(saved), out / "checkpoints" / f"epoch-{number:08d}")
        said = f"a checkpoint copied as epoch-{number:08d}"
    scene.notes.append(said)


def losses_known(out: Path) -> dict[int, float]:
    """The losses that a record has before the run goes on, as far as it can be read; nobody can tell a wrong digit."""
    known: dict[int, float] = {}
    path = out / "metrics.jsonl"
    for text in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and line.get("kind") == "epoch":
            epoch, loss = line.get("epoch"), line.get("loss")
            if isinstance(epoch, int) and isinstance(loss, int | float) and math.isfinite(loss):
                known[epoch] = loss
    return known


def damaged_store(random: Random, scene: Scene) -> None:
    """A graph's folder: `data info` and `train`."""
    typed = random.random() < 0.5
    source = scene.stage.typed if typed else scene.stage.folder / "small"
    if not source.exists():
        scene.run("data", "import", SMALL, "--out", source).require_ended(0)
    graph = scene.folder / "graph"
    shutil.copytree(source, graph)
    right = facts(scene.run("data", "info", graph).out)
    scene.notes.append(damage_file(random, random.choice(sorted(graph.iterdir()))))
    if files_of(graph) == files_of(source):
        raise Missed("nothing was damaged")
    done = scene.run("data", "info", graph)
    done.require_ended(0, 1, 2)
    if done.code == 0:
        require(facts(done.out) == right, f"data info says {sorted(set(facts(done.out)) - set(right))}")
    out = scene.folder / "run"
    model = ("--model", "rgcn", "--hidden", "8", "--dtype", "float64") if typed else ("--dtype", "float64")
    trained = scene.run("train", graph, *model, "--epochs", 3, "--out", out)
    trained.require_ended(0, 1, 2)
    if trained.code == 0:
        setting = Setting(graph=(str(source),), task=model)
        require_same(out, scene.stage.whole(setting, SINGLE, "--epochs", 3).folder)
    else:
        require(not out.exists(), "a refused graph has left a run's folder")


def facts(text: str) -> list[str]:
    """What `data info` says, without what is forgiven."""
    return [line for line in text.splitlines() if line.split()[0] not in FORGIVEN]


def damaged_book(random: Random, scene: Scene) -> None:
    """A partition's file."""
    book = scene.folder / "book.safetensors"
    method = random.choice(("metis", "fennel", "random"))
    scene.run("partition", SMALL, "--parts", 2, "--method", method, "--out", book).require_ended(0)
    before = book.read_bytes()
    scene.notes.append(damage_file(random, book))
    if book.is_file() and book.read_bytes() == before:
        raise Missed("nothing was damaged")
    out = scene.folder / "run"
    setting = Setting(graph=(SMALL,), task=("--dtype", "float64"))
    placed = ("--strategy", "cached", "--workers", 2, "--partition", book)
    done = scene.run(*setting.train(), *placed, "--epochs", 3, "--out", out)
    done.require_ended(0, 1, 2)
    if done.code == 0:
        require_same(out, scene.stage.whole(setting, SINGLE, "--epochs", 3).folder)
    else:
        require(not out.exists(), "a refused book has left a run's folder")
