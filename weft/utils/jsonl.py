"""A run's records: `metrics.jsonl`, one JSON object a line, each with its `kind` and the version of the format."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.utils import migrate
from weft.utils.errors import InputError, RunError


@dataclass(frozen=True, kw_only=True)
class FilePosition:
    """How far a record had come at some time; a checkpoint keeps that of its own."""

    size: int = 0
    """Bytes."""
    sha256: str = hashlib.sha256().hexdigest()
    """Of these bytes."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """The lines of epochs among them, from which a record that is lost is made again."""


class Recorder:
    """Appends lines to a record file; each is on disk for a reader as soon as `write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            known = path.read_bytes() if path.exists() else b""
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}") from error
        self._size, self._digest = len(known), hashlib.sha256(known)
        self._epochs = [line for line in _parsed(known, path) if line["kind"] == "epoch"]

    def write(self, kind: str, **values: Any) -> dict[str, Any]:
        """Appends one line and returns it. RunError if it cannot be written or, at an epoch's, nobody would find it."""
        line = {"kind": kind, **migrate.versioned("record", values)}
        text = json.dumps(line).encode() + b"\n"
        try:
            if self._file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if kind == "epoch" and not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                raise FileNotFoundError(errno.ENOENT, "it was replaced while the run went on")
        except OSError as error:
            raise RunError(f"{self._path}: {error.strerror}") from error
        self._size += len(text)
        self._digest.update(text)
        if kind == "epoch":
            self._epochs.append(line)
        return line

    @property
    def mark(self) -> FilePosition:
        """That of the record as it is."""
        return FilePosition(size=self._size, sha256=self._digest.hexdigest(), epochs=list(self._epochs))

    def close(self) -> None:
        """Ends the record; nothing can be written any more."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record; a last line cut short by a killed writer is left out. InputError for a damaged one."""
    return _parsed(path.read_bytes() if path.exists() else b"", path)


def _parsed(data: bytes, path: Path) -> list[dict[str, Any]]:
    records, lines = [], data.splitlines()
    for number, line in enumerate(lines):
        try:
            found = json.loads(line)
            if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
                raise ValueError("no object with a kind")
            records.append(migrate.record(found, path))
        except migrate.NewerFile:
            raise
        except (ValueError, RecursionError) as error:
            if number + 1 < len(lines):
                raise InputError(f"{path}: line {number + 1} is damaged ({error}): remove it") from error
    return records


def restore(path: Path, mark: FilePosition) -> Path | None:
    """Takes a record back to where it was at a mark, without what a stopped run wrote after its checkpoint.

    Where it is not what it was then, it is made again from the mark's epochs; the path that the other is kept at.
    """
    with path.open("a+b") as file:
        file.seek(0)
        if hashlib.sha256(file.read(mark.size)).hexdigest() == mark.sha256:
            file.truncate(mark.size)
            return None
    kept, draft = path.with_name(f"{path.stem}.damaged{path.suffix}"), path.with_suffix(".tmp")
    draft.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in mark.epochs))
    os.replace(path, kept)
    os.replace(draft, path)
    return kept
