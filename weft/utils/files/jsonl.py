"""Records of a run: `metrics.jsonl` has one JSON object per line, each with a `kind` and the version of the format.

`epochs.jsonl` has a copy of its lines of kind `epoch`, from which a lost or damaged `metrics.jsonl` is rebuilt.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.utils.errors import InputError, RunError
from weft.utils.files import migrate
from weft.utils.files.file_reading import MAX_RECORD_BYTES, read_bytes
from weft.utils.files.file_writing import open_in_place, refuse_link, write_bytes

EPOCHS = "epochs.jsonl"
"""Name of the copy, next to the record file."""
NO_BYTES = hashlib.sha256().hexdigest()
"""Hash of an empty file."""


@dataclass(frozen=True, kw_only=True)
class FilePosition:
    """State of a record file and of the copy of its epochs at some time; a checkpoint stores it."""

    size: int = 0
    """Size of the record file in bytes."""
    sha256: str = NO_BYTES
    """Hash of the content of the record file."""
    epochs_size: int = 0
    """Size of the copy in bytes."""
    epochs_sha256: str = NO_BYTES
    """Hash of the content of the copy."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """Lines of kind `epoch`, if a weft without the copy wrote the checkpoint; otherwise empty."""


class Appender:
    """File to which bytes are appended. They are visible to readers as soon as `write` returns.

    Args:
        path: The file, which must not be a symbolic link.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = _content(path)
            self._handle = open_in_place(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}") from error
        self.size, self.digest = len(content), hashlib.sha256(content)

    def write(self, content: bytes) -> None:
        """Append some bytes.

        Raises:
            RunError: They cannot be written.
        """
        with self._explained():
            if os.write(self._handle, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += len(content)
        self.digest.update(content)

    def check_present(self) -> None:
        """Raise RunError if the file was removed or replaced since it was opened."""
        with self._explained():
            if not os.path.samestat(os.fstat(self._handle), self.path.lstat()):
                raise FileNotFoundError(errno.ENOENT, "it was replaced during the run")

    def flush(self) -> None:
        """Flush the file to disk."""
        with self._explained():
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"{self.path}: {error.strerror}") from error


class Recorder:
    """Writer that appends lines to a record file, and those of kind `epoch` also to its copy.

    Args:
        path: The record file.
    """

    def __init__(self, path: Path) -> None:
        read(path)  # so that nothing is appended to a damaged file
        self._record, self._copy = Appender(path), Appender(path.with_name(EPOCHS))

    def write(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append one line, and return it.

        Args:
            kind: Kind of the line.
            **values: Other values of the line.

        Raises:
            RunError: The line cannot be written, or at an epoch, the record file was replaced.
        """
        line = {"kind": kind, **migrate.versioned("record", values)}
        text = json.dumps(line).encode() + b"\n"
        self._record.write(text)
        if kind == "epoch":
            self._copy.write(text)
            self._record.check_present()
        return line

    def mark(self) -> FilePosition:
        """Flush the files to disk, and return their current state."""
        record, copy = self._record, self._copy
        for file in (record, copy):
            file.flush()
        return FilePosition(
            size=record.size,
            sha256=record.digest.hexdigest(),
            epochs_size=copy.size,
            epochs_sha256=copy.digest.hexdigest(),
        )

    def close(self) -> None:
        """Close the files."""
        self._record.close()
        self._copy.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record file, without a last line that a killed writer cut short.

    Raises:
        InputError: The file is damaged.
    """
    return _parsed(_content(path), path)


def _content(path: Path) -> bytes:
    """Return the content of a record file; nothing if there is no file."""
    return read_bytes(path, MAX_RECORD_BYTES) if path.exists() else b""


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
    """Reset a record file and its copy to a former state, without lines that a stopped run wrote after its checkpoint.

    If the record file does not begin with the content of that state, it is rebuilt from its copy.

    Args:
        path: The record file.
        mark: The former state.

    Returns:
        Path to which a damaged file was moved, or None.

    Raises:
        InputError: Both files are damaged. They remain unchanged.
        OSError: A file is a symbolic link, or cannot be written.
    """
    copy = path.with_name(EPOCHS)
    refuse_link(path)
    record = _beginning(path, mark.size, mark.sha256)
    if record is not None:
        lines = record.splitlines(keepends=True)
        epochs: bytes | None = b"".join(line for line in lines if line.startswith(b'{"kind": "epoch"'))
    elif mark.epochs:
        epochs = b"".join(json.dumps(line).encode() + b"\n" for line in mark.epochs)
    else:
        epochs = _beginning(copy, mark.epochs_size, mark.epochs_sha256)
    if epochs is None:
        raise InputError(
            f"{path} and its copy {EPOCHS} are damaged or missing: restore one of them, or train in a new --out"
        )
    write_bytes(copy, epochs)
    with os.fdopen(open_in_place(path, os.O_RDWR), "r+b") as file:  # also creates a file that is missing
        if record is not None:
            file.truncate(mark.size)
            return None
    damaged = path.with_name(f"{path.stem}.damaged{path.suffix}")
    os.replace(path, damaged)
    write_bytes(path, epochs)
    return damaged


def _beginning(path: Path, size: int, sha256: str) -> bytes | None:
    """Return the first bytes of a record file; None unless the file has so many and these have the hash."""
    content = _content(path)[:size]
    return content if len(content) == size and hashlib.sha256(content).hexdigest() == sha256 else None
