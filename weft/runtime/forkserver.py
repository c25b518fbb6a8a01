"""Fork server of a command: the process from which local ranks are forked, after it has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import get_temp_dir

from weft.runtime.stop_request import blocked_signals

LAUNCHER = "WEFT_LAUNCHER"
"""Environment variable with the process id and the temporary folder of the launcher. The fork server removes the
folder when the launcher has ended.
"""

_started = False
_launchers_folder = ""


def serve_launcher() -> int:
    """Return the process id of the launcher, and remember its temporary folder. Called in the fork server."""
    global _launchers_folder
    launcher, _launchers_folder = os.environ.pop(LAUNCHER).split(":", 1)
    return int(launcher)


def start_forkserver() -> None:
    """Start the fork server without waiting for it. It imports packages in the background, and ends with this process.

    For commands only, whose environment does not change later: ranks get the environment of this call.
    """
    global _started
    multiprocessing.set_forkserver_preload(["weft.runtime.preload", "weft.training.launch.rank_imports"])
    os.environ[LAUNCHER] = f"{os.getpid()}:{get_temp_dir()}"
    resource_tracker.ensure_running()  # first, since starting it would unblock the signals that are blocked below
    with blocked_signals(), suppress(OSError):  # if TMPDIR is too long for a socket's path (107 characters)
        forkserver.ensure_running()  # it unblocks the signals after importing weft.runtime.preload
        _started = True
    del os.environ[LAUNCHER]


def remove_launchers_folder() -> None:
    """Remove the launcher's temporary folder. Called in the fork server when the launcher has ended."""
    if _launchers_folder:
        shutil.rmtree(_launchers_folder, ignore_errors=True)


def temporary_folder() -> str | None:
    """Return a folder that is removed even if this process is killed, or None without a fork server."""
    return get_temp_dir() if _started else None


def start_method() -> str:
    """Return the start method of `multiprocessing` for ranks of this process."""
    return "forkserver" if _started else "spawn"
