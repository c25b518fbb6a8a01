"""Graph folders with right checksums and wrong contents are refused, or give the results of their in-edges.

Whoever changes a file can also write a checksum that matches. What weft computes from such a folder must be what it
computes from a new graph with the same in-edges, features, labels and masks.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from tests.campaign.scene import Missed, Scene, check, check_same, files_of
from tests.campaign.settings import SMALL, Setting
from weft.data import DataWarning, Graph

EPOCHS = 3
MASKS = ("train_mask", "val_mask", "test_mask")
GRAPHS = (
    (SMALL,),
    ("rmat:60,300", "--random-features", "4", "--random-classes", "3"),
)


def attempt(random: Random, scene: Scene) -> None:
    """Change values of an array or of the manifest, write matching checksums, and use the graph."""
    number = random.randrange(len(GRAPHS))
    source = scene.stage.folder / f"contents-{number}"
    if not source.exists():
        scene.run("data", "import", *GRAPHS[number], "--out", source).check_ended(0)
    graph = scene.folder / "graph"
    shutil.copytree(source, graph)
    scene.run("data", "info", graph).check_ended(0)
    for _ in range(random.choice((1, 1, 2))):
        change(random, scene, graph)
    if files_of(graph) == files_of(source):
        raise Missed("nothing was changed")
    info = scene.run("data", "info", graph, *random.choice(((), ("--verify",))))
    info.check_ended(0, 2)
    setting = Setting(graph=(str(graph),), task=("--model", random.choice(("gcn", "sage")), "--dtype", "float64"))
    run = scene.folder / "run"
    strategy = random.choice(
        (
            (),
            ("--strategy", "tensor", "--workers", 2),
            ("--strategy", "hybrid", "--workers", 2),
            ("--strategy", "offload", "--chunks", 2),
        )
    )
    done = scene.run(*setting.train(), *strategy, "--epochs", EPOCHS, "--out", run)
    done.check_ended(0, 2)
    if done.code:
        check(not run.exists(), "a refused graph has left a run's folder")
        return
    check(info.code == 0, "data info refuses a graph that train accepts")
    again = scene.folder / "again"
    with_new_edges(graph).save(again)
    same = scene.folder / "same"
    scene.run("train", again, *setting.task, "--epochs", EPOCHS, "--out", same).check_ended(0)
    check_same(run, same)


def change(random: Random, scene: Scene, graph: Path) -> None:
    """Change an array of a graph folder, or a field of its manifest, and write the manifest that belongs to it."""
    manifest = json.loads((graph / "manifest.json").read_text())
    if random.random() < 0.2:
        manifest["symmetric"] = not manifest["symmetric"]
        note = f"symmetric: {manifest['symmetric']}"
    else:
        name = random.choice(sorted(manifest["files"]))
        path = graph / f"{name}.npy"
        array = np.load(path)
        note = f"{name}: {changed(random, array)}"
        np.save(path, array)
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        manifest["files"][name] |= {"sha256": digest, "modified": path.stat().st_mtime_ns, "bytes": path.stat().st_size}
    (graph / "manifest.json").write_text(json.dumps(manifest))
    scene.notes.append(note)


def changed(random: Random, array: np.ndarray[Any, Any]) -> str:
    """Change an array in its place to values that it may have, or nearly so, and return a description."""
    draw = np.random.default_rng(random.randrange(2**32))
    flat = array.reshape(-1)
    way = random.choice(("one", "one", "swap", "permute", "shift", "extreme", "reverse"))
    i, j = draw.integers(0, len(flat), 2)
    if way == "one":
        flat[i] = flat[j] if random.random() < 0.5 else flat[i] + np.ones((), flat.dtype)
    elif way == "swap":
        flat[[i, j]] = flat[[j, i]]
    elif way == "permute":
        flat[:] = draw.permutation(flat)
    elif way == "shift":
        flat[:] = np.roll(flat, 1)
    elif way == "reverse":
        flat[:] = flat[::-1].copy()
    elif flat.dtype.kind == "f":
        flat[i] = random.choice((np.nan, np.inf, -np.inf, np.finfo(flat.dtype).max, 0))
    elif flat.dtype.kind == "i":
        flat[i] = random.choice((-1, np.iinfo(flat.dtype).max, np.iinfo(flat.dtype).min, len(flat), 0))
    return f"{way} at {i}, {j}"


def with_new_edges(graph: Path) -> Graph:
    """Return the graph of a folder, its edges read from the in-edges alone, and its other arrays as they are."""
    with warnings.catch_warnings(action="ignore", category=DataWarning):
        opened = Graph.open(graph)
        indptr, indices = (torch.from_numpy(np.load(graph / f"{name}.npy")) for name in ("indptr", "indices"))
        target = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())
        edges = Graph.from_edges(indices.long(), target, num_vertices=opened.num_vertices)
        return replace(edges, x=opened.x, y=opened.y, **{name: getattr(opened, name) for name in MASKS})
