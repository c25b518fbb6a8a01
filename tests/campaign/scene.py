"""What attempts share: folders and commands of their own, runs to compare with, and what holds for every command."""

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

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 120.0
"""How long a command may take: several times what one takes with others beside it, and longer than `--timeout`."""
PATIENCE_SECONDS = 15.0
"""How long what a command has left may take to go."""
TOLERANCE = 1e-9
NOT_OURS = ("torchinductor",)
"""What PyTorch keeps in the folder for temporary files."""
MEASURED = ("seconds", "bytes", "stages", "durations")
"""What the names of numbers that are measured have in them, by which two runs may differ."""


class Broken(Exception):
    """A promise that did not hold, in one line."""


class Missed(Exception):
    """Why an attempt tried nothing: its fault did not happen."""


def require(holds: bool, said: str) -> None:
    """Broken, unless something holds."""
    if not holds:
        raise Broken(said)


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    code: int
    """Its exit code, or minus the signal that ended it."""
    out: str
    """What it wrote to standard output."""
    errors: str
    """And to standard error."""
    seconds: float

    def error_lines(self) -> list[str]:
        """The lines that say why it ended; Broken where it has written anything but those and progress."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        for line in lines:
            expected = line.startswith(("weft: ", "epoch ")) and "unexpected error" not in line
            require(expected, f"standard error has {self.last_of(line)}")
        return [line for line in lines if line.startswith(("weft: error:", "weft: stopped "))]

    def last_of(self, line: str) -> str:
        """A line that should not be there; of a traceback also its end."""
        end = self.errors.strip().splitlines()[-1]
        return f"{line!r}, and at its end {end[:200]!r}" if end != line else repr(line)

    def require_ended(self, *codes: int) -> list[str]:
        """Its error lines: one for an exit code of its own other than 0, and none else. Broken for another code."""
        lines = self.error_lines()
        said = f"exit code {self.code}, not {' or '.join(map(str, sorted(codes)))}: {lines or 'nothing said'}"
        require(self.code in codes, said)
        wanted = 1 if self.code > 0 else 0
        require(len(lines) == wanted, f"exit code {self.code} with {len(lines)} lines of error: {lines}")
        return lines

    def require_refused(self) -> str:
        """The one line of a refusal."""
        (line,) = self.require_ended(2)
        return line


class Executed(Command):
    """A command as a person starts it, imports included."""

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
        """As a Command's."""
        code: int | None = self._process.poll()
        return code

    def said(self, seconds: float = 100) -> tuple[str, str]:
        """As a Command's."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError("the command does not end") from None
        out, errors = ((self._folder / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self._folder)
        return out, errors


class Scene:
    """One attempt's folders and commands. Left without an error, it sees to it that none of their doing is left."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.folder = Path(tempfile.mkdtemp(prefix="c-", dir="/tmp"))  # short enough for the address of a socket
        self.temporary, self.here = self.folder / "t", self.folder / "here"
        for folder in (self.temporary, self.here):
            folder.mkdir()
        self.notes: list[str] = []
        """What was done, for a person who repeats it."""
        self.faults = 0
        """How many faults have happened, of an attempt that makes several."""
        self._begun: dict[int, float] = {}
        self._started: list[Command] = []
        self._disks: list[Path] = []

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.require_nothing_left()
        finally:
            for process in self._started:
                for pid in members(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for disk in self._disks:
                subprocess.run(["umount", "--lazy", str(disk)], check=False)
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, *arguments: object, prepare: Callable[[], None] | None = None, executed: bool = False) -> Command:
        """A command that goes on in `here`, with a folder for temporary files of its own, from its first line on.

        executed: in a new Python, not in one that is forked with its imports done.
        """
        words = [str(one) for one in arguments]
        self.notes.append("weft " + shlex.join(words))
        marker = self.folder / f"begun-{len(self._started)}"
        started = time.monotonic()
        process: Command
        if executed:
            environment = {**os.environ, "TMPDIR": str(self.temporary), "LD_PRELOAD": "", "OMP_NUM_THREADS": "1"}
            process = Executed(words, environment)
        else:
            process = Command(words, partial(_begin, str(self.temporary), str(self.here), prepare, str(marker)))
            while not marker.exists() and process.returncode is None:
                time.sleep(0.001)
            started = time.monotonic()
        self._begun[process.pid] = started
        self._started.append(process)
        return process

    def finish(self, process: Command, seconds: float = WAIT_SECONDS) -> Done:
        """What came of a command; Broken if it goes on for longer."""
        try:
            out, errors = process.said(seconds)
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
        """A command, until its end."""
        return self.finish(self.start(*arguments, prepare=prepare), seconds)

    def left(self) -> list[str]:
        """Processes and temporary files that the commands have left."""
        found = [f"process {pid} ({command_line(pid)})" for one in self._started for pid in members(one.pid)]
        files = [path for path in self.temporary.iterdir() if not path.name.startswith(NOT_OURS)]
        return found + [f"{path.relative_to(self.folder)}" for path in files]

    def remove_temporary_files(self) -> None:
        """What commands have left whose every process was killed; one that is just ending may remove it as well."""
        for path in self.temporary.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:  # tempfile tries a folder out with a file, which a kill can leave
                path.unlink(missing_ok=True)

    def require_nothing_left(self) -> None:
        """Broken if a process or a temporary file is there after a while."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while left := self.left():
            require(time.monotonic() < deadline, f"left after {PATIENCE_SECONDS:.0f} s: {', '.join(left)}")
            time.sleep(0.05)

    def small_disk(self, name: str, num_bytes: int) -> Path:
        """A file system of so many bytes, in the attempt's folder."""
        disk = self.folder / name
        disk.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", disk], check=True, capture_output=True
        )
        self._disks.append(disk)
        return disk


def _begin(temporary: str, here: str, prepare: Callable[[], None] | None, marker: str) -> None:
    """What a command's process does first."""
    os.environ.update(TMPDIR=temporary, OMP_NUM_THREADS="1")
    os.chdir(here)
    Path(marker).touch()
    if prepare:
        prepare()


def command_line(pid: int) -> str:
    """How a process was called."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[-80:]
    except OSError:
        return "gone"


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A run that nobody interrupted."""

    folder: Path
    seconds: float


class Stage:
    """What all attempts share: a folder for a typed graph, and for runs to compare with, each made once."""

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
        """An uninterrupted run of the same numbers, which is not to be changed: that of one rank, if they are exact."""
        if placement.strategy != "stale":
            placement = Placement(strategy="single", workers=1, more=())
        words = tuple(str(one) for one in (*setting.train(), *placement.flags, *more))
        if words not in self._wholes:
            folder = Path(tempfile.mkdtemp(prefix="whole-", dir=self.folder))
            with Scene(self) as scene:
                done = scene.run(*words, "--out", folder)
                require(done.code == 0, f"uninterrupted: weft {shlex.join(words)}: {done.errors.strip()[-300:]}")
                done.require_ended(0)
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
    """The lines of a run's record; Broken for one that is none."""
    path = folder / "metrics.jsonl"
    try:
        found = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError) as error:
        raise Broken(f"{path.name} cannot be read: {error}") from None
    require(all(isinstance(line, dict) and "kind" in line for line in found), f"{path.name} has lines of another kind")
    return found


def losses(folder: Path) -> list[float]:
    """The loss of every epoch; Broken if one is missing or there twice."""
    epochs = [line for line in lines(folder) if line["kind"] == "epoch"]
    numbers = [line["epoch"] for line in epochs]
    require(numbers == list(range(len(epochs))), f"the record has epochs {shown(numbers)}")
    return [line["loss"] for line in epochs]


def summary(folder: Path) -> dict[str, Any]:
    """The last line of a finished run."""
    last = lines(folder)[-1]
    require(last["kind"] == "summary", f"the record ends with {last['kind']}")
    return last


def require_same(folder: Path, whole: Path, known: dict[int, float] | None = None) -> None:
    """Broken if a finished run has not the losses and final scores of another.

    known: losses by epoch that its record had, right or wrong, and may have kept.
    """
    found, wanted = losses(folder), losses(whole)
    require(len(found) == len(wanted), f"the record has {len(found)} epochs, not {len(wanted)}")
    for epoch, (one, other) in enumerate(zip(found, wanted, strict=True)):
        kept = known is not None and known.get(epoch) == one
        require(kept or near(one, other), f"the loss of epoch {epoch} is {one}, not {other}")
    scores, wanted_scores = (plain(summary(one)) for one in (folder, whole))
    require(scores.keys() == wanted_scores.keys(), f"the summary has {sorted(scores)}, not {sorted(wanted_scores)}")
    for name, value in scores.items():
        require(near(value, wanted_scores[name]), f"the summary's {name} is {value}, not {wanted_scores[name]}")
    require((folder / "model.safetensors").is_file(), "there are no weights")


def near(one: Any, other: Any) -> bool:
    """Whether two values agree, numbers to nine digits."""
    if isinstance(one, float) and isinstance(other, int | float):
        return abs(one - other) <= TOLERANCE * max(1.0, abs(other))
    return bool(one == other)


def plain(line: dict[str, Any]) -> dict[str, Any]:
    """The scores and counts of a summary."""
    return {name: value for name, value in line.items() if isinstance(value, int | float | str) and not measured(name)}


def measured(name: str) -> bool:
    """Whether the number of this name is of the machine, not of the run."""
    return any(part in name for part in MEASURED)


def shown(numbers: list[int]) -> str:
    """A list, shortened."""
    text = str(numbers)
    return text if len(text) < 120 else f"{text[:60]} ... {text[-50:]}"


def until(happened: Callable[[], bool], process: Command, seconds: float = WAIT_SECONDS) -> None:
    """Waits for something that a command does; Missed if it ends before, Broken if it takes too long."""
    deadline = time.monotonic() + seconds
    while not happened():
        if process.returncode is not None:
            raise Missed("the command ended before")
        require(time.monotonic() < deadline, f"the command does nothing for {seconds:.0f} s")
        time.sleep(0.001)


def epochs_recorded(folder: Path) -> int:
    """How many epochs the record of a run that is going has."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except OSError:
        return 0
    return len(re.findall(r'^\{"kind": "epoch"', text, re.MULTILINE))


def files_of(folder: Path) -> dict[str, bytes]:
    """What a folder holds, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
