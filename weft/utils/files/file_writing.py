"""Writing of files: a file appears completely or not at all, and nothing is written through a symbolic link."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DRAFT = re.compile(r"\.weft-[0-9a-f]{16}\.tmp")
"""Names of drafts."""
LEFTOVER_SECONDS = 7 * 24 * 3600.0
"""Age from which a draft of this user counts as left behind by a process that was killed."""
LINK = "it is a symbolic link, and weft does not write through links"


@contextmanager
def new_file(path: Path, *, flush: bool = False) -> Iterator[Path]:
    """Yield a draft that gets the name of a file when the block succeeds. A file or link of that name is replaced.

    Args:
        path: The file.
        flush: Flush the file and its name to disk, so that they survive a loss of power.

    Raises:
        OSError: The draft cannot be created or renamed.
    """
    draft = draft_in(path.parent)
    try:  # also around the creation, behind which a signal may end the command
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield draft
        if flush:
            sync(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if flush:
        sync(path.parent)


def draft_in(folder: Path) -> Path:
    """Return the path of a draft to create in a folder, after removing old drafts of killed processes.

    The name is random. With O_EXCL (mode "x"), the draft is then no file or link that somebody else has prepared.
    """
    remove_drafts(folder, min_age_seconds=LEFTOVER_SECONDS)
    return folder / f".weft-{secrets.token_hex(8)}.tmp"


def is_draft(name: str) -> bool:
    """Return True if a file's name is that of a draft."""
    return DRAFT.fullmatch(name) is not None


def remove_drafts(folder: Path, *, min_age_seconds: float = 0.0) -> None:
    """Remove this user's drafts in a folder.

    Args:
        folder: The folder.
        min_age_seconds: Seconds since the last change of a draft from which it is removed.
    """
    newest = time.time() - min_age_seconds
    with suppress(OSError):  # the folder cannot be listed, or another process removes the same draft
        for path in filter(lambda path: is_draft(path.name), folder.iterdir()):
            status = path.lstat()
            if status.st_uid == os.getuid() and status.st_mtime <= newest:
                path.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, completely or not at all.

    Args:
        path: The file.
        content: Its content.
    """
    with new_file(path) as draft:
        draft.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, completely or not at all.

    Args:
        path: The file.
        text: Its content.
    """
    write_bytes(path, text.encode())


def open_in_place(path: Path, flags: int) -> int:
    """Open a file to change it in place, and create it if there is none.

    Args:
        path: The file.
        flags: Flags of os.open: os.O_RDWR or os.O_WRONLY, and os.O_APPEND.

    Returns:
        The file's descriptor.

    Raises:
        OSError: The path is a symbolic link or no regular file, or the file cannot be opened.
    """
    refuse_link(path)
    handle = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def refuse_link(path: Path) -> None:
    """Raise OSError if a path is a symbolic link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, LINK, str(path))


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
