"""Processes of local ranks: how they start, connect through a file, receive signals, and end."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from weft.config.config import MEMORY_REMEDY
from weft.runtime.meter import STATUS_BYTES, read_status
from weft.runtime.processes.forkserver import remove_launchers_folder, start_method
from weft.runtime.processes.stop_request import SIGNALS, blocked_signals, handle_signals
from weft.training.launch.payload import Received, Sent
from weft.utils.error_line import explain_error, killed_by
from weft.utils.errors import InputError, RunError
from weft.utils.log import open_log_of_launcher
from weft.utils.standard_streams import STDERR, guard_standard_streams

RANK = "weft rank"
"""Name of the processes of local ranks."""
STOPPED = 128
"""Exit code of a rank that a signal stopped, minus the number of the signal."""
GRACE_SECONDS = 2.0
"""Time for ranks to end after one has failed, before they are killed. A rank may be waiting for the failed one."""
UNGUARDED = 99
"""Exit code of a rank whose script starts training when the rank imports it."""
UNKNOWN = 255
"""Exit code that `multiprocessing` reports if the fork server, which knows the exit codes of ranks, is gone."""
NO_GUARD = (
    '{} trains when it is imported, and local ranks import it: put that code under `if __name__ == "__main__":`, and '
    "leave functions and classes above"
)
"""Error for a script that trains when it is imported."""
SERVER_KILLED = "the process from which ranks are forked was killed in {}; the ranks were stopped"
"""Error for a fork server that was killed."""
NO_SPACE = "{}: {}: set TMPDIR to a folder with more free space"
"""Error for a folder of shared files that cannot be written."""
ENDING_SECONDS = 1.0
"""Longest time for the launcher to end after it has let go of its ranks. If it lives longer, it removes its files
itself."""
RETRY_SECONDS = 1.0
"""Interval in which a signal is sent to the ranks again until they have ended."""


class Meeting(NamedTuple):
    """Files through which the ranks of one launch connect, in a folder that only this user may open."""

    folder: Path
    """Folder of the files."""

    @property
    def status(self) -> Path:
        """File in which each rank shows its current operation, see `weft.runtime.meter`."""
        return self.folder / "status"

    @property
    def init_method(self) -> str:
        """URL with which torch.distributed connects the ranks."""
        return f"file://{self.folder / 'store'}"


def launch(entry: Callable[..., None], arguments: tuple[Any, ...], *, workers: int, folder: Path) -> int:
    """Run `entry(*arguments, meeting)` on local ranks, and wait until all have ended.

    Signals in SIGNALS are passed on to the ranks; a second signal kills them. A rank that stops after a signal exits
    with STOPPED + signal. If a rank fails or is killed, the others are stopped. Ranks end when this process is gone.

    Args:
        entry: Function that each rank calls.
        arguments: Its arguments, which are pickled.
        workers: Number of ranks.
        folder: Folder for the files that the ranks share, which only this user may open. The ranks remove it if this
            process is killed.

    Returns:
        The number of the signal that stopped the ranks, or 0.

    Raises:
        RunError: A rank was killed or failed. The message names it and its operation.
        InputError: A rank failed because of a mistake of the caller.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and sys.modules["__main__"].__spec__ is None and not Path(script).exists():
        raise InputError(f"local ranks import the script, but {script} is not a file: save the script to a file")
    meeting = Meeting(folder)
    try:
        meeting.status.write_bytes(bytes(workers * STATUS_BYTES))
    except OSError as error:
        raise RunError(NO_SPACE.format(folder, error.strerror)) from error
    with Ranks(entry, arguments, meeting, workers) as ranks:
        return ranks.wait()


def require_guard() -> None:
    """Refuse to train in a process of `multiprocessing` that is still importing its script.

    A local rank exits instead, so that its launcher reports the error.

    Raises:
        InputError: The script lacks `if __name__ == "__main__":`.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # the check by which multiprocessing refuses to start a process
        if process.name == RANK:
            os._exit(UNGUARDED)
        raise InputError(NO_GUARD.format("the script"))


class Ranks:
    """Processes of a launch. Within the with block, signals to this process are passed on to them.

    Args:
        entry: Function that each rank calls.
        arguments: Its arguments, without the meeting.
        meeting: Files through which the ranks connect.
        workers: Number of ranks.
    """

    def __init__(self, entry: Callable[..., None], arguments: tuple[Any, ...], meeting: Meeting, workers: int) -> None:
        # Typed Any, since the possible contexts have no common type.
        context: Any = multiprocessing.get_context(start_method())
        pipes = [context.Pipe(duplex=False) for _ in range(workers)]
        self._meeting = meeting
        self._reports = [our_end for our_end, _ in pipes]
        self._rank_ends = [rank_end for _, rank_end in pipes]
        self._processes: list[BaseProcess] = [
            context.Process(
                name=RANK, target=_run_rank, args=(rank, workers, rank_end, meeting, entry, Sent(arguments))
            )
            for rank, rank_end in enumerate(self._rank_ends)
        ]
        self._errors: dict[int, dict[str, str]] = {}
        self._former_handlers: dict[signal.Signals, Any] = {}
        self._stop_signal = 0

    def __enter__(self) -> Ranks:
        if threading.current_thread() is threading.main_thread():
            self._former_handlers = handle_signals(self._pass_on)
        try:
            resource_tracker.ensure_running()  # start it now, because its start unblocks signals
            for process, rank_end in zip(self._processes, self._rank_ends, strict=True):
                with blocked_signals():  # Ctrl-C during the first imports of a rank would print a traceback
                    process.start()
                rank_end.close()
                if self._stop_signal:
                    break
        except BaseException as error:
            self.__exit__()
            if isinstance(error, EOFError | ConnectionError):
                raise RunError(SERVER_KILLED.format("the start of ranks")) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._terminate()
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)

    def wait(self) -> int:
        """Wait until all ranks have ended.

        Returns:
            The number of the signal that stopped the ranks, or 0.

        Raises:
            InputError: A rank failed because of a mistake of the caller.
            RunError: A rank failed or was killed.
        """
        running, stopped = dict(enumerate(self._started())), 0
        while running:
            sources = [source for rank in running for source in (running[rank].sentinel, self._reports[rank])]
            ready = wait(sources, RETRY_SECONDS)
            if self._stop_signal:
                self._send(self._stop_signal)  # again: a rank that was starting may have missed it
            for rank in running:
                if self._reports[rank] in ready:  # at once: an error may be larger than the buffer of the pipe
                    self._read_error(rank)
            ended = {rank: _exit_code(process) for rank, process in running.items() if process.sentinel in ready}
            # Exit codes of killed ranks are negative: report these first, because the others failed as a result.
            for rank in sorted(ended, key=lambda rank: ended[rank]):
                running.pop(rank)
                if ended[rank] - STOPPED in SIGNALS:
                    stopped = ended[rank] - STOPPED
                elif ended[rank] and self._stop_signal:
                    # The signal came before the rank had set its handler, and other ranks may wait for this one.
                    return self._stop_signal
                elif ended[rank]:
                    raise self._error_of(rank, ended[rank])
        return self._stop_signal or stopped

    def _started(self) -> Sequence[BaseProcess]:
        """Return the processes that have been started."""
        return [process for process in self._processes if process.pid is not None]

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on to the ranks; from the second signal on, kill them."""
        again, self._stop_signal = bool(self._stop_signal), number
        self._send(signal.SIGKILL if again else self._stop_signal)

    def _send(self, number: int) -> None:
        """Send a signal to all ranks that live."""
        number = signal.SIGTERM if number == signal.SIGHUP else number  # ranks do not handle SIGHUP
        for process in self._started():
            if process.is_alive():
                with suppress(ProcessLookupError):  # it ended meanwhile
                    os.kill(process.pid or 0, number)

    def _terminate(self) -> None:
        """End the ranks that still live: terminate them, and kill them after GRACE_SECONDS."""
        for process in self._started():
            if process.is_alive():
                process.terminate()
            elif process.exitcode == UNKNOWN:
                with suppress(ProcessLookupError):
                    os.kill(process.pid or 0, signal.SIGKILL)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._started():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _read_error(self, rank: int) -> None:
        """Store the error that a rank has sent, if it has sent one."""
        with suppress(EOFError, OSError):
            if self._reports[rank].poll():
                self._errors[rank] = json.loads(self._reports[rank].recv_bytes())

    def _error_of(self, rank: int, code: int) -> InputError | RunError:
        """Return the error to raise for a rank that ended with an exit code other than 0."""
        operation = read_status(self._meeting.status, rank)
        pid = self._processes[rank].pid
        if code < 0:
            return RunError(
                f"rank {rank} (pid {pid}) was {killed_by(-code, MEMORY_REMEDY)} in {operation}; the others were stopped"
            )
        if code == UNGUARDED:
            return InputError(NO_GUARD.format(getattr(sys.modules["__main__"], "__file__", "the script")))
        if code == UNKNOWN:
            return RunError(SERVER_KILLED.format(operation))
        self._read_error(rank)
        report = self._errors.get(rank)
        if report is None:
            return RunError(f"rank {rank} (pid {pid}) ended with exit code {code} in {operation}")
        for kind in (InputError, RunError):
            if report["kind"] == kind.__name__:
                return kind(report["message"])
        return RunError(f"rank {rank} failed in {operation}: {report['message']}")


def _exit_code(process: BaseProcess) -> int:
    """Return the exit code of a process that has ended. The system may report it a moment later."""
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run_rank(
    rank: int,
    workers: int,
    report: Connection,
    meeting: Meeting,
    entry: Callable[..., None],
    arguments: Received,
) -> None:
    """Call `entry` in the process of a rank. If it fails, send the error to the launcher and exit."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the fork server ignores them; the run sets its handlers later
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # Stack traces go to a copy of stderr, because stderr is redirected while gloo prints.
    guard_standard_streams()
    faulthandler.register(signal.SIGUSR1, file=os.dup(STDERR))
    threading.Thread(target=_end_with_parent, args=(meeting,), daemon=True).start()
    tempfile.tempdir = str(meeting.folder)  # files that libraries leave behind are removed with it
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_WORLD_SIZE=str(workers))
    # Ranks of one host accept no connections from others. NCCL would listen on an interface of the network.
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    try:
        open_log_of_launcher()
        entry(*arguments.open(), meeting)
    except Exception as error:
        message = str(error) if isinstance(error, InputError | RunError) else explain_error(error, MEMORY_REMEDY)
        with suppress(BrokenPipeError):  # the launcher was killed, and its files are being removed
            report.send_bytes(json.dumps({"kind": type(error).__name__, "message": message}).encode())
        sys.stderr.flush()
        os._exit(1)  # without cleanup: gloo would wait for the lost peer


def _end_with_parent(meeting: Meeting) -> None:
    """End this rank at once when the launcher closes its pipe or ends. If the launcher is gone, remove its files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    if _is_gone(parent.pid or 0):
        shutil.rmtree(meeting.folder, ignore_errors=True)
        remove_launchers_folder()
    os.kill(os.getpid(), signal.SIGKILL)


def _is_gone(pid: int) -> bool:
    """Return True if a process has ended or ends in a moment. Its pipes are closed before it ends."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        return True
    try:
        return bool(wait([os.pidfd_open(pid)], ENDING_SECONDS))
    except ProcessLookupError:
        return True
