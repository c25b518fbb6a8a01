"""Local ranks: who can connect to them, how they report errors, and that they end with their launcher."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.lib.cases import EXACT
from tests.lib.running import (
    LOOPBACK,
    children,
    finish,
    keep_files_in,
    listeners,
    listening,
    members,
    ranks,
    start,
    wait_for_epoch,
)
from weft.comm import join
from weft.runtime.meter import Meter
from weft.runtime.processes import forkserver
from weft.runtime.processes.cores import rank_cores
from weft.training.launch.payload import Received
from weft.training.launch.processes import Meeting, _is_gone, _run_rank, launch
from weft.utils.errors import InputError, RunError


def fail(what: str, meeting: Meeting) -> None:
    """Fail on rank 1 in the named way, while rank 0 waits."""
    del meeting
    if os.environ["RANK"] == "0":
        time.sleep(100)
    if what == "code":
        sys.exit(3)
    if what == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    raise (ValueError if what == "unforeseen" else InputError)(what)


def write_cores(meeting: Meeting) -> None:
    """Write the cores and the network interfaces of a rank to files."""
    group = join(timeout_seconds=100, meter=Meter(), init_method=meeting.init_method)
    (meeting.folder / f"cores {group.rank}").write_text(str(sorted(os.sched_getaffinity(0))))
    interfaces = [os.environ[f"{backend}_SOCKET_IFNAME"] for backend in ("GLOO", "NCCL")]
    (meeting.folder / f"interfaces {group.rank}").write_text(" ".join(interfaces))
    group.all_gather_object({})  # a rank that ends before others have connected would be reported as lost
    group.close()


def test_ranks_keep_to_their_cores_and_to_loopback(tmp_path: Path) -> None:
    assert launch(write_cores, (), workers=2, folder=tmp_path) == 0
    for rank in range(2):
        assert (tmp_path / f"cores {rank}").read_text() == str(sorted(rank_cores(rank, 2)))
        assert (tmp_path / f"interfaces {rank}").read_text() == "lo lo"


def test_a_run_of_one_process_listens_to_nobody(tmp_path: Path) -> None:
    before, opened = listeners([os.getpid()]), set()

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        opened.update(listeners([os.getpid()]) - before)
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    weft.train("digits", loss=loss, epochs=1, out=tmp_path / "run", quiet=True)
    assert not opened


@pytest.mark.parametrize(
    ("what", "kind", "error"),
    [
        ("code", RunError, r"rank 1 \(pid \d+\) ended with exit code 3"),
        ("signal", RunError, r"rank 1 \(pid \d+\) was killed by SIGKILL"),
        ("mistake", InputError, "^mistake$"),
        ("unforeseen", RunError, r"rank 1 failed in .*: unexpected error \(unforeseen\)"),
        ("more than a pipe holds, " * 10_000, InputError, "^more than a pipe holds, "),
    ],
    ids=["code", "signal", "mistake", "unforeseen", "long"],
)
def test_a_rank_that_fails_is_named_and_ends_the_others(
    tmp_path: Path, what: str, kind: type[Exception], error: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(kind, match=error):
        launch(fail, (what,), workers=2, folder=tmp_path)
    assert time.monotonic() - begun < 60


@pytest.mark.slow
def test_ctrl_c_while_ranks_import_ends_them_silently(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are spawned, as from a notebook, whose stop button interrupts all processes."""
    monkeypatch.setattr("weft.training.launch.processes.start_method", forkserver.start_method)
    before, ended = set(children(os.getpid())), threading.Event()

    def press() -> None:
        while len([pid for pid in set(children(os.getpid())) - before if "spawn_main" in command_of(pid)]) < 2:
            if ended.wait(0.02):
                return
        if not ended.wait(0.5):  # during their imports, where Python would print a traceback
            os.kill(os.getpid(), signal.SIGINT)

    button = threading.Thread(target=press)
    button.start()
    try:
        assert launch(fail, ("code",), workers=2, folder=tmp_path) == signal.SIGINT
    finally:
        ended.set()
        button.join()
    assert capfd.readouterr().err == ""


def command_of(pid: int) -> str:
    """Return the command line of a process; '' if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


VALIDATE, SET = b"\x00" + struct.pack("<I", 0x3C85F7CE), b"\x01"
"""First bytes of a client of PyTorch's TCPStore, and of a request that sets a key."""


class Exploit:
    """Object that runs code in the process that unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_full_disk_is_named_before_ranks_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # like the error of a write, which has no file name

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match=f"^{re.escape(str(tmp_path))}: No space left on device: set TMPDIR to a folder"):
        launch(fail, ("nothing",), workers=2, folder=tmp_path)


def test_data_sent_to_a_port_run_no_code(tmp_path: Path) -> None:
    """Pickled data sent to the ports of a run are not unpickled.

    PyTorch's launcher unpickled values of its store, which was open to the network.
    """
    options = "train digits --strategy tensor --workers 2 --epochs 1000000 --out"
    process = start(*options.split(), tmp_path / "run")
    wait_for_epoch(process, tmp_path / "run", 2)
    payload = pickle.dumps(Exploit(tmp_path / "mark"))
    ports = {port for _, port in listeners(members(process.pid))}
    assert ports
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection, suppress(OSError):
            connection.sendall(payload)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection, suppress(OSError):
            connection.sendall(VALIDATE)
            for key in (b"torchelastic/role_info/0", b"torchelastic/agent/terminal_state/0"):
                connection.sendall(SET + b"".join(struct.pack("<Q", len(part)) + part for part in (key, payload)))
    time.sleep(1)
    os.kill(process.pid, signal.SIGTERM)
    code, errors = finish(process)
    assert not (tmp_path / "mark").exists()
    assert code in (1, 128 + signal.SIGTERM), errors
    assert "Traceback" not in errors
    pickle.loads(payload)
    assert (tmp_path / "mark").exists(), "the exploit does nothing"


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=() if name == "hybrid" else pytest.mark.slow) for name in ("single", *EXACT)]
)
def test_ranks_listen_to_nobody_else_and_end_with_their_launcher(tmp_path: Path, strategy: str, workers: int) -> None:
    if (strategy == "single" and workers > 1) or strategy == "broadcast":
        pytest.skip("not a run of the command line")
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # short enough for the address of a socket
    out = tmp_path / "run"
    run = ("train", "digits", "--strategy", strategy, "--workers", str(workers), "--epochs", "100000", "--out", out)
    process = start(*run, prepare=partial(keep_files_in, str(temporary)))
    wait_for_epoch(process, out, 2)
    pids = members(process.pid)
    assert len(ranks(process)) == (workers if workers > 1 else 0)
    assert listening(pids) <= LOOPBACK
    assert bool(listening(pids)) == (workers > 1)  # gloo listens, so that the check above checks something
    os.kill(process.pid, signal.SIGKILL)
    process.output()
    deadline = time.monotonic() + 10
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not members(process.pid), "ranks outlive their launcher"
    left = {path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")}  # PyTorch's cache
    assert not left
    shutil.rmtree(temporary)


def test_a_launcher_counts_as_gone_only_after_its_end() -> None:
    """Only then may others remove its folder: a launcher whose folder is gone already fails at its end."""
    process = subprocess.Popen(["sleep", "100"])
    assert not _is_gone(process.pid)
    process.kill()
    assert _is_gone(process.pid), "an ended process that was not waited for counts as running"
    process.wait()
    assert _is_gone(process.pid)


@pytest.mark.slow
def test_a_rank_that_fails_after_its_launcher_was_killed_prints_nothing(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The files that it needs are being removed, and nobody reads its error."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    arguments = (1, 2, writer, Meeting(tmp_path), fail, Received(pickle.dumps(("unforeseen",))))
    rank = multiprocessing.get_context("spawn").Process(target=_run_rank, args=arguments)
    rank.start()
    writer.close()
    reader.close()
    rank.join(60)
    assert (rank.exitcode, capfd.readouterr().err) == (1, "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_launcher_ended_while_imports_go_on_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Processes and files are removed although imports of the ranks never end; Ctrl-C interrupts all processes."""
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # short enough for the address of a socket
    slow = tmp_path / "torch" / "__init__.py"
    slow.parent.mkdir()
    slow.write_text(f"import os, time\nopen({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w')\ntime.sleep(100)\n")
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(tmp_path)}
    run = [sys.executable, "-m", "weft", "train", "digits", "--strategy", "tensor", "--workers", "2"]
    process = subprocess.Popen(
        run, env=environment, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while len([path for path in tmp_path.iterdir() if path.name.isdigit()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert any(temporary.iterdir())
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    assert process.communicate()[1] == ("weft: stopped by SIGINT\n" if number == signal.SIGINT else "")
    while (members(process.pid) or any(temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not members(process.pid)
    temporary.rmdir()
