"""Set-up of the fork server: it must not outlive the launcher, whatever happens.

Only the fork server imports this module, and before the packages whose import takes seconds.
"""

import atexit
import os
import signal

from weft.runtime.memory.heap import warn_without_heap
from weft.runtime.processes.forkserver import remove_launchers_folder, serve_launcher, signal_at_end_of
from weft.runtime.processes.stop_request import SIGNALS
from weft.utils.log import LOGGER

_server, _launcher = os.getpid(), serve_launcher()


def _end_without_launcher(*_: object) -> None:
    """End the fork server if the launcher has ended, even in the middle of an import.

    If the launcher is alive, a signal is meant for the ranks, and the launcher reports their end.
    """
    if os.getpid() == _server and os.getppid() != _launcher:
        remove_launchers_folder()
        os._exit(0)


atexit.register(remove_launchers_folder)
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # ranks inherit this
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
signal.signal(signal.SIGTERM, _end_without_launcher)
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see start_forkserver
signal_at_end_of(_launcher, signal.SIGTERM)
LOGGER.propagate = False  # as in the command
warn_without_heap()
