"""The process that a command's local ranks are forked from, once it has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import get_temp_dir

from weft.runtime.stop_request import blocked_signals

LAUNCHER = "WEFT_LAUNCHER"
"""The environment's name of this process's id and temporary folder, which the other removes when this one is gone."""

_started = False
_launchers_folder = ""


def serve_launcher() -> int:
    """The id of the process that started this one; from now on this one knows that one's temporary folder."""
    global _launchers_folder
    launcher, _launchers_folder = os.environ.pop(LAUNCHER).split(":", 1)
    return int(launcher)


def start_forkserver() -> None:
    """Starts it without waiting for it, so that it imports while this process does other things, and ends with it.

    For commands, whose environment does not change: ranks have that of this call.
    """
    global _started
    multiprocessing.set_forkserver_preload(["weft.runtime.preload", "weft.training.launch.rank_imports"])
    os.environ[LAUNCHER] = f"{os.getpid()}:{get_temp_dir()}"
    resource_tracker.ensure_running()  # before signals are blocked, since it would unblock them
    with blocked_signals(), suppress(OSError):  # a socket's path has at most 107 letters, and TMPDIR may be long
        forkserver.ensure_running()  # which hears signals when it has imported weft.runtime.preload
        _started = True
    del os.environ[LAUNCHER]


def remove_launchers_folder() -> None:
    """Where the launcher is gone: what it has left, in a process that was forked from the one that it started."""
    if _launchers_folder:
        shutil.rmtree(_launchers_folder, ignore_errors=True)


def temporary_folder() -> str | None:
    """A folder that goes with this process even if it is killed, for what is temporary; None: there is no such."""
    return get_temp_dir() if _started else None


def start_method() -> str:
    """How `multiprocessing` starts ranks from this process."""
    return "forkserver" if _started else "spawn"
