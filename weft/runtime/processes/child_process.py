"""Command that runs in a child process: with weft's allocator, and with a message if the kernel kills it.

For commands of one rank, and ranks of torchrun. The first process imports nothing large and only waits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weft.runtime.memory.heap import heap_environment, warn_without_heap
from weft.runtime.processes.forkserver import LAUNCHER, launchers_folder, serve_launcher, signal_at_end_of
from weft.runtime.processes.stop_request import SIGNALS
from weft.runtime.processes.temporary_folder import use_process_folder
from weft.utils.error_line import killed_by
from weft.utils.errors import RunError
from weft.utils.log import LOGGER

if TYPE_CHECKING:
    from weft.runtime.meter import Meter

STATUS, REMEDY = "status", "remedy"
"""Files in the launcher's folder: the current operation of the child, and what to do if it is killed."""
FROM_TERMINAL = 0x80
"""Origin SI_KERNEL of a signal (asm-generic/siginfo.h). For Ctrl-C, the child has received it as well."""


def run_in_child(memory_remedy: str) -> int | None:
    """Run the command of this process in a child process, to which signals are passed on.

    Args:
        memory_remedy: What to do if memory is exhausted.

    Returns:
        The exit code of the child. None in the child itself, or where no process can be started: this process then runs
        the command.

    Raises:
        RunError: A signal killed the child.
    """
    waited = {*SIGNALS, signal.SIGUSR1, signal.SIGCHLD}
    if LAUNCHER in os.environ:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
        signal_at_end_of(serve_launcher(), signal.SIGKILL)
        warn_without_heap()
        return None
    folder = use_process_folder()
    environment = os.environ | heap_environment() | {LAUNCHER: f"{os.getpid()}:{folder}"}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)  # the child unblocks them when it has handlers
    try:
        child = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        LOGGER.warning(f"no process can be started ({error.strerror}): the run stays in this process")
        return None
    while child.poll() is None:
        received = signal.sigwaitinfo(waited)
        if received.si_signo != signal.SIGCHLD and received.si_code != FROM_TERMINAL:
            child.send_signal(received.si_signo)
    if child.returncode >= 0:
        return child.returncode
    rank, end = os.environ.get("RANK", "0"), killed_by(-child.returncode, memory_remedy)
    raise RunError(f"rank {rank} (pid {child.pid}) was {end} in {_last_words(folder)}")


def _last_words(folder: Path) -> str:
    """Return the last operation of a child that was killed, and what to do."""
    from weft.runtime.meter import read_status

    status, remedy = folder / STATUS, folder / REMEDY
    operation = read_status(status, 0) if status.exists() else "starting"
    return f"{operation}; {remedy.read_text() if remedy.exists() else 'repeat the command'}"


def report_status(meter: Meter, remedy: str) -> None:
    """Let the launcher of this process know what this process does, for its message if this process is killed.

    Does nothing without a launcher.

    Args:
        meter: The meter, which knows the current operation.
        remedy: What to do if this process is killed.
    """
    from weft.runtime.meter import STATUS_BYTES

    if folder := launchers_folder():
        (folder / REMEDY).write_text(remedy)
        (folder / STATUS).write_bytes(bytes(STATUS_BYTES))
        meter.write_status_to(folder / STATUS, 0)
        meter.set_status(meter.activity)
