"""Invalid graph files are refused in one line, with exit code 2, and nothing is written."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.campaign.damage import FOREIGN, VALUES
from tests.campaign.scene import Scene, check
from tests.campaign.settings import SMALL

Arrays = dict[str, np.ndarray[Any, Any]]
VERTICES, EDGES = 12, 30
BAD_FIELDS = ("-1", "1.5", "x", "nan", "inf", "", "0x1", "99999999999999999999", "\u0663", "9007199254740992")
BAD_WEIGHTS = ("nan", "inf", "-inf", "x", "", "1e400")


def attempt(random: Random, scene: Scene) -> None:
    """Let a command read a file with one mistake."""
    path = random.choice((bad_table, bad_table, bad_array, bad_archive, bad_archive, bad_store, foreign))(random, scene)
    out = scene.folder / "out"
    command = random.choice((["data", "info"], ["data", "import"], ["train"]))
    more = [] if command == ["data", "info"] else ["--out", out]
    if command == ["train"]:
        more += ["--random-features", 4, "--random-classes", 2] if path.suffix not in (".npz", "") else []
    before = sorted(scene.folder.rglob("*"))
    error = scene.run(*command, path, *more, seconds=20).check_refused()
    check(path.name in error, f"the line does not name the file: {error}")
    left = [str(file.relative_to(scene.folder)) for file in sorted(scene.folder.rglob("*")) if file not in before]
    left = [name for name in left if not name.startswith("begun-")]
    check(not left, f"a refused command has left {left}")


def bad_table(random: Random, scene: Scene) -> Path:
    """Write a wrong text table, compressed or not."""
    separator = random.choice((",", " ", "\t", ";"))
    weighted = random.random() < 0.3
    rows = [[str(random.randrange(VERTICES)) for _ in range(2)] + ["0.5"] * weighted for _ in range(EDGES)]
    row = random.randrange(1, EDGES)
    way = random.choice(("field", "field", "field", "columns", "empty", "header", "nul"))
    if way == "field":
        column = random.randrange(len(rows[row]))
        values = BAD_WEIGHTS if column == 2 else BAD_FIELDS
        rows[row][column] = random.choice([value for value in values if value or separator in ",;"])
    elif way == "columns":
        rows[row] = rows[row][:1] if random.random() < 0.5 else [*rows[row], "1"]
    elif way == "nul":
        rows[row][0] += "\0"
    text = "\n".join(separator.join(fields) for fields in rows) + "\n"
    if way in ("empty", "header"):
        text = "# nothing\n\n" if way == "empty" else "source,target\n"
    data = text.encode()
    suffix = random.choice((".csv", ".tsv", ".txt"))
    if random.random() < 0.3:
        data = gzip.compress(data)
        data = data[: random.randrange(12, len(data) - 1)] if random.random() < 0.5 else data
        suffix += ".gz"
    note = f"{suffix}: {way}" + (f", row {row} is {rows[row]!r}" if way in ("field", "columns", "nul") else "")
    return write_file(scene, f"edges{suffix}", data, note)


def bad_array(random: Random, scene: Scene) -> Path:
    """Write a wrong .npy file of edges."""
    edges = np.random.default_rng(random.randrange(2**32)).integers(0, VERTICES, (2, EDGES))
    wrong: dict[str, Callable[[], Any]] = {
        "negative": lambda: edges - VERTICES,
        "float": lambda: edges + 0.5,
        "text": lambda: edges.astype(str),
        "complex": lambda: edges.astype(complex),
        "flat": lambda: edges.reshape(-1),
        "three rows": lambda: np.vstack([edges, edges[:1]]),
        "deep": lambda: edges.reshape(2, -1, 5),
        "number": lambda: np.array(3),
        "huge": lambda: edges + 2**62,
        "structured": lambda: np.zeros(4, dtype=[("source", int), ("target", int)]),
        "dates": lambda: edges.astype("datetime64[s]"),
        "objects": lambda: edges.astype(object),
    }
    name = random.choice(sorted(wrong))
    buffer = io.BytesIO()
    np.save(buffer, wrong[name](), allow_pickle=True)
    data = buffer.getvalue()
    if random.random() < 0.2:
        name, data = "cut", data[: random.randrange(len(data))]
    return write_file(scene, "edges.npy", data, f".npy: {name}")


def bad_archive(random: Random, scene: Scene) -> Path:
    """Write a wrong .npz file."""
    draw = np.random.default_rng(random.randrange(2**32))
    good: Arrays = {
        "edge_index": draw.integers(0, VERTICES, (2, EDGES)),
        "num_nodes": np.array(VERTICES),
        "x": draw.random((VERTICES, 3)).astype(np.float32),
        "y": draw.integers(0, 3, VERTICES),
        "train_mask": np.arange(VERTICES) % 3 == 0,
        "val_mask": np.arange(VERTICES) % 3 == 1,
    }
    key = random.choice(sorted(good))
    edges, x, y, mask = (good[name] for name in ("edge_index", "x", "y", "train_mask"))
    wrong: dict[str, list[tuple[str, Any]]] = {
        "edge_index": [
            ("out of range", edges + VERTICES),
            ("negative", edges - VERTICES),
            ("text", edges.astype(str)),
            ("float", edges + 0.5),
            ("flat", edges.reshape(-1)),
            ("transposed", edges.T),
            ("complex", edges.astype(complex)),
            ("empty", np.zeros((0, 0))),
            ("objects", edges.astype(object)),
        ],
        "num_nodes": [
            ("fewer", np.array(1)),
            ("negative", np.array(-3)),
            ("more", np.array(VERTICES + 1)),
            ("text", np.array("12")),
            ("float", np.array(12.5)),
            ("several", np.array([6, 6])),
            ("huge", np.array(2**62)),
        ],
        "x": [
            ("nan", np.where(x < 0.1, np.nan, x) * np.where(np.arange(3) > 1, np.nan, 1)),
            ("inf", x + np.float32(np.inf)),
            ("short", x[1:]),
            ("flat", x.reshape(-1)),
            ("text", x.astype(str)),
            ("complex", x.astype(complex)),
            ("objects", x.astype(object)),
        ],
        "y": [
            ("short", y[1:]),
            ("negative", y - 5),
            ("text", y.astype(str)),
            ("inf", np.where(y > 0, np.inf, 0.0)),
            ("deep", y.reshape(-1, 2, 2)),
            ("objects", y.astype(object)),
        ],
        "train_mask": [("short", mask[1:]), ("text", mask.astype(str)), ("deep", mask.reshape(2, -1))],
        "val_mask": [("short", mask[1:]), ("complex", mask.astype(complex)), ("number", np.array(True))],
    }
    name, value = random.choice(wrong[key])
    arrays = {**good, key: value}
    way = f"{key} {name}"
    if random.random() < 0.1:
        arrays, way = {field: array for field, array in good.items() if field != "edge_index"}, "no edge_index"
    buffer = io.BytesIO()
    with np.errstate(all="ignore"):
        np.savez(buffer, allow_pickle=True, **arrays)
    data = buffer.getvalue()
    if random.random() < 0.15:
        data, way = data[: random.randrange(len(data) - 30)], "cut"
    return write_file(scene, "graph.npz", data, f".npz: {way}")


def bad_store(random: Random, scene: Scene) -> Path:
    """Write a graph store whose manifest has a wrong value or lacks a required one."""
    folder = scene.folder / "store"
    scene.run("data", "import", SMALL, "--out", folder).check_ended(0)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    must = ("format", "version", "symmetric", "relations", "vertex_types", "type_offsets", "files", "name")
    key = random.choice(must)
    if random.random() < 0.4:
        del manifest[key]
        note = f"manifest without {key}"
    else:
        kind = type(manifest[key])
        values = [value for value in VALUES if not isinstance(value, kind) and value is not True and value != 0]
        manifest[key] = random.choice(values)
        note = f"manifest: {key} is {manifest[key]!r}"
    path.write_text(json.dumps(manifest))
    scene.notes.append(note)
    return folder


def foreign(random: Random, scene: Scene) -> Path:
    """Write something else than a graph, or nothing at all."""
    suffix = random.choice((".csv", ".txt", ".tsv", ".npz", ".npy", ".csv.gz", ".bin"))
    path = scene.folder / f"graph{suffix}"
    way = random.choice(("bytes", "bytes", "folder", "missing", "broken link"))
    if way == "bytes":
        data = random.choice([content for content in FOREIGN if content != b"1"])
        return write_file(scene, path.name, data, f"{suffix} holds {data[:20]!r}")
    if way == "folder":
        path.mkdir()
    elif way == "broken link":
        path.symlink_to(scene.folder / "nowhere")
    scene.notes.append(f"{suffix}: {way}")
    return path


def write_file(scene: Scene, name: str, data: bytes, note: str) -> Path:
    """Write a file to the scene's folder and return its path."""
    path = scene.folder / name
    path.write_bytes(data)
    scene.notes.append(note)
    return path
