"""Start runs in tests: on the session's persistent ranks, or as commands in new processes."""

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
from weft.cli import main as cli
from weft.cli.main import main
from weft.comm import Group
from weft.utils.files import jsonl

LISTEN = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""Loopback addresses, as the kernel writes them in /proc/net."""


@dataclass(frozen=True, kw_only=True)
class CommandOutput:
    """Result of a function on rank 0, and what it printed."""

    result: Any
    out: str
    err: str


def train(graph: str | Path, model: str = "gcn", *, workers: int = 1, **options: Any) -> weft.Run:
    """Run `weft.train` on the session's persistent ranks, as under torchrun."""
    if workers == 1:
        return weft.train(graph, model, **options)
    run: weft.Run = run_on_ranks(workers, weft.train, graph, model, **options).result
    return run


def command(*arguments: str | Path, workers: int) -> CommandOutput:
    """Run `weft ARGUMENTS` on the session's persistent ranks; the result is its exit code."""
    return run_on_ranks(workers, main, [str(argument) for argument in arguments])


def run_on_ranks(size: int, function: Any, /, *arguments: Any, **options: Any) -> CommandOutput:
    """Run `function(*arguments, **options)` on the session's persistent ranks and return the output of rank 0."""
    output: CommandOutput = on_ranks(size, say, function, arguments, options)[0]
    return output


def say(group: Group, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> CommandOutput:
    """Call a function and capture its output; runs on each rank for `run_on_ranks`."""
    del group
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        result = function(*arguments, **options)
    return CommandOutput(result=result, out=out.getvalue(), err=err.getvalue())


class Command:
    """A running command in a new process session, so that a signal reaches all of its processes and no others.

    The command behaves as if a user had started it, but needs no time for imports: its process, and the one that its
    ranks are forked from, are forked from a process with all modules imported.
    """

    def __init__(self, arguments: Sequence[str], prepare: Callable[[], None] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._outputs = [self._folder / name for name in ("out", "err")]
        process_arguments = (arguments, dict(os.environ), self._outputs, prepare)
        self._process = forked().Process(target=_run_command, args=process_arguments)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended the command; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def output(self, seconds: float = 100) -> tuple[str, str]:
        """Wait until the command ends and return what it wrote to standard output and standard error."""
        self._process.join(seconds)
        assert self.returncode is not None, "the command does not end"
        out, errors = (path.read_text() for path in self._outputs)
        shutil.rmtree(self._folder)
        return out, errors


def _run_command(
    arguments: Sequence[str], environment: dict[str, str], outputs: list[Path], prepare: Callable[[], None] | None
) -> None:
    os.setsid()
    atexit._clear()
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update({"LD_PRELOAD": ""} | environment)  # without the heap, which only a new process can have
    tempfile.tempdir = None
    process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]  # as if it had not been forked
    process._parent_process = None  # type: ignore[attr-defined]
    server = forkserver._forkserver  # type: ignore[attr-defined]  # the command starts its own, forked as well
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    exec_python = util.spawnv_passfds
    util.spawnv_passfds = lambda path, arguments, descriptors: (  # type: ignore[attr-defined]
        _fork_server(arguments[-1], descriptors)
        if "forkserver" in arguments[-1]
        else exec_python(path, arguments, descriptors)
    )
    sys.argv = ["weft", *arguments]
    cli.run_in_child = lambda _: None  # a child would have to import the modules
    if prepare is not None:
        prepare()
    try:
        sys.exit(main())
    finally:  # which multiprocessing does not call
        atexit._run_exitfuncs()


def _fork_server(code: str, descriptors: Sequence[int]) -> int:
    """Fork the process that ranks are forked from, instead of starting a new Python."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # one in os.fork leaves locks acquired
    pid = os.fork()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if not pid:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        atexit._clear()
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in descriptors:
                with contextlib.suppress(OSError):
                    os.close(number)
        try:
            exec(code, {})
        finally:
            atexit._run_exitfuncs()
            os._exit(0)
    return pid


def handled(pid: int) -> set[int]:
    """Return the signals that a process has a handler for."""
    mask = int(Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def start(*arguments: str | Path, prepare: Callable[[], None] | None = None) -> Command:
    """Start a command; prepare: function that its process calls first."""
    return Command([str(argument) for argument in arguments], prepare)


PROGRESS = ("epoch ", *(f"weft: {what} " for what in ("loading", "planning", "starting", "placing")))


def complaints(errors: str) -> list[str]:
    """Return the lines of standard error without progress lines, whose number depends on the machine's speed."""
    return [line for line in errors.splitlines() if not line.startswith(PROGRESS)]


def finish(process: Command, seconds: float = 100) -> tuple[int | None, str]:
    """Wait until all processes of a command have ended; return its exit code and standard error."""
    _, errors = process.output(seconds)
    deadline = time.monotonic() + 10
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not members(process.pid), "orphans"
    return process.returncode, errors


def members(session: int) -> list[int]:
    """Return the living processes of a session."""
    return _living(3, session)


def children(parent: int) -> list[int]:
    """Return the living processes that a process has started."""
    return _living(1, parent)


def _living(field: int, value: int) -> list[int]:
    """Return the living processes one of whose fields has a value."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _fields(int(entry.name))
        if int(fields[field]) == value and fields[0] != "Z":
            pids.append(int(entry.name))
    return pids


def _fields(pid: int) -> list[str]:
    """Return state, parent, group, session and more of a process; one that has ended looks like a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", "0", "0", "0"]


def ranks(process: Command) -> list[int]:
    """Return the ids of the launcher's ranks, which are forked from a process with all modules imported."""
    parents = {pid: int(_fields(pid)[1]) for pid in members(process.pid)}
    return sorted(pid for pid, parent in parents.items() if parents.get(parent) == process.pid)


def keep_files_in(folder: str) -> None:
    """Set TMPDIR; call it only in a command's process, since the folder may be removed before this process ends."""
    os.environ["TMPDIR"] = folder


def listening(pids: list[int]) -> set[str]:
    """Return the addresses on which processes listen, as the kernel writes them."""
    return {address for address, _ in listeners(pids)}


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """Return the addresses and ports on which processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    sockets = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == LISTEN or table.startswith("udp")):
                address, _, port = fields[1].partition(":")
                sockets.add((address, int(port, 16)))
    return sockets


def wait_for_epoch(process: Command, folder: Path, epoch: int) -> None:
    """Wait until a running command has recorded an epoch; end a run that does not start."""
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
