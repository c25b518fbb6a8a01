"""A run's records: `metrics.jsonl`, one JSON object a line, each with its `kind` and the schema version."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from weft.core.errors import InputError, RunError

VERSION = 1


class Recorder:
    """Appends lines to a record file; each is on disk for a reader as soon as `write` returns."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", encoding="ascii")
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}") from error

    def write(self, kind: str, **values: Any) -> None:
        """Appends one line. RunError if it cannot be written."""
        try:
            self._file.write(json.dumps({"kind": kind, "version": VERSION, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(f"{self._file.name}: {error.strerror}") from error

    def close(self) -> None:
        """Ends the record; nothing can be written any more."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record; a last line cut short by a killed writer is left out. InputError for a damaged one."""
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number + 1 < len(lines):
                raise InputError(f"{path}: line {number + 1} is damaged ({error}): remove it") from error
    return records


def keep_until(path: Path, epoch: int) -> None:
    """Drops what a stopped run wrote after its checkpoint: epochs from `epoch` on, and the summary."""
    kept = [line for line in read(path) if line.get("epoch", -1) < epoch and line["kind"] != "summary"]
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="ascii")
    os.replace(draft, path)
