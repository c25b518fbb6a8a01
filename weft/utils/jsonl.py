"""Records of a run: `metrics.jsonl` has one JSON object per line, each with a `kind` and the version of the format."""

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
    """State of a record file at some time; a checkpoint stores it."""

    size: int = 0
    """Size of the file in bytes."""
    sha256: str = hashlib.sha256().hexdigest()
    """Hash of the content of the file."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """Lines of kind `epoch` in the file; a lost file can be rebuilt from them."""


class Recorder:
    """Writer that appends lines to a record file. A line is visible to readers as soon as `write` returns.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            content = path.read_bytes() if path.exists() else b""
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}") from error
        self._size, self._digest = len(content), hashlib.sha256(content)
        self._epochs = [line for line in _parsed(content, path) if line["kind"] == "epoch"]

    def write(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append one line, and return it.

        Args:
            kind: Kind of the line.
            **values: Other values of the line.

        Raises:
            RunError: The line cannot be written, or at an epoch, the file was replaced.
        """
        line = {"kind": kind, **migrate.versioned("record", values)}
        text = json.dumps(line).encode() + b"\n"
        try:
            if self._file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if kind == "epoch" and not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                raise FileNotFoundError(errno.ENOENT, "it was replaced during the run")
        except OSError as error:
            raise RunError(f"{self._path}: {error.strerror}") from error
        self._size += len(text)
        self._digest.update(text)
        if kind == "epoch":
            self._epochs.append(line)
        return line

    @property
    def mark(self) -> FilePosition:
        """Current state of the record file."""
        return FilePosition(size=self._size, sha256=self._digest.hexdigest(), epochs=list(self._epochs))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record file, without a last line that a killed writer cut short.

    Raises:
        InputError: The file is damaged.
    """
    return _parsed(path.read_bytes() if path.exists() else b"", path)


def _parsed(data: bytes, path: Path) -> list[dict[str, Any]]:
    records, lines = [], data.splitlines()
    for number, line in enumerate(lines):
        try:
            values = json.loads(line)
            if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
                raise ValueError("not a JSON object with a kind")
            records.append(migrate.record(values, path))
        except migrate.NewerFile:
            raise
        except (ValueError, RecursionError) as error:
            if number + 1 < len(lines):
                raise InputError(f"{path}: line {number + 1} is damaged ({error}): remove it") from error
    return records


def restore(path: Path, mark: FilePosition) -> Path | None:
    """Reset a record file to a former state, without lines that a stopped run wrote after its checkpoint.

    If the file does not begin with the content of that state, it is rebuilt from the epochs in `mark`.

    Args:
        path: The file.
        mark: The former state.

    Returns:
        Path to which a damaged file was moved, or None.
    """
    with path.open("a+b") as file:
        file.seek(0)
        if hashlib.sha256(file.read(mark.size)).hexdigest() == mark.sha256:
            file.truncate(mark.size)
            return None
    damaged, draft = path.with_name(f"{path.stem}.damaged{path.suffix}"), path.with_suffix(".tmp")
    draft.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in mark.epochs))
    os.replace(path, damaged)
    os.replace(draft, path)
    return damaged
