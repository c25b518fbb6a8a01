"""Reading of files that somebody else may have written: regular files only, and only as large as their kind can be.

Opening a FIFO waits for a writer, and a device such as /dev/zero never ends, so no other kind of file is opened.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from weft.utils.errors import InputError
from weft.utils.units import format_bytes

MAX_OPTIONS_BYTES = 1 << 24
"""Largest file of options or of kernel implementations (TOML or JSON) that is read."""
MAX_JSON_BYTES = 1 << 28
"""Largest manifest, profile, plan or state of a checkpoint that is read."""
MAX_RECORD_BYTES = 1 << 32
"""Largest record or timeline of a run that is read."""
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Names of the kinds of files that cannot be read."""


def check_regular(path: Path) -> None:
    """Check that a path leads to a regular file. Call it before a library opens the path.

    Raises:
        OSError: There is no such file, or it is a folder.
        InputError: It is a FIFO, a socket or a device.
    """
    _check_mode(path, path.stat().st_mode)


def _check_mode(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no file")
        raise InputError(f"{path}: is {kind}, which weft does not read: give a regular file")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Never waits.

    Raises:
        OSError: There is no such file, it is a folder, or permissions are missing.
        InputError: It is a FIFO, a socket or a device.
    """
    check_regular(path)
    # Another process may exchange the file between the check and the opening: do not wait for the writer of a FIFO.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _check_mode(path, os.fstat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        max_bytes: Largest size that such a file can have.

    Raises:
        OSError: There is no such file, it is a folder, or permissions are missing.
        InputError: It is a FIFO, a socket or a device, or larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise InputError(
                f"{path}: has {format_bytes(size)}, but such a file has at most {format_bytes(max_bytes)}: give another"
            )
        return file.read(size)


def read_text(path: Path, max_bytes: int) -> str:
    """Return the content of a regular file in UTF-8, whatever the locale; see `read_bytes`.

    Args:
        path: The file.
        max_bytes: Largest size that such a file can have.

    Raises:
        UnicodeDecodeError: It is not in UTF-8.
    """
    return read_bytes(path, max_bytes).decode("utf-8")
