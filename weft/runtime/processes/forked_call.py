"""Call of a function in a fork of this process, for C code that cannot be interrupted."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import IO, NoReturn

from weft.runtime.processes.stop_request import SIGNALS, blocked_signals
from weft.utils.error_line import killed_by
from weft.utils.errors import RunError


def call_in_fork(function: Callable[[], bytes], name: str, memory_remedy: str) -> bytes:
    """Call a function in a fork of this process, and return its result.

    A signal interrupts the wait for it, and the fork is killed. The fork has only one thread, so the function must not
    use those of PyTorch.

    Args:
        function: The function.
        name: What it is, for an error.
        memory_remedy: What to do if memory is exhausted.

    Raises:
        RunError: It failed, or was killed.
    """
    with tempfile.TemporaryFile() as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks of processes with threads
        child = 0
        try:
            with blocked_signals():  # one that arrives during the fork would also be handled in the child
                child = os.fork()
                if not child:
                    _run_and_exit(function, file)
            # The system may deliver a signal to another thread, which would not interrupt a wait in this one.
            while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                time.sleep(0.02)
        finally:
            if child:
                os.kill(child, signal.SIGKILL)  # without effect on a fork that has ended
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise RunError(f"{name} {f'was {killed_by(-code, memory_remedy)}' if code < 0 else 'failed'}")
        file.seek(0)
        return file.read()


def _run_and_exit(function: Callable[[], bytes], file: IO[bytes]) -> NoReturn:
    """Write a function's result to a file, and end this process, which signals may end as well."""
    code = 1
    try:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        file.write(function())
        file.flush()
        code = 0
    finally:
        os._exit(code)
