"""What the process that ranks are forked from does first: it sees to it that nothing of a run outlives the launcher.

Imported by that process, and by nothing else, before the imports that take seconds.
"""

import atexit
import ctypes
import os
import signal
import sys

from weft.runtime.forkserver import remove_launchers_folder, serve_launcher
from weft.runtime.stop_request import SIGNALS

PARENT_DEATH_SIGNAL = 1
"""prctl's PR_SET_PDEATHSIG, of Linux."""

_server, _launcher = os.getpid(), serve_launcher()


def _end_without_launcher(*_: object) -> None:
    """Ends the process in whatever it imports; with a launcher a signal is for the ranks, whose end that reports."""
    if os.getpid() == _server and os.getppid() != _launcher:
        remove_launchers_folder()
        os._exit(0)


atexit.register(remove_launchers_folder)
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # in ranks as well
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's to answer
signal.signal(signal.SIGTERM, _end_without_launcher)
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see start_forkserver
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
_end_without_launcher()  # gone before
