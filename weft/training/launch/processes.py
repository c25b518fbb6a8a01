"""How local ranks start and end: processes of this one, which meet by a file. How they work is elsewhere."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import sys
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

from weft.runtime.forkserver import remove_launchers_folder, start_method
from weft.runtime.meter import STATUS_BYTES, read_status
from weft.runtime.stop_request import SIGNALS, blocked_signals, handle_signals
from weft.training.launch.payload import Received, Sent
from weft.utils.errors import InputError, RunError
from weft.utils.explain import explained

RANK = "weft rank"
"""What local ranks are called."""
STOPPED = 128
GRACE_SECONDS = 2.0
"""How long ranks may go on when one has failed; a rank that hangs does not hear of it otherwise."""
UNGUARDED = 99
"""The exit code of a rank whose script trains when the rank imports it."""
UNKNOWN = 255
"""What `multiprocessing` says of a rank when the process that it was forked from, which would tell, is gone."""
NO_GUARD = (
    '{} trains when it is imported, which local ranks do: put what it does under `if __name__ == "__main__":`, and '
    "leave functions and classes above"
)
SERVER_KILLED = "the process that ranks are forked from was killed in {}; they were stopped"
NO_ROOM = "{}: {}: name a folder with room in TMPDIR"
ENDING_SECONDS = 1.0
"""What a launcher takes at most to end when it has let go of its ranks; one that goes on removes its files itself."""
AGAIN_SECONDS = 1.0
"""How often ranks are told to stop until they have."""


class Meeting(NamedTuple):
    """What ranks of one launch share: files in folders that nobody else may open."""

    folder: Path

    @property
    def status(self) -> Path:
        """Where each rank shows what it does, see `weft.runtime.meter`."""
        return self.folder / "status"

    @property
    def init_method(self) -> str:
        """How their process group finds together."""
        return f"file://{self.folder / 'store'}"


def launch(entry: Callable[..., None], arguments: tuple[Any, ...], *, workers: int, folder: Path) -> int:
    """Runs `entry(*arguments, meeting)` on `workers` local ranks; the signal that they were told to stop by, or 0.

    folder: for what they share, which only this user may open; the ranks remove it if this process is killed.
    A rank that stops as it was told exits with STOPPED + the signal. SIGNALS are passed on to the ranks; the
    second ends them at once. One that fails or is killed stops the others; RunError then names it and what it was
    doing, InputError if the caller's mistake made it fail. Ranks end when this process is gone.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and sys.modules["__main__"].__spec__ is None and not Path(script).exists():
        raise InputError(f"local ranks import the script, and {script} is no file: save the script as one")
    meeting = Meeting(folder)
    try:
        meeting.status.write_bytes(bytes(workers * STATUS_BYTES))
    except OSError as error:
        raise RunError(NO_ROOM.format(folder, error.strerror)) from error
    with Ranks(entry, arguments, meeting, workers) as ranks:
        return ranks.wait()


def require_guard() -> None:
    """InputError in a process of `multiprocessing` that still imports its script; a rank's launcher says it instead."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # as multiprocessing asks it, before it refuses to start another
        if process.name == RANK:
            os._exit(UNGUARDED)
        raise InputError(NO_GUARD.format("the script"))


class Ranks:
    """The processes of a launch; while entered, they hear the signals that this process is told."""

    def __init__(self, entry: Callable[..., None], arguments: tuple[Any, ...], meeting: Meeting, workers: int) -> None:
        context: Any = multiprocessing.get_context(start_method())  # of two types without a common one
        pipes = [context.Pipe(duplex=False) for _ in range(workers)]
        self._meeting = meeting
        self._reports = [ours for ours, _ in pipes]
        self._theirs = [theirs for _, theirs in pipes]
        self._processes: list[BaseProcess] = [
            context.Process(name=RANK, target=_run_rank, args=(rank, workers, theirs, meeting, entry, Sent(arguments)))
            for rank, theirs in enumerate(self._theirs)
        ]
        self._said: dict[int, dict[str, str]] = {}
        self._before: dict[signal.Signals, Any] = {}
        self._told = 0

    def __enter__(self) -> Ranks:
        if threading.current_thread() is threading.main_thread():
            self._before = handle_signals(self._pass_on)
        try:
            resource_tracker.ensure_running()  # which unblocks signals when it starts
            for process, theirs in zip(self._processes, self._theirs, strict=True):
                with blocked_signals():  # what a rank imports first would answer Ctrl-C with a traceback
                    process.start()
                theirs.close()
                if self._told:
                    break
        except BaseException as error:
            self.__exit__()
            if isinstance(error, EOFError | ConnectionError):
                raise RunError(SERVER_KILLED.format("the start of ranks")) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self) -> int:
        """Until all have ended, or one has failed."""
        running, stopped = dict(enumerate(self._started())), 0
        while running:
            waited_for = [one for rank in running for one in (running[rank].sentinel, self._reports[rank])]
            ready = wait(waited_for, AGAIN_SECONDS)
            if self._told:
                self._tell(self._told)  # again: one that was just starting may have missed it
            for rank in running:
                if self._reports[rank] in ready:  # at once: what is said may be more than a pipe holds
                    self._hear(rank)
            ended = {rank: _exit_code(one) for rank, one in running.items() if one.sentinel in ready}
            for rank in sorted(ended, key=lambda rank: ended[rank]):  # killed ones first: others lost them
                running.pop(rank)
                if ended[rank] - STOPPED in SIGNALS:
                    stopped = ended[rank] - STOPPED
                elif ended[rank] and self._told:  # it was told before it listened, and others may wait for it
                    return self._told
                elif ended[rank]:
                    raise self._explained(rank, ended[rank])
        return self._told or stopped

    def _started(self) -> Sequence[BaseProcess]:
        return [process for process in self._processes if process.pid is not None]

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        again, self._told = bool(self._told), number
        self._tell(signal.SIGKILL if again else self._told)

    def _tell(self, number: int) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number  # ranks do not hear of terminals
        for process in self._started():
            if process.is_alive():
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid or 0, number)

    def _end(self) -> None:
        """Ends those that still run."""
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

    def _hear(self, rank: int) -> None:
        """Keeps what a rank tells of its error; nothing if it ended without a word."""
        with suppress(EOFError, OSError):
            if self._reports[rank].poll():
                self._said[rank] = json.loads(self._reports[rank].recv_bytes())

    def _explained(self, rank: int, code: int) -> InputError | RunError:
        where = read_status(self._meeting.status, rank)
        pid = self._processes[rank].pid
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return RunError(f"rank {rank} (pid {pid}) was killed by {name}{hint} in {where}; the others were stopped")
        if code == UNGUARDED:
            return InputError(NO_GUARD.format(getattr(sys.modules["__main__"], "__file__", "the script")))
        if code == UNKNOWN:
            return RunError(SERVER_KILLED.format(where))
        self._hear(rank)
        report = self._said.get(rank)
        if report is None:
            return RunError(f"rank {rank} (pid {pid}) ended with exit code {code} in {where}")
        for kind in (InputError, RunError):
            if report["kind"] == kind.__name__:
                return kind(report["message"])
        return RunError(f"rank {rank} failed in {where}: {report['message']}")


def _exit_code(process: BaseProcess) -> int:
    """That of a process whose end has been seen, which the system may tell a moment later."""
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
    """`entry` on a rank, which tells the launcher of its error, and ends with it."""
    for number in (signal.SIGTERM, signal.SIGINT):  # ignored where a rank is forked from; until the run listens
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    faulthandler.register(signal.SIGUSR1, file=os.dup(sys.stderr.fileno()))  # also while gloo's lines are left out
    threading.Thread(target=_end_with_parent, args=(meeting,), daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_WORLD_SIZE=str(workers))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # ranks of one host listen to nobody else
    try:
        entry(*arguments.open(), meeting)
    except Exception as error:
        said = str(error) if isinstance(error, InputError | RunError) else explained(error)
        report.send_bytes(json.dumps({"kind": type(error).__name__, "message": said}).encode())
        sys.stderr.flush()
        os._exit(1)  # at once: gloo would wait for the peer that is lost


def _end_with_parent(meeting: Meeting) -> None:
    """Ends this rank at once when the launcher has let go of it; where that is gone, with what it has left."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    if _is_gone(parent.pid or 0):
        shutil.rmtree(meeting.folder, ignore_errors=True)
        remove_launchers_folder()
    os.kill(os.getpid(), signal.SIGKILL)


def _is_gone(pid: int) -> bool:
    """Whether a process has ended, or does in a moment: its files are closed before it ends."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        return True
    try:
        return bool(wait([os.pidfd_open(pid)], ENDING_SECONDS))
    except ProcessLookupError:
        return True
