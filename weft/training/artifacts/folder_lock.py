"""One run at a time in a folder: a lock that the run's processes hold, and that goes with the last of them."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from weft.utils.errors import InputError

NAME = "lock"
"""Of the file in a run's folder while the run lives; who holds it stands in it."""


class FolderLock:
    """Held from here until `release`, or the end of this process and of those it is sent to as they start.

    InputError where another run holds it. On a file system without locks, nobody is kept out.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        if not self._is_ours():
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._file)
            raise InputError(
                f"--out {folder}: {holder} is at work on it: wait until that has ended, or give another folder"
            )
        with suppress(OSError):  # a full disk
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _is_ours(self) -> bool:
        """Whether the lock is taken, and not that of a file which its holder has removed meanwhile."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except (BlockingIOError, FileNotFoundError):
            return False
        except OSError:
            return True

    def release(self) -> None:
        """Lets others in, once every process that it was sent to has ended."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._file),)


def _received(file: Any) -> FolderLock:
    lock = object.__new__(FolderLock)
    lock._file = file.detach()
    return lock


def require_unlocked(folder: Path) -> None:
    """InputError if a living run holds a folder's lock."""
    if (folder / NAME).exists():
        FolderLock(folder).release()
