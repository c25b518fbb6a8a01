"""Shared by all attempts: folders, commands, reference runs, and checks that hold for every command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.campaign.settings import Placement, Setting
from tests.lib.graphs import make_typed_graph
from tests.lib.running import Command, members
from weft.training.artifacts.run_folder import UNBEGUN
from weft.utils.files.file_writing import is_draft

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 240.0
"""Time limit of a command: several times that of a slow one on a busy machine, and longer than `--timeout`."""
PATIENCE_SECONDS = 15.0
"""Time limit for processes and files of an ended command to disappear."""
TOLERANCE = 1e-9
NOT_OURS = ("torchinductor",)
"""Prefixes of names of temporary files that PyTorch leaves."""
MEASURED = ("seconds", "bytes", "stages", "durations")
"""Parts of the names of measured values, which may differ between two runs."""


class Broken(Exception):
    """A promise that did not hold, in one line."""


class Missed(Exception):
    """An attempt whose fault did not happen, with the reason."""


def check(holds: bool, message: str) -> None:
    """Raise Broken with a message unless a condition holds."""
    if not holds:
        raise Broken(message)


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    code: int
    """Exit code, or minus the signal that ended the command."""
    out: str
    """Text of standard output."""
    errors: str
    """Text of standard error."""
    seconds: float

    def error_lines(self) -> list[str]:
        """Return the lines that explain the end; raise Broken if standard error has others than these and progress."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        for line in lines:
            expected = line.startswith(("weft: ", "epoch ")) and "unexpected error" not in line
            check(expected, f"standard error has {self.last_of(line)}")
        return [line for line in lines if line.startswith(("weft: error:", "weft: stopped "))]

    def last_of(self, line: str) -> str:
        """Describe an unexpected line; for a traceback, add its last line."""
        end = self.errors.strip().splitlines()[-1]
        return f"{line!r}, and at its end {end[:200]!r}" if end != line else repr(line)

    def check_ended(self, *codes: int) -> list[str]:
        """Check the exit code and return the error lines: one if it is positive, otherwise none."""
        lines = self.error_lines()
        message = f"exit code {self.code}, not {' or '.join(map(str, sorted(codes)))}: {lines or 'no message'}"
        check(self.code in codes, message)
        number = 1 if self.code > 0 else 0
        check(len(lines) == number, f"exit code {self.code} with {len(lines)} lines of error: {lines}")
        return lines

    def check_refused(self) -> str:
        """Check that the command was refused, and return its error line."""
        (line,) = self.check_ended(2)
        return line


class Executed(Command):
    """A command in a new Python process, as a user starts it, including imports."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        with (self._folder / "out").open("wb") as out, (self._folder / "err").open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weft", *arguments],
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended the command; None while it runs."""
        code: int | None = self._process.poll()
        return code

    def output(self, seconds: float = 100) -> tuple[str, str]:
        """Wait until the command ends and return what it wrote to standard output and standard error."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError("the command does not end") from None
        out, errors = ((self._folder / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self._folder)
        return out, errors


class Scene:
    """Folders and commands of one attempt. At the end, unless it failed, nothing of its commands may be left."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.folder = Path(tempfile.mkdtemp(prefix="c-", dir="/tmp"))  # short enough for the address of a socket
        self.temporary, self.working_folder = self.folder / "t", self.folder / "here"
        for folder in (self.temporary, self.working_folder):
            folder.mkdir()
        self.notes: list[str] = []
        """Commands and faults of the attempt, in order."""
        self.faults = 0
        """Number of faults that have happened, if an attempt has several."""
        self._begun: dict[int, float] = {}
        self._started: list[Command] = []
        self._disks: list[Path] = []

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.check_nothing_left()
        finally:
            for process in self._started:
                for pid in members(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for disk in self._disks:
                subprocess.run(["umount", "--lazy", str(disk)], check=False)
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self,
        *arguments: object,
        prepare: Callable[[], None] | None = None,
        executed: bool = False,
        optimized: bool = False,
    ) -> Command:
        """Start a command in `working_folder`, with its own folder for temporary files, and wait until it runs.

        executed: start a new Python, instead of forking a process with all modules imported.
        optimized: start a new Python that leaves out asserts.
        """
        words = [str(argument) for argument in arguments]
        self.notes.append("weft " + shlex.join(words))
        marker = self.folder / f"begun-{len(self._started)}"
        started = time.monotonic()
        process: Command
        if executed or optimized:
            environment = {**os.environ, "TMPDIR": str(self.temporary), "LD_PRELOAD": "", "OMP_NUM_THREADS": "1"}
            environment |= {"PYTHONOPTIMIZE": "1"} if optimized else {}
            process = Executed(words, environment)
        else:
            process = Command(
                words, partial(_begin, str(self.temporary), str(self.working_folder), prepare, str(marker))
            )
            while not marker.exists() and process.returncode is None:
                time.sleep(0.001)
            started = time.monotonic()
        self._begun[process.pid] = started
        self._started.append(process)
        return process

    def finish(self, process: Command, seconds: float = WAIT_SECONDS) -> Done:
        """Wait for a command to end and return its output; raise Broken after the time limit."""
        try:
            out, errors = process.output(seconds)
        except AssertionError:
            raise Broken(f"the command goes on after {seconds:.0f} s") from None
        code = process.returncode
        assert code is not None
        taken = time.monotonic() - self._begun[process.pid]
        last = errors.strip().splitlines()[-1:] if code else []
        self.notes.append(": ".join([f"exit code {code} after {taken:.1f} s", *last])[:400])
        if "Traceback" in errors:
            self.notes += errors.strip().splitlines()[-12:]
        return Done(code=code, out=out, errors=errors, seconds=taken)

    def run(self, *arguments: object, seconds: float = WAIT_SECONDS, prepare: Callable[[], None] | None = None) -> Done:
        """Run a command until its end."""
        return self.finish(self.start(*arguments, prepare=prepare), seconds)

    def left(self) -> list[str]:
        """Return the processes and temporary files that the commands have left."""
        processes = [f"process {pid} ({command_line(pid)})" for p in self._started for pid in members(p.pid)]
        files = [path for path in self.temporary.iterdir() if not path.name.startswith(NOT_OURS)]
        return processes + [f"{path.relative_to(self.folder)}" for path in files]

    def remove_temporary_files(self) -> None:
        """Remove the files of commands whose processes were all killed; an ending process may remove some as well."""
        for path in self.temporary.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:  # tempfile tests a folder by writing a file, which a kill can leave
                path.unlink(missing_ok=True)

    def check_nothing_left(self) -> None:
        """Check that all processes and temporary files disappear within a time limit."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while left := self.left():
            check(time.monotonic() < deadline, f"left after {PATIENCE_SECONDS:.0f} s: {', '.join(left)}")
            time.sleep(0.05)

    def small_disk(self, name: str, num_bytes: int) -> Path:
        """Mount a file system of `num_bytes` in the attempt's folder."""
        disk = self.folder / name
        disk.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", disk], check=True, capture_output=True
        )
        self._disks.append(disk)
        return disk


def _begin(temporary: str, working_folder: str, prepare: Callable[[], None] | None, marker: str) -> None:
    """Set up a command's process, before its first line."""
    os.environ.update(TMPDIR=temporary, OMP_NUM_THREADS="1")
    os.chdir(working_folder)
    Path(marker).touch()
    if prepare:
        prepare()


def command_line(pid: int) -> str:
    """Return the end of a process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[-80:]
    except OSError:
        return "gone"


@dataclass(frozen=True, kw_only=True)
class Whole:
    """An uninterrupted run."""

    folder: Path
    seconds: float


class Stage:
    """Shared folder of all attempts: a typed graph, and reference runs that are each trained once."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-", dir="/tmp"))
        self._wholes: dict[tuple[str, ...], Whole] = {}
        self.typed = self.folder / "typed"
        make_typed_graph(23, "some").save(self.typed)
        self.mounts = self._can_mount()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def whole(self, setting: Setting, placement: Placement, *more: object) -> Whole:
        """Return a shared, uninterrupted run with equal results (on one rank if exact), which must not be changed."""
        if placement.strategy != "stale":
            placement = Placement(strategy="single", workers=1, more=())
        words = tuple(str(argument) for argument in (*setting.train(), *placement.flags, *more))
        if words not in self._wholes:
            folder = Path(tempfile.mkdtemp(prefix="whole-", dir=self.folder))
            with Scene(self) as scene:
                done = scene.run(*words, "--out", folder)
                check(done.code == 0, f"uninterrupted: weft {shlex.join(words)}: {done.errors.strip()[-300:]}")
                done.check_ended(0)
            self._wholes[words] = Whole(folder=folder, seconds=done.seconds)
        return self._wholes[words]

    def _can_mount(self) -> bool:
        with Scene(self) as scene:
            try:
                scene.small_disk("disk", 1 << 20)
            except (OSError, subprocess.CalledProcessError):
                return False
        return True


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's record; raise Broken if it cannot be read."""
    path = folder / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError) as error:
        raise Broken(f"{path.name} cannot be read: {error}") from None
    check(all(isinstance(line, dict) and "kind" in line for line in records), f"{path.name} has lines of another kind")
    return records


def losses(folder: Path) -> list[float]:
    """Return the loss of every epoch; raise Broken if an epoch is missing or occurs twice."""
    epochs = [line for line in lines(folder) if line["kind"] == "epoch"]
    numbers = [line["epoch"] for line in epochs]
    check(numbers == list(range(len(epochs))), f"the record has epochs {shown(numbers)}")
    return [line["loss"] for line in epochs]


def summary(folder: Path) -> dict[str, Any]:
    """Return the summary line of a finished run."""
    last = lines(folder)[-1]
    check(last["kind"] == "summary", f"the record ends with {last['kind']}")
    return last


def check_same(folder: Path, whole: Path, old_losses: dict[int, float] | None = None) -> None:
    """Check that a finished run has the losses and final scores of another.

    old_losses: losses by epoch that its record had before it was resumed, damaged or not, and that are also accepted.
    """
    actual, expected = losses(folder), losses(whole)
    check(len(actual) == len(expected), f"the record has {len(actual)} epochs, not {len(expected)}")
    for epoch, (loss, other) in enumerate(zip(actual, expected, strict=True)):
        unchanged = old_losses is not None and old_losses.get(epoch) == loss
        check(unchanged or near(loss, other), f"the loss of epoch {epoch} is {loss}, not {other}")
    scores, expected_scores = (plain(summary(run)) for run in (folder, whole))
    check(scores.keys() == expected_scores.keys(), f"the summary has {sorted(scores)}, not {sorted(expected_scores)}")
    for name, value in scores.items():
        check(near(value, expected_scores[name]), f"the summary's {name} is {value}, not {expected_scores[name]}")
    check((folder / "model.safetensors").is_file(), "there are no weights")


def near(actual: Any, expected: Any) -> bool:
    """Return whether two values are equal, floats up to nine digits."""
    if isinstance(actual, float) and isinstance(expected, int | float):
        return abs(actual - expected) <= TOLERANCE * max(1.0, abs(expected))
    return bool(actual == expected)


def plain(line: dict[str, Any]) -> dict[str, Any]:
    """Return the scores and counts of a summary, without measured values."""
    return {name: value for name, value in line.items() if isinstance(value, int | float | str) and not measured(name)}


def measured(name: str) -> bool:
    """Return whether the value with this name is measured, and may differ between equal runs."""
    return any(part in name for part in MEASURED)


def shown(numbers: list[int]) -> str:
    """Return a list as text, shortened in the middle if it is long."""
    text = str(numbers)
    return text if len(text) < 120 else f"{text[:60]} ... {text[-50:]}"


def until(happened: Callable[[], bool], process: Command, seconds: float = WAIT_SECONDS) -> None:
    """Wait until something happens; raise Missed if the command ends before, and Broken after the time limit."""
    deadline = time.monotonic() + seconds
    while not happened():
        if process.returncode is not None:
            raise Missed("the command ended before")
        check(time.monotonic() < deadline, f"the command does nothing for {seconds:.0f} s")
        time.sleep(0.001)


def epochs_recorded(folder: Path) -> int:
    """Return the number of epochs in the record of a running run."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except OSError:
        return 0
    return len(re.findall(r'^\{"kind": "epoch"', text, re.MULTILINE))


def begun(out: Path) -> bool:
    """Return whether there is a run to resume; raise Broken if there is anything else."""
    present = [path.name for path in out.iterdir()] if out.exists() else []
    names = sorted(name for name in present if name not in UNBEGUN and not is_draft(name))
    check(not names or "config.toml" in names, f"neither begun nor to be resumed: {names}")
    return bool(names)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
