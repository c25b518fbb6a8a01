"""One process that has imported the modules of ranks, from which all pytest-xdist workers fork their ranks.

`multiprocessing` would start one for each worker, and its imports take five seconds.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

PRELOADED = [
    "pytest",
    "tests.rewriting",
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
    """Return a `multiprocessing` context whose processes are forked with the preloaded modules."""
    forkserver_context = multiprocessing.get_context("forkserver")
    forkserver_context.set_forkserver_preload(PRELOADED)
    return forkserver_context


def start() -> str:
    """Start the process if it is not running, without waiting for its imports, and return its address."""
    context()
    forkserver.ensure_running()
    address: str = _server._forkserver_address
    return address


def use(address: str) -> None:
    """Fork from the process with this address, which another process starts and ends."""
    resource_tracker.ensure_running()
    _server._forkserver_address = address
    _server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # sent along; its own keeps the process alive
    _server.ensure_running = lambda: None
