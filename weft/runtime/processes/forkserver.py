"""Fork server of a command: the process from which local ranks are forked, after it has imported what they need."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import forkserver, process, resource_tracker
from pathlib import Path

from weft.runtime.memory.heap import heap_environment
from weft.runtime.processes.stop_request import blocked_signals
from weft.runtime.processes.temporary_folder import use_process_folder

LAUNCHER = "WEFT_LAUNCHER"
"""Environment variable with the process id and the temporary folder of the launcher. The fork server removes the
folder when the launcher has ended.
"""
REMOVAL_SECONDS = 5.0
"""Time limit for the removal of the launcher's temporary folder."""
PARENT_DEATH_SIGNAL = 1
"""Option PR_SET_PDEATHSIG of Linux's prctl: send a signal when the parent process ends."""

_started = False
_launchers_folder = ""


def serve_launcher() -> int:
    """Return the process id of the launcher, and put temporary files into its folder. Called in its child process."""
    global _launchers_folder
    launcher, _launchers_folder = os.environ.pop(LAUNCHER).split(":", 1)
    tempfile.tempdir = _launchers_folder
    return int(launcher)


def launchers_folder() -> Path | None:
    """Return the temporary folder of the launcher; None if this process is no child of a launcher."""
    return Path(_launchers_folder) if _launchers_folder else None


def signal_at_end_of(launcher: int, number: signal.Signals) -> None:
    """Let Linux send this process a signal when its launcher ends.

    Args:
        launcher: Process id of the launcher, which is the parent of this process.
        number: The signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, number)
    if os.getppid() != launcher:  # it ended before
        signal.raise_signal(number)


def start_forkserver() -> None:
    """Start the fork server without waiting for it. It imports packages in the background, and ends with this process.

    For commands only, whose environment does not change later: ranks get the environment of this call.
    """
    global _started
    multiprocessing.set_forkserver_preload(["weft.runtime.processes.preload", "weft.training.launch.rank_imports"])
    folder = use_process_folder()
    process.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]  # else it makes another
    os.environ |= heap_environment() | {LAUNCHER: f"{os.getpid()}:{folder}"}
    resource_tracker.ensure_running()  # first, since starting it would unblock the signals that are blocked below
    with blocked_signals(), suppress(OSError):  # if TMPDIR is too long for a socket's path (107 characters)
        forkserver.ensure_running()  # it unblocks the signals after importing weft.runtime.processes.preload
        _started = True
    del os.environ[LAUNCHER]


def remove_launchers_folder() -> None:
    """Remove the launcher's temporary folder. Called in the fork server when the launcher has ended.

    A rank that has not ended yet may write into the folder in the meantime, which then cannot be removed at once.
    """
    deadline = time.monotonic() + REMOVAL_SECONDS
    while _launchers_folder and os.path.exists(_launchers_folder) and time.monotonic() < deadline:
        shutil.rmtree(_launchers_folder, ignore_errors=True)
        time.sleep(0.01)


def start_method() -> str:
    """Return the start method of `multiprocessing` for ranks of this process."""
    return "forkserver" if _started else "spawn"
