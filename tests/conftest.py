"""Fixtures and setup for all tests: one thread per process, shared reference results, and persistent ranks.

Only processes that run tests import PyTorch and weft. The process that distributes tests to workers does not.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import rewriting  # noqa: F401  # before any helper
from tests.lib import fork_server
from tests.lib.environment import EVERY_CASE, REFERENCES

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported: graphs are too small for more

LONG = ("strategies", "parallel", "training", "prediction", "experiments", "autotune")
"""Folders of tests that take a second or more."""
SERVER = "fork_server"
"""Key in a worker's input for the address of the process that all ranks are forked from."""
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --slice, so that the thousands of slow tests can run in several sessions or on several machines."""
    parser.addoption("--slice", default="1/1", metavar="K/N", help="run only the K-th of N slices of the tests")


def pytest_configure(config: pytest.Config) -> None:
    """Create a folder for references that all workers and ranks share, and a cache without a machine profile."""
    if config.option.markexpr != "not slow":
        os.environ[EVERY_CASE] = "1"
    if REFERENCES not in os.environ:
        folder = tempfile.TemporaryDirectory()
        os.environ[REFERENCES] = folder.name
        os.environ["XDG_CACHE_HOME"] = str(Path(folder.name) / "cache")
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop(REFERENCES))
    if config.getoption("numprocesses", None):
        return
    import torch

    from tests.lib.ranks import collect_seldom, keep_digits, never_wait_for_the_disk

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels then run on the CPU
    collect_seldom()
    never_wait_for_the_disk()
    keep_digits()
    if SERVER in (worker_input := getattr(config, "workerinput", {})):
        fork_server.use(worker_input[SERVER])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the process that the ranks of all workers are forked from."""
    node.workerinput[SERVER] = fork_server.start()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the slice, and run folders whose tests take long first, so that no long test is left for the end."""
    number, count = map(int, config.getoption("slice").split("/"))
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number % count]
    items.sort(key=lambda item: not any(f"tests/{folder}/" in item.nodeid for folder in LONG))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure the command that runs the case alone."""
    report = yield
    if report.failed:
        report.sections.append(("to run it alone", f".venv/bin/python -m pytest -m '' '{item.nodeid}'"))
    return report


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    """End the persistent ranks when the session ends."""
    from tests.lib.ranks import close_pools

    yield
    close_pools()


@pytest.fixture(scope="session", autouse=True)
def _local_ranks() -> Iterator[None]:
    """Fork the local ranks of runs, as the command line does. Ranks of a script would import every module again."""
    from tests.lib.ranks import forked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.training.launch.processes.start_method", lambda: forked().get_start_method())
        yield


@pytest.fixture
def weft_data() -> Callable[[str], Path]:
    """Find a real graph's file in the folder WEFT_DATA, or skip the test if there is none."""

    def find(name: str) -> Path:
        folder = os.environ.get("WEFT_DATA")
        if not folder or not (Path(folder) / f"{name}.npz").is_file():
            pytest.skip(f"WEFT_DATA holds no {name}.npz")
        return Path(folder) / f"{name}.npz"

    return find


@pytest.fixture
def in_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process look like a script, whose file local ranks import; a pytest-xdist worker has none."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
