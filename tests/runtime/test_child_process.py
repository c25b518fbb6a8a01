"""A command of one rank runs in a child process: signals, exit codes, and the message if the kernel kills it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from weft.runtime.memory.heap import PRELOAD
from weft.runtime.processes import child_process
from weft.runtime.processes.child_process import run_in_child

COMMAND = """
import os, signal, sys, tempfile, time
from weft.runtime.processes.child_process import REMEDY, STATUS, run_in_child
from weft.runtime.processes.forkserver import launchers_folder
from weft.runtime.processes.stop_request import SIGNALS
from weft.utils.errors import RunError
try:
    code = run_in_child("use less")
except RunError as error:
    sys.exit(str(error))
if code is not None:
    sys.exit(code)
assert launchers_folder() == __import__("pathlib").Path(tempfile.gettempdir())
print(os.getpid(), "LD_PRELOAD" in os.environ, flush=True)
"""


def start(body: str, folder: Path) -> subprocess.Popen[str]:
    """Start a command whose child runs `body`."""
    environment = {name: value for name, value in os.environ.items() if name != PRELOAD} | {"TMPDIR": str(folder)}
    words = [sys.executable, "-c", COMMAND + body]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_child_has_the_heap_and_its_exit_code_is_that_of_the_command(tmp_path: Path) -> None:
    with start("open(tempfile.mkstemp()[1], 'w').write('left behind'); sys.exit(3)", tmp_path) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (3, "")
    pid, has_heap = out.split()
    assert (int(pid) != process.pid, has_heap) == (True, "True")
    assert not list(tmp_path.iterdir())


def test_a_child_that_the_kernel_kills_is_reported(tmp_path: Path) -> None:
    body = """
(launchers_folder() / STATUS).write_bytes(b"epoch 3, training".ljust(128, bytes(1)))
(launchers_folder() / REMEDY).write_text("continue with --resume --out runs/a")
os.kill(os.getpid(), signal.SIGKILL)
"""
    with start(body, tmp_path) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was killed by SIGKILL (out of memory? use less) in epoch 3, training; " in err
    assert err.endswith("; continue with --resume --out runs/a\n")
    assert not list(tmp_path.iterdir())


def test_signals_reach_the_child(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
print("ready", flush=True)
time.sleep(60)
"""
    with start(body, tmp_path) as process:
        assert process.stdout
        process.stdout.readline()
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(30) == 143


def test_the_child_ends_with_its_launcher(tmp_path: Path) -> None:
    with start("time.sleep(60)", tmp_path) as process:
        assert process.stdout
        child = int(process.stdout.readline().split()[0])
        handle = os.pidfd_open(child)
        process.kill()
        process.wait(30)
        os.set_blocking(handle, False)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not has_ended(child):
            time.sleep(0.05)
        assert has_ended(child)
        os.close(handle)


def has_ended(pid: int) -> bool:
    """Return True if a process is gone, or only waits for its parent to read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_without_a_child_the_run_stays_in_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(child_process.subprocess, "Popen", refuse)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert run_in_child("") is None
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert "warning: no process can be started" in capsys.readouterr().err
