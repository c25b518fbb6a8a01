"""Temporary folders of weft's processes, and the removal of those that killed processes left behind."""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.runtime.processes.stop_request import blocked_signals

NAME = re.compile(r"weft-[0-9a-f]{16}")
"""Names of temporary folders."""
LEFTOVER_SECONDS = 24 * 3600.0
"""Age from which an unlocked folder counts as left behind. A new folder is unlocked for a moment, and some network file
systems do not show the locks of other hosts.
"""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder that only this user may open, and remove it at the end of the block.

    If this process is killed, a later one removes the folder.
    """
    folder, lock = _new_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def use_process_folder() -> Path:
    """Create a folder for all temporary files of this process from now on, and remove it when the process ends.

    Files that libraries leave behind, such as PyG's modules for message passing, are removed with it.
    """
    folder, _ = _new_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tempfile.tempdir = str(folder)
    return folder


def _new_folder() -> tuple[Path, int]:
    """Create a folder, after removing old ones of killed processes. Return it, and the descriptor of its lock."""
    with blocked_signals():  # the first call creates and removes a file
        parent = Path(tempfile.gettempdir())
    remove_leftovers(parent, NAME)
    folder = parent / f"weft-{secrets.token_hex(8)}"
    try:
        folder.mkdir(0o700)
        return folder, lock_folder(folder)
    except BaseException:  # a signal behind its creation
        shutil.rmtree(folder, ignore_errors=True)
        raise


def lock_folder(folder: Path) -> int:
    """Lock a folder as long as this process lives, so that no other process removes it.

    Args:
        folder: The folder.

    Returns:
        Descriptor, which ends the lock when it is closed.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks, where `remove_leftovers` removes nothing
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def remove_leftovers(parent: Path, names: re.Pattern[str]) -> None:
    """Remove folders of this user that killed processes left behind: those of a certain name and age without a lock.

    Args:
        parent: The folder that contains them.
        names: Pattern of their names.
    """
    newest = time.time() - LEFTOVER_SECONDS
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if names.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and status.st_mtime < newest:
                    _remove_unlocked(Path(entry.path))


def _remove_unlocked(folder: Path) -> None:
    """Remove a folder, unless a process has its lock or the file system has no locks."""
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
