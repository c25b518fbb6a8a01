"""How tests of runs start them: on the ranks that the session keeps, or as commands in processes of their own."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, process, util
from pathlib import Path
from typing import Any

import weft
from tests.lib.ranks import forked, on_ranks
from weft.cli.main import main
from weft.comm import Group
from weft.utils import jsonl

LISTEN = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""The addresses of this machine to itself, as the kernel writes them."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What rank 0 wrote, and what came of it."""

    result: Any
    out: str
    err: str


def train(graph: str | Path, model: str = "gcn", *, workers: int = 1, **options: Any) -> weft.Run:
    """`weft.train` without processes of its own: on ranks that are there, as under torchrun."""
    if workers == 1:
        return weft.train(graph, model, **options)
    run: weft.Run = said_by_ranks(workers, weft.train, graph, model, **options).result
    return run


def command(*arguments: str | Path, workers: int) -> Said:
    """`weft ARGUMENTS` on ranks that are there; the result is its exit code."""
    return said_by_ranks(workers, main, [str(one) for one in arguments])


def said_by_ranks(size: int, function: Any, /, *arguments: Any, **options: Any) -> Said:
    """`function(*arguments, **options)` on ranks that are there."""
    said: Said = on_ranks(size, say, function, arguments, options)[0]
    return said


def say(group: Group, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Said:
    """What a rank does for `said_by_ranks`."""
    del group
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        result = function(*arguments, **options)
    return Said(result=result, out=out.getvalue(), err=err.getvalue())


class Command:
    """A command that goes on, in a session of its own, so that a signal reaches all of it and nothing else.

    It is what a person starts, but for the time that imports take: the process, and the one that its ranks are forked
    from, are forked with them.
    """

    def __init__(self, arguments: Sequence[str], prepare: Callable[[], None] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._outputs = [self._folder / name for name in ("out", "err")]
        given = (arguments, dict(os.environ), self._outputs, prepare)
        self._process = forked().Process(target=_run_command, args=given)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it goes on."""
        code: int | None = self._process.exitcode
        return code

    def said(self, seconds: float = 100) -> tuple[str, str]:
        """What it wrote, once it has ended."""
        self._process.join(seconds)
        assert self.returncode is not None, "the command does not end"
        out, errors = (path.read_text() for path in self._outputs)
        shutil.rmtree(self._folder)
        return out, errors


def _run_command(
    arguments: Sequence[str], environment: dict[str, str], outputs: list[Path], prepare: Callable[[], None] | None
) -> None:
    os.setsid()
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update({"LD_PRELOAD": ""} | environment)  # set, so that it does not start itself anew for it
    tempfile.tempdir = None
    process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]  # as if nobody had forked it
    process._parent_process = None  # type: ignore[attr-defined]
    server = forkserver._forkserver  # type: ignore[attr-defined]  # one of its own, forked as well
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    exec_python = util.spawnv_passfds
    util.spawnv_passfds = lambda path, given, kept: (  # type: ignore[attr-defined]
        _fork_server(given[-1], kept) if "forkserver" in given[-1] else exec_python(path, given, kept)
    )
    sys.argv = ["weft", *arguments]
    if prepare is not None:
        prepare()
    sys.exit(main())


def _fork_server(code: str, kept: Sequence[int]) -> int:
    """Starts the process that ranks are forked from, without a new Python."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # one in os.fork would leave locks held
    pid = os.fork()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if not pid:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        atexit._clear()
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in kept:
                with contextlib.suppress(OSError):
                    os.close(number)
        try:
            exec(code, {})
        finally:
            atexit._run_exitfuncs()
            os._exit(0)
    return pid


def handled(pid: int) -> set[int]:
    """The signals that a process has a handler for."""
    mask = int(Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def start(*arguments: str | Path, prepare: Callable[[], None] | None = None) -> Command:
    """A command that goes on; prepare: what its process is to do first."""
    return Command([str(one) for one in arguments], prepare)


PROGRESS = ("epoch ", *(f"weft: {what} " for what in ("loading", "planning", "starting", "placing")))


def complaints(errors: str) -> list[str]:
    """The lines of a command's standard error that are no progress, which a slow machine has more of."""
    return [line for line in errors.splitlines() if not line.startswith(PROGRESS)]


def finish(process: Command, seconds: float = 100) -> tuple[int | None, str]:
    """Exit code and standard error, once nothing of the process's session is left."""
    _, errors = process.said(seconds)
    deadline = time.monotonic() + 10
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not members(process.pid), "orphans"
    return process.returncode, errors


def members(session: int) -> list[int]:
    """Living processes of a session."""
    return _living(3, session)


def children(parent: int) -> list[int]:
    """Living processes that a process has started."""
    return _living(1, parent)


def _living(field: int, value: int) -> list[int]:
    """Living processes, by one of their fields."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _fields(int(entry.name))
        if int(fields[field]) == value and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def _fields(pid: int) -> list[str]:
    """State, parent, group, session and more of a process; of one that is gone as of a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", "0", "0", "0"]


def ranks(process: Command) -> list[int]:
    """Pids of the launcher's ranks, which are forked from a process that has imported what they need."""
    parents = {pid: int(_fields(pid)[1]) for pid in members(process.pid)}
    return sorted(pid for pid, parent in parents.items() if parents.get(parent) == process.pid)


def keep_files_in(folder: str) -> None:
    """In the command's process alone: here the name would stay when the folder is gone."""
    os.environ["TMPDIR"] = folder


def listening(pids: list[int]) -> set[str]:
    """The addresses on which some processes listen, as the kernel writes them."""
    return {address for address, _ in listeners(pids)}


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """The same with ports."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == LISTEN or table.startswith("udp")):
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def wait_for_epoch(process: Command, folder: Path, epoch: int) -> None:
    """Until a run that is going has recorded an epoch; one that does not start is ended."""
    deadline = time.monotonic() + 100
    while not any(line.get("epoch", -1) >= epoch for line in jsonl.read(folder / "metrics.jsonl")):
        if time.monotonic() > deadline or process.returncode is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"the run does not start: {finish(process)[1]}")
        time.sleep(0.05)


def losses(folder: Path) -> list[float]:
    lines = jsonl.read(folder / "metrics.jsonl")
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["epoch"] for line in epochs] == list(range(len(epochs)))
    return [line["loss"] for line in epochs]


def summary(folder: Path) -> dict[str, Any]:
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "summary"
    return dict(last)
