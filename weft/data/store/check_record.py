"""Record of a check in a graph folder, so that later openings compare only sizes, times and the manifest's digest.

Somebody who sends a graph folder could put a record into it. A record therefore counts only for files with the same
inodes and times of change, which no program can set, and only if the user who reads it has written it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.utils.files.file_reading import MAX_JSON_BYTES, read_text
from weft.utils.files.file_writing import write_text

NAME = "checked.json"
"""Name of the record in a graph folder."""
VERSION = 1
"""Version of the record and of the checks. A record of another version does not count."""
MIN_AGE_SECONDS = 1.0
"""Smallest age of a file in a record: a younger one could be written to again without another time of change."""


def folder_state(files: Iterable[Path], manifest: Path) -> dict[str, Any]:
    """Return what a record states about files: inode, size and times of each, and the digest of the manifest.

    Args:
        files: Files of arrays; those that do not exist are left out.
        manifest: The manifest.
    """
    states = {}
    for path in (*files, manifest):
        if path.is_file():
            state = path.stat()
            states[path.name] = [state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    digest = hashlib.sha256(read_text(manifest, MAX_JSON_BYTES).encode()).hexdigest()
    return {"version": VERSION, "manifest": digest, "files": states}


def was_checked(folder: Path, state: dict[str, Any]) -> bool:
    """Return True if this user has checked a graph folder, and no file has changed since.

    Args:
        folder: The folder.
        state: Present state of the files, from `folder_state`.
    """
    path = folder / NAME
    try:
        status = path.lstat()
        is_mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
        return is_mine and json.loads(read_text(path, MAX_JSON_BYTES)) == state
    except (OSError, ValueError, RecursionError):
        return False


def record_check(folder: Path, state: dict[str, Any]) -> None:
    """Record that a graph folder was checked. Does nothing if files are too young, or the folder is read-only.

    Args:
        folder: The folder.
        state: State of the files before they were read for the check, from `folder_state`.
    """
    youngest = max(change for *_, change in state["files"].values())
    if youngest > time.time_ns() - MIN_AGE_SECONDS * 1e9:
        return
    try:
        write_text(folder / NAME, json.dumps(state))
        (folder / NAME).chmod(0o644)
    except OSError:  # the next opening checks again
        pass
