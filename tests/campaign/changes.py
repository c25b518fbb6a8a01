"""A run is not resumed on data that have changed since, nor are predictions made: the line tells what has changed."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.campaign.scene import Scene, check, check_same, files_of
from tests.campaign.settings import EXACT, draw_placement

VERTICES, EDGES = 40, 160
DONE, EPOCHS = 3, 6
Arrays = dict[str, np.ndarray[Any, Any]]


def attempt(random: Random, scene: Scene) -> None:
    """Train on a file or on a graph folder, change one value of it, and resume the run or predict."""
    draw = np.random.default_rng(random.randrange(2**32))
    arrays = drawn(draw)
    stored = random.random() < 0.5
    graph = write(scene, arrays, stored)
    placement = draw_placement(random, EXACT, 2)
    out = scene.folder / "run"
    run = ("train", graph, "--dtype", "float64", *placement.flags, "--checkpoint-every", 1, "--out", out)
    scene.run(*run, "--epochs", DONE).check_ended(0)
    before = files_of(out)
    name = random.choice((*arrays, "nothing"))
    if name == "nothing":
        graph.touch()
    else:
        change(draw, arrays, name)
    write(scene, arrays, stored)
    scene.notes.append(f"changed: {name}")
    predict = ("predict", out, "--out", scene.folder / "logits.npy")
    if name == "nothing":
        scene.run(*predict).check_ended(0)
        scene.run(*run, "--epochs", EPOCHS, "--resume").check_ended(0)
        whole = scene.folder / "whole"
        scene.run("train", graph, "--dtype", "float64", "--epochs", EPOCHS, "--out", whole).check_ended(0)
        check_same(out, whole)
        return
    named = "edge" if name.startswith("edge") else f"({name})"
    for words in (predict, (*run, "--epochs", EPOCHS, "--resume")):
        error = scene.run(*words).check_refused()
        check(named in error and "trained" in error, f"the line does not tell that {name} has changed: {error}")
    check(files_of(out) == before, "a refused run has changed its folder")


def drawn(draw: np.random.Generator) -> Arrays:
    """Return the arrays of a random graph with weights."""
    return {
        "edge_index": draw.integers(0, VERTICES, (2, EDGES)),
        "edge_weight": draw.random(EDGES).astype(np.float32),
        "x": draw.random((VERTICES, 4)).astype(np.float32),
        "y": draw.integers(0, 3, VERTICES),
        "train_mask": np.arange(VERTICES) % 3 == 0,
        "val_mask": np.arange(VERTICES) % 3 == 1,
        "test_mask": np.arange(VERTICES) % 3 == 2,
    }


def change(draw: np.random.Generator, arrays: Arrays, name: str) -> None:
    """Change one value of an array to another that is valid."""
    flat = arrays[name].reshape(-1)
    place = draw.integers(0, len(flat))
    if flat.dtype == bool:
        flat[place] ^= True
    elif name == "edge_index":
        flat[place] = (flat[place] + 1) % VERTICES
    elif name == "y":
        flat[place] = (flat[place] + 1) % 3
    else:
        flat[place] += np.float32(1e-3)


def write(scene: Scene, arrays: Arrays, stored: bool) -> Path:
    """Write a graph to a file, or import it to a folder; return its path."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    path = scene.folder / "graph.npz"
    path.write_bytes(buffer.getvalue())
    if not stored:
        return path
    folder = scene.folder / "graph"
    scene.run("data", "import", path, "--out", folder, "--overwrite").check_ended(0)
    return folder
