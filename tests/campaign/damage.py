"""Functions that damage files at random."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

FOREIGN = (
    b"",
    b"\n",
    b"\0" * 64,
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    b"PK\x03\x04" + b"\0" * 40,
    b"\xff\xfe\xfd",
    "\u00e9 \u0663\n".encode(),
    b"[" * 100_000,
    b"null",
    b"[]",
    b"{}",
    b"1",
    b'"text"',
    b'{"kind": "epoch"}\n',
    b'{"kind": "summary"}\n',
    b"<html></html>",
)
"""Contents that another program may have written to a file."""
VALUES: tuple[Any, ...] = (None, -1, 0, 10**30, 1.5, float("nan"), float("inf"), "x", "", [], {}, True, [1], {"a": 1})


def damage_file(random: Random, path: Path) -> str:
    """Damage or remove a file, and return a description."""
    data = path.read_bytes()
    ways = ["flip", "flip", "cut", "empty", "delete", "double", "foreign", "folder", "insert"]
    if path.suffix in (".json", ".jsonl"):
        ways += ["shape", "shape", "shape"]
    way = random.choice(ways)
    if way == "delete":
        path.unlink()
        return f"{path.name} deleted"
    if way == "folder":
        path.unlink()
        path.mkdir()
        return f"a folder in place of {path.name}"
    place = random.randrange(max(len(data), 1))
    if way == "flip" and data:
        bit = 1 << random.randrange(8)
        data = data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]
        way = f"bit {bit} of byte {place} flipped"
    elif way == "cut":
        data, way = data[:place], f"cut at byte {place}"
    elif way == "insert":
        piece = random.choice((b"\n", b"\xff", b"0", b" ", b"}"))
        data, way = data[:place] + piece + data[place:], f"{piece!r} put in at byte {place}"
    elif way == "double":
        data, way = data + data, "twice over"
    elif way == "shape":
        data, way = other_shape(random, data, path.suffix == ".jsonl")
    elif way == "foreign":
        data = random.choice(FOREIGN)
        way = f"holds {data[:20]!r}"
    else:
        data, way = b"", "emptied"
    path.write_bytes(data)
    return f"{path.name}: {way}"


def other_shape(random: Random, data: bytes, several: bool) -> tuple[bytes, str]:
    """Return JSON with one value changed or removed, and a description; several: one object per line."""
    texts = data.decode().splitlines() if several else [data.decode()]
    number = random.randrange(len(texts))
    value, note = changed(random, json.loads(texts[number]))
    texts[number] = json.dumps(value)
    return ("\n".join(texts) + "\n" * several).encode(), f"line {number + 1}, {note}" if several else note


def changed(random: Random, value: Any) -> tuple[Any, str]:
    """Replace or remove one part of a JSON value, at any depth; return the value and a description."""
    trail: list[Any] = []
    part = value
    while isinstance(part, dict | list) and part and (not trail or random.random() < 0.7):
        trail.append(random.choice(list(part)) if isinstance(part, dict) else random.randrange(len(part)))
        part = part[trail[-1]]
    if not trail:
        return None, "null"
    holder = value
    for step in trail[:-1]:
        holder = holder[step]
    if random.random() < 0.3:
        del holder[trail[-1]]
        return value, f"without {trail}"
    holder[trail[-1]] = random.choice(VALUES)
    return value, f"{trail} is {holder[trail[-1]]!r}, not {str(part)[:40]}"


def swap(first: Path, second: Path) -> None:
    """Swap the names of two folders."""
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def put_foreign(random: Random, folder: Path) -> str:
    """Create a foreign file or folder next to a run's checkpoints, and return a description."""
    name = random.choice(("epoch-abc", "epoch-00000099", "epoch-", "epoch-0000000x", "notes.txt", ".epoch-00000009"))
    if random.random() < 0.5:
        (folder / name).mkdir()
    else:
        (folder / name).write_text("mine")
    return f"a foreign checkpoints/{name}"


def copy_over(source: Path, target: Path) -> None:
    """Replace a folder with a copy of another."""
    shutil.rmtree(target)
    shutil.copytree(source, target)
