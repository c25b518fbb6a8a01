"""Measure which lines of weft the quick tests run, in every process, and which test runs which line.

`python -m tests.covered [ARGUMENTS OF PYTEST]` prints a table by file. Ranks and commands count as well: each process
that starts while the tests run measures itself. Under pytest this module is a plugin that tells all of them which test
runs. The folder `build/coverage` then contains the table as `lines.json`, and coverage.py's file `data`, which lists
the tests that run each line.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

from tests.lib import ranks
from weft.comm import Group

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "coverage"
DATA = FOLDER / "data"
TEST = "PYTEST_CURRENT_TEST"
"""Environment variable with the id of the running test; commands and ranks inherit it from their parent process."""
PHASE = re.compile(r" \((setup|call|teardown)\)$")
CONFIG = f"""[run]
data_file = {DATA}
include = {ROOT}/weft/*
parallel = true
concurrency = multiprocessing,thread
patch = _exit
context = ${{{TEST}-}}
disable_warnings = no-data-collected,module-not-measured,no-ctracer

[report]
exclude_also =
    if TYPE_CHECKING:
"""
QUICK = ["--numprocesses", "2", "--dist", "worksteal", "-o", "timeout=900"]
"""The quick tests as `make test` runs them, with more time for each, since counting lines slows them down."""


def test_of(context: str) -> str:
    """Extract the test's id from a context: the test that started the process and, after `|`, a later one, if any."""
    return PHASE.sub("", context[context.rfind("|tests/") + 1 :])


def switch(test: str) -> None:
    """Attribute the lines that this process runs from now on to a test, and save those counted before."""
    measured = Coverage.current()
    if measured is not None:
        measured.switch_context(test)


class InTest:
    """A function on its way to a rank, which switches to its test as soon as it is received there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.test = function, PHASE.sub("", os.environ.get(TEST, ""))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        switch(self.test)

    def __call__(self, group: Group, *arguments: Any) -> Any:
        try:
            return self.function(group, *arguments)
        finally:
            switch(self.test)  # so that nothing is lost if the rank is killed next


class Named:
    """Set the environment variable `TEST` in a new process when unpickled: a forked one has an older environment."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return exec, (f"import os; os.environ[{TEST!r}] = {os.environ.get(TEST, '')!r}",)  # needs no module of tests


def pytest_configure() -> None:
    """Patch pools of ranks and processes of `multiprocessing` so that each is informed which test uses it."""
    run, prepared = ranks.Pool.run, spawn.get_preparation_data

    def run_in_test(pool: ranks.Pool, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return run(pool, InTest(function), *arguments)

    def prepared_in_test(name: str) -> dict[str, Any]:
        return prepared(name) | {"test": Named()}

    ranks.Pool.run = run_in_test  # type: ignore[method-assign]
    spawn.get_preparation_data = prepared_in_test  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Attribute to a test all lines that its fixtures and its function run in this process."""
    switch(item.nodeid)
    try:
        return (yield)
    finally:
        switch("")


def lines_by_file() -> dict[str, dict[str, Any]]:
    """Combine the counts of all processes; return the covered and missing lines of each file of weft."""
    measured = Coverage(config_file=str(FOLDER / "config"))
    measured.combine()
    measured.save()
    table = {}
    for path in sorted((ROOT / "weft").rglob("*.py")):
        _, statements, _, missing, _ = measured.analysis2(str(path))
        percent = 100 * (1 - len(missing) / len(statements)) if statements else 100.0
        table[str(path.relative_to(ROOT))] = {
            "covered": len(statements) - len(missing),
            "statements": len(statements),
            "percent": round(percent, 2),
            "missing": missing,
        }
    return table


def shown(table: dict[str, dict[str, Any]]) -> str:
    """Format the table for a terminal: one line per file, and one for all."""
    covered, statements = (sum(row[name] for row in table.values()) for name in ("covered", "statements"))
    lines = [f"{row['percent']:6.1f} % of {row['statements']:5d}  {name}" for name, row in table.items()]
    return "\n".join([*lines, f"{100 * covered / statements:6.1f} % of {statements:5d}  all"])


def main(arguments: list[str]) -> int:
    """Run pytest under coverage.py, print the table and return pytest's exit code."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    config = FOLDER / "config"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "pytest", "-p", "tests.covered", *QUICK, *arguments]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "COVERAGE_PROCESS_START": str(config)}).returncode
    table = lines_by_file()
    (FOLDER / "lines.json").write_text(json.dumps(table))
    print(shown(table))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
