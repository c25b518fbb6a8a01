"""Runs functions on P ranks: gloo, rendezvous by file, one thread a rank, a hard limit, the first traceback.

Ranks are forked from a process that has imported what they need and does nothing else. Those of `on_ranks` stay for the
session, one pool per P; those of `spawn` are new.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tests.lib import fork_server
from weft.comm import Group, join
from weft.data.io.datasets import BUILT_IN
from weft.data.io.digits import digits
from weft.runtime.meter import Meter

LIMIT_SECONDS = 240
_pools: dict[int, Pool] = {}


def forked() -> Any:
    """The context of processes that are forked with what is preloaded."""
    if torch.cuda.is_available():  # PyG, when imported, initialises CUDA's driver, which a forked process cannot use
        return multiprocessing.get_context("spawn")
    return fork_server.context()


def keep_digits() -> None:
    """Build the graph `digits` once a process: hundreds of tests load it, and nobody changes it."""
    BUILT_IN["digits"] = cache(digits)


def collect_seldom() -> None:
    """Has Python look for cycles less often, which takes a tenth of some modules' time among all that is imported."""
    gc.set_threshold(50_000, 50, 100)


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(group, *arguments)` on each of `size` ranks that are kept; the results in rank order.

    One rank is this process. Function, arguments and results are pickled. AssertionError with the first traceback.
    """
    if size == 1:
        return [function(Group(), *arguments)]
    if size not in _pools or _pools[size].closed:
        _pools[size] = Pool(size)
    return _pools[size].run(function, *arguments)


def spawn(size: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: int = 60) -> list[Any]:
    """As `on_ranks`, in processes of its own, which wait for each other so long."""
    with closing(Pool(size, timeout_seconds)) as pool:
        return pool.run(function, *arguments)


def close_pools() -> None:
    """Ends all ranks that are kept."""
    while _pools:
        _pools.popitem()[1].close()


class Pool:
    """Ranks that run one function after another; after a failure all are ended, since some may wait for others."""

    def __init__(self, size: int, timeout_seconds: int = 60) -> None:
        context = forked()
        self.closed = False
        self._folder = tempfile.TemporaryDirectory()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(
                target=_serve, args=(rank, size, timeout_seconds, self._folder.name, port, theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that a rank that dies without a word is an end of file here

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(group, *arguments)` on every rank; the results in rank order."""
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
            return self._results()
        except BaseException:
            self.close(wait_seconds=0)
            raise

    def close(self, wait_seconds: float = 5) -> None:
        """Ends the ranks, at once if they do not end by themselves."""
        self.closed = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(wait_seconds)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _results(self) -> list[Any]:
        results: dict[Connection, Any] = {}
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(results) < len(self._pipes):
            pending = [pipe for pipe in self._pipes if pipe not in results]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            late = [self._pipes.index(pipe) for pipe in pending]
            assert ready, f"ranks {late} gave no result within {LIMIT_SECONDS} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                failed, results[pipe] = _received(pipe)
                assert not failed, f"rank {self._pipes.index(pipe)} failed:\n{results[pipe]}"
        return [results[pipe] for pipe in self._pipes]


def _received(pipe: Connection) -> tuple[bool, Any]:
    """Whether a rank failed, and its result or its traceback."""
    try:
        failed, value = pipe.recv()
    except (EOFError, ConnectionError):
        return True, "it ended without a word"
    return failed, value


def _serve(rank: int, size: int, timeout_seconds: int, folder: str, port: int, pipe: Connection) -> None:
    """A rank of a pool, until the other end of the pipe is closed. Ranks that a function has parted meet again."""
    torch.set_num_threads(1)
    collect_seldom()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # where ranks that go over to GPUs meet anew
    turn, group = 0, Group()
    while True:
        try:
            function, arguments = pipe.recv()  # when all ranks have done what was before
            group.close_host_group()
        except EOFError:
            return
        except BaseException:
            pipe.send((True, traceback.format_exc()))
            continue
        turn += 1
        try:
            init = f"file://{Path(folder) / f'meet-{turn}'}"
            group = join(timeout_seconds=timeout_seconds, meter=Meter(), init_method=init)
            pipe.send((False, function(group, *arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
