"""Damage to files of a run, a graph's store or a partition book is refused in one line, or changes no result."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from random import Random

from tests.campaign.damage import copy_over, damage_file, put_foreign, swap
from tests.campaign.scene import Missed, Scene, check, check_same, files_of
from tests.campaign.settings import SMALL, Placement, Setting, draw_placement, draw_setting

DONE, EPOCHS = 6, 9
SINGLE = Placement(strategy="single", workers=1, more=())
FORGIVEN = ("name",)
"""Lines of `data info` that no checksum protects and that no result depends on."""


def attempt(random: Random, scene: Scene) -> None:
    """Damage a run's folder, a graph's store or a partition book; a run's folder most often."""
    random.choice((damaged_run, damaged_run, damaged_run, damaged_store, damaged_book))(random, scene)


def damaged_run(random: Random, scene: Scene) -> None:
    """Damage a finished or stopped run with two checkpoints, and resume it for more epochs."""
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

    recorded = recorded_losses(out)
    short = random.random() < 0.3
    words = ("train", setting.graph[0]) if short else (*setting.train(), *placement.flags)
    done = scene.run(*words, "--out", out, "--resume", "--epochs", EPOCHS)
    done.check_ended(0, 1, 2)
    if done.code == 0:
        check_same(out, whole.folder, recorded)
    elif done.code == 2:
        check(files_of(out) == after, "a refused run has changed its folder")


def stop(out: Path) -> None:
    """Change a finished run into one that was stopped before it wrote its weights."""
    (out / "model.safetensors").unlink()
    record = out / "metrics.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))


def damage(random: Random, scene: Scene, setting: Setting, placement: Placement, out: Path) -> None:
    """Damage a run's folder at random, and note how."""
    saved = sorted((out / "checkpoints").iterdir())
    way = random.choice(("file", "file", "file", "file", "swap", "foreign", "other", "remove", "copy"))
    if way == "file":
        files = [path for path in sorted(out.rglob("*")) if path.is_file()]
        files += [path for path in files if path.suffix in (".jsonl", ".json", ".toml")]  # twice as often
        note = damage_file(random, random.choice(files))
    elif way == "swap":
        swap(saved[0], saved[1])
        note = "checkpoints swapped"
    elif way == "foreign":
        note = put_foreign(random, out / "checkpoints")
    elif way == "other":
        seeds = [seed for seed in ("0", "1", "2") if seed != setting.task[-1]]
        task = (*setting.task[:-1], random.choice(seeds))
        run = Setting(graph=setting.graph, task=task)
        other = scene.stage.whole(run, placement, "--epochs", DONE, "--checkpoint-every", DONE - 2)
        copy_over(other.folder / "checkpoints" / saved[-1].name, saved[-1])
        note = "the newest checkpoint is that of a run with another seed"
    elif way == "remove":
        removed = random.choice((saved[:1], saved[1:], saved))
        for path in removed:
            shutil.rmtree(path)
        note = f"checkpoints removed: {[path.name for path in removed]}"
    else:
        number = random.choice((1, DONE + 1, EPOCHS, EPOCHS + 5))
        shutil.copytree(random.choice(saved), out / "checkpoints" / f"epoch-{number:08d}")
        note = f"a checkpoint copied as epoch-{number:08d}"
    scene.notes.append(note)


def recorded_losses(out: Path) -> dict[int, float]:
    """Return the losses in a run's record by epoch, as far as it can be read; a wrong digit cannot be recognized."""
    losses: dict[int, float] = {}
    path = out / "metrics.jsonl"
    for text in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and line.get("kind") == "epoch":
            epoch, loss = line.get("epoch"), line.get("loss")
            if isinstance(epoch, int) and isinstance(loss, int | float) and math.isfinite(loss):
                losses[epoch] = loss
    return losses


def damaged_store(random: Random, scene: Scene) -> None:
    """Damage a graph's store, then run `data info` and `train` on it."""
    typed = random.random() < 0.5
    source = scene.stage.typed if typed else scene.stage.folder / "small"
    if not source.exists():
        scene.run("data", "import", SMALL, "--out", source).check_ended(0)
    graph = scene.folder / "graph"
    shutil.copytree(source, graph)
    right = facts(scene.run("data", "info", graph).out)
    scene.notes.append(damage_file(random, random.choice(sorted(graph.iterdir()))))
    if files_of(graph) == files_of(source):
        raise Missed("nothing was damaged")
    done = scene.run("data", "info", graph)
    done.check_ended(0, 1, 2)
    if done.code == 0:
        check(facts(done.out) == right, f"data info says {sorted(set(facts(done.out)) - set(right))}")
    out = scene.folder / "run"
    model = ("--model", "rgcn", "--hidden", "8", "--dtype", "float64") if typed else ("--dtype", "float64")
    trained = scene.run("train", graph, *model, "--epochs", 3, "--out", out)
    trained.check_ended(0, 1, 2)
    if trained.code == 0:
        setting = Setting(graph=(str(source),), task=model)
        check_same(out, scene.stage.whole(setting, SINGLE, "--epochs", 3).folder)
    else:
        check(not out.exists(), "a refused graph has left a run's folder")


def facts(text: str) -> list[str]:
    """Return the lines of `data info`, except unprotected ones."""
    return [line for line in text.splitlines() if line.split()[0] not in FORGIVEN]


def damaged_book(random: Random, scene: Scene) -> None:
    """Damage a partition book, then train with it."""
    book = scene.folder / "book.safetensors"
    method = random.choice(("metis", "fennel", "random"))
    scene.run("partition", SMALL, "--parts", 2, "--method", method, "--out", book).check_ended(0)
    before = book.read_bytes()
    scene.notes.append(damage_file(random, book))
    if book.is_file() and book.read_bytes() == before:
        raise Missed("nothing was damaged")
    out = scene.folder / "run"
    setting = Setting(graph=(SMALL,), task=("--dtype", "float64"))
    placed = ("--strategy", "cached", "--workers", 2, "--partition", book)
    done = scene.run(*setting.train(), *placed, "--epochs", 3, "--out", out)
    done.check_ended(0, 1, 2)
    if done.code == 0:
        check_same(out, scene.stage.whole(setting, SINGLE, "--epochs", 3).folder)
    else:
        check(not out.exists(), "a refused book has left a run's folder")
