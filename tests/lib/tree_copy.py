"""A copy of the source tree with its own environment, in which a file can be changed while tests run.

Under pytest this module is a plugin: it runs only the tests of a list, in the list's order, and records their outcomes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

TRIED = "WEFT_TRIED_TESTS"
"""Environment variable with the folder that contains the list of tests to run, if any, and their outcomes."""
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "build", "runs", "site")


@dataclass(frozen=True)
class Outcome:
    """The first test that failed ('' for none), the number that passed before, and whether pytest ended by itself."""

    failed: str
    passed: int
    seconds: float
    finished: bool


class TreeCopy:
    """A copy of the tree that exists while the context is entered; processes started in it are ended with it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sound: set[str] = set()
        self.unsound: set[str] = set()
        """Tests that also fail without a change, and therefore show nothing."""

    def __enter__(self) -> TreeCopy:
        folder = Path(tempfile.mkdtemp(prefix="weft-"))
        # A process that removes the copy when this one closes the pipe, even if this one is killed.
        remove = ["sh", "-c", 'read -r _; until rm -rf "$0"; do sleep 1; done', folder]
        self._remover = subprocess.Popen(remove, stdin=subprocess.PIPE, start_new_session=True)
        self.tree, self._tried, self._python = folder / "tree", folder / "tried", folder / "bin" / "python"
        shutil.copytree(self._root, self.tree, ignore=IGNORED, symlinks=True)
        (self._tried / "tmp").mkdir(parents=True)
        self._make_environment(folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_processes()
        self._remover.communicate()

    def _make_environment(self, folder: Path) -> None:
        """Create an environment that finds the copy before this environment's packages, without its editable weft."""
        native = importlib.util.find_spec("weft._native")
        assert native is not None
        assert native.origin is not None
        for library in Path(native.origin).parent.glob("*.so"):
            shutil.copy(library, self.tree / "weft")
        self._python.parent.mkdir()
        self._python.symlink_to(os.path.realpath(sys.executable))
        shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
        packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        packages.mkdir(parents=True)
        (packages / "copy.pth").write_text(f"{self.tree}\n{sysconfig.get_path('purelib')}\n")
        code = "import weft; print(weft.__file__)"
        imported = subprocess.check_output([self._python, "-c", code], cwd=folder, text=True)
        assert Path(imported.strip()) == self.tree / "weft" / "__init__.py", imported

    def run_changed(
        self, path: str, change: Callable[[bytes], bytes], tests: list[str] | None, limit_seconds: float
    ) -> Outcome:
        """Run tests with a file changed, until one fails that passes without the change."""
        right = (self.tree / path).read_bytes()
        while True:
            self._write(path, change(right))
            outcome = self.run(tests, limit_seconds)
            self._write(path, right)
            if "::" not in outcome.failed or self._passes(outcome.failed, limit_seconds):
                return outcome

    def _passes(self, test: str, limit_seconds: float) -> bool:
        """Return True if a test passes without a change."""
        if test not in self._sound:
            outcome = self.run([test], limit_seconds)
            (self._sound if outcome.finished and outcome.passed else self.unsound).add(test)
        return test in self._sound

    def _write(self, path: str, text: bytes) -> None:
        """Write a file and remove its compiled form, which Python compares only by time and size."""
        file = self.tree / path
        file.write_bytes(text)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def run(self, tests: list[str] | None, limit_seconds: float) -> Outcome:
        """Run tests, or all quick ones, until one fails; end those that are still running at the time limit."""
        notes, listed = self._tried / "notes", self._tried / "list"
        notes.write_text("")
        listed.unlink(missing_ok=True)
        files: list[str] = []
        if tests is not None:
            listed.write_text("\n".join(tests))
            files = sorted({test.partition("::")[0] for test in tests})
        command = [self._python, "-m", "pytest", "-x", "-p", "tests.lib.tree_copy", "--numprocesses", "2", *files]
        command += [f"--deselect={test}" for test in sorted(self.unsound)]
        environment = {**os.environ, TRIED: str(self._tried), "TMPDIR": str(self._tried / "tmp")}
        started = time.monotonic()
        with open(self._tried / "output", "w") as output:
            process = subprocess.Popen(command, cwd=self.tree, env=environment, stdout=output, stderr=output)
        while (code := process.poll()) is None and time.monotonic() - started < limit_seconds:
            if re.search("^failed ", notes.read_text(), re.MULTILINE):  # others may go on for long
                break
            time.sleep(0.2)
        self._end_processes()
        process.wait()
        ends = [line.partition(" ") for line in notes.read_text().splitlines()]
        failed = [test for end, _, test in ends if end == "failed"]
        if not failed and code not in (None, pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            assert code != pytest.ExitCode.USAGE_ERROR, (self._tried / "output").read_text()
            failed = [f"pytest ended with {code}, by what it imports"]
        passed = sum(end == "passed" for end, _, _ in ends)
        return Outcome("".join(failed[:1]), passed, time.monotonic() - started, code is not None)

    def _end_processes(self) -> None:
        """End all processes that were started in the copy, recognized by the folder in their environment."""
        mark = f"{TRIED}={self._tried}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select only the listed tests, in the list's order; select all if there is no list."""
    listed = Path(os.environ[TRIED]) / "list"
    if listed.exists():
        order = {test: position for position, test in enumerate(listed.read_text().splitlines())}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record that a test passed or failed, in the process that starts the workers."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or report.failed):
        with open(Path(os.environ[TRIED]) / "notes", "a") as notes:
            notes.write(f"{report.outcome} {report.nodeid}\n")
