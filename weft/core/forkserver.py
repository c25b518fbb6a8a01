"""The process that a command's local ranks are forked from, once it has imported what they need."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir

_started = False


def start_forkserver() -> None:
    """Starts it without waiting for it, so that it imports while this process does other things, and ends with it.

    For commands, whose environment does not change: ranks have that of this call.
    """
    global _started
    multiprocessing.set_forkserver_preload(["weft.engine.forked"])
    with suppress(OSError):  # a socket's path has at most 107 letters, and TMPDIR may be long
        forkserver.ensure_running()
        _started = True


def left_behind() -> tuple[str, ...]:
    """Folders that stay if this process is killed: its socket's, where it is no process of another program."""
    return (get_temp_dir(),) if _started and multiprocessing.parent_process() is None else ()


def start_method() -> str:
    """How `multiprocessing` starts ranks from this process."""
    return "forkserver" if _started else "spawn"
