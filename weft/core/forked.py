"""What the process that ranks are forked from does first: it sees to it that nothing of a run outlives the launcher.

Imported by that process, and by nothing else, before the imports that take seconds.
"""

import atexit
import ctypes
import os
import shutil
import signal
import sys

from weft.core.forkserver import LAUNCHER

PARENT_DEATH_SIGNAL = 1
"""prctl's PR_SET_PDEATHSIG, of Linux."""

_server = os.getpid()
_launcher, _folder = os.environ.pop(LAUNCHER).split(":", 1)


def _end_without_launcher(*_: object) -> None:
    """Ends the process in whatever it imports; with a launcher a signal is for the ranks, whose end that reports."""
    if os.getpid() == _server and os.getppid() != int(_launcher):
        _remove_folder()
        os._exit(0)


def _remove_folder() -> None:
    shutil.rmtree(_folder, ignore_errors=True)


atexit.register(_remove_folder)
for one in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(one, _end_without_launcher)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
_end_without_launcher()  # gone before
