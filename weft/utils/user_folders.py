"""Folders of the user who runs weft."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.utils.errors import InputError


def expand_user(path: str | Path) -> Path:
    """Return a path with a leading `~` or `~user` replaced by the home folder, or unchanged if there is none.

    Unlike `Path.expanduser`, never raises.

    Args:
        path: The path.
    """
    return Path(os.path.expanduser(path))  # Path.expanduser raises RuntimeError for an unknown user


def home_folder() -> Path:
    """Return the user's home folder.

    Raises:
        InputError: HOME is not set and the system does not know the user, as in a container with `--user 12345`.
    """
    home = expand_user("~")
    if home == Path("~"):
        raise InputError(
            f"HOME is not set, and the system does not know user {os.getuid()}: set HOME to a folder for downloads and "
            "the profile of this machine"
        )
    return home


@contextmanager
def with_home() -> Iterator[None]:
    """Set HOME within the block if the user has no home folder, for packages whose import fails without one."""
    missing = expand_user("~") == Path("~")
    if missing:
        os.environ["HOME"] = tempfile.gettempdir()
    try:
        yield
    finally:
        if missing:
            del os.environ["HOME"]
