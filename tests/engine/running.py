"""How tests of runs start them: on the ranks that the session keeps, or as commands in processes of their own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import weft
from tests.ranks import on_ranks
from weft.cli import main
from weft.comm import Group
from weft.core import record

WEFT = [sys.executable, "-m", "weft"]


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


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """A command in a session of its own, so that a signal reaches all of it and nothing else."""
    command = [*WEFT, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str], seconds: float = 100) -> tuple[int, str]:
    """Exit code and standard error, once nothing of the process's session is left."""
    _, errors = process.communicate(timeout=seconds)
    deadline = time.monotonic() + 10
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not members(process.pid), "orphans"
    return process.returncode, errors


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _fields(int(entry.name))
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def _fields(pid: int) -> list[str]:
    """State, parent, group, session and more of a process; of one that is gone as of a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", "0", "0", "0"]


def ranks(process: subprocess.Popen[str]) -> list[int]:
    """Pids of the launcher's ranks, which are forked from a process that has imported what they need."""
    parents = {pid: int(_fields(pid)[1]) for pid in members(process.pid)}
    servers = [pid for pid in parents if parents[pid] == process.pid and _is_forkserver(pid)]
    return sorted(pid for pid, parent in parents.items() if parent in servers)


def _is_forkserver(pid: int) -> bool:
    return b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()


def wait_for_epoch(process: subprocess.Popen[str], folder: Path, epoch: int) -> None:
    """Until a run that is going has recorded an epoch; one that does not start is ended."""
    deadline = time.monotonic() + 100
    while not any(line.get("epoch", -1) >= epoch for line in record.read(folder / "metrics.jsonl")):
        if time.monotonic() > deadline or process.poll() is not None:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"the run does not start: {finish(process)[1]}")
        time.sleep(0.05)


def losses(folder: Path) -> list[float]:
    lines = record.read(folder / "metrics.jsonl")
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["epoch"] for line in epochs] == list(range(len(epochs)))
    return [line["loss"] for line in epochs]


def summary(folder: Path) -> dict[str, Any]:
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "summary"
    return dict(last)
