"""Lock of a run's folder, so that only one run at a time uses it.

The processes of the run share the lock. It is free when the last of them has ended.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from weft.utils.errors import InputError
from weft.utils.files.file_writing import open_in_place

NAME = "lock"
"""Name of the lock file, which exists while the run lives and contains the process that locked it."""


class FolderLock:
    """Lock of a folder, from construction until `release` or the end of all processes that have it.

    Local ranks receive the lock when they start. On a file system without locks, it has no effect.

    Args:
        folder: The folder, which must exist.

    Raises:
        InputError: Another run has the lock.
        OSError: The lock file is a symbolic link, or cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file = open_in_place(self._path, os.O_RDWR)
        if not self._acquire():
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._file)
            raise InputError(
                f"--out {folder}: {holder} is using this folder: wait until it has ended, or give another folder"
            )
        with suppress(OSError):  # the disk is full: the lock works without this text
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _acquire(self) -> bool:
        """Take the lock. Return False if another process has it, or removed the file that was just opened."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._file), self._path.lstat())
        except (BlockingIOError, FileNotFoundError):
            return False
        except OSError:  # a file system without locks
            return True

    def release(self) -> None:
        """Remove the lock file, and free the lock once every process that received it has ended."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._file),)


def _received(file: Any) -> FolderLock:
    """Return the lock in a process that received it, with its own descriptor of the same open file."""
    lock = object.__new__(FolderLock)
    lock._file = file.detach()
    return lock


def require_unlocked(folder: Path) -> None:
    """Check that no other run uses a folder.

    Raises:
        InputError: A living run has the folder's lock.
    """
    if (folder / NAME).exists():
        FolderLock(folder).release()
