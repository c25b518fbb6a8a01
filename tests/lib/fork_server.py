"""One process that has imported what ranks need, from which the workers of pytest-xdist all fork theirs.

`multiprocessing` starts one for each process that forks, and its imports take five seconds.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

PRELOADED = [
    "pytest",
    "torch_geometric.nn",
    "torch._dynamo",
    "torch._refs",
    "weft.training",
    "tests.lib.planted",
    "tests.lib.warm",
]
"""Modules that every rank imports; those that are not installed are skipped."""

_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


def context() -> Any:
    """Return the context of processes that are forked with what is preloaded."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


def start() -> str:
    """Start the process, unless it is there, without waiting for its imports, and return its address."""
    context()
    forkserver.ensure_running()
    address: str = _server._forkserver_address
    return address


def use(address: str) -> None:
    """Fork from the process with this address, which another process has started and ends."""
    resource_tracker.ensure_running()
    _server._forkserver_address = address
    _server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # sent along; its own keeps the process alive
    _server.ensure_running = lambda: None
