"""Run functions on P ranks over gloo, with rendezvous by file, one thread per rank and a time limit.

Ranks are forked from a process that only imports modules. Ranks of `on_ranks` live for the whole session, in one pool
per P; ranks of `spawn` are new. The first traceback is raised as an AssertionError.
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
    """Return a `multiprocessing` context whose processes start with the preloaded modules, if they can be forked."""
    if torch.cuda.is_available():  # PyG, when imported, initialises CUDA's driver, which a forked process cannot use
        return multiprocessing.get_context("spawn")
    return fork_server.context()


def keep_digits() -> None:
    """Build the graph `digits` once per process: hundreds of tests load it, and none changes it."""
    BUILT_IN["digits"] = cache(digits)


def collect_seldom() -> None:
    """Run the garbage collector less often: with many imported modules it takes a tenth of some tests' time."""
    gc.set_threshold(50_000, 50, 100)


def never_wait_for_the_disk() -> None:
    """Leave out fsync, since no test cuts the power: a session calls it thousands of times, for milliseconds each."""

    def fsync(fd: Any) -> None:
        os.fstat(fd)  # raises the same error for a closed file

    os.fsync = fsync


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(group, *arguments)` on each of `size` persistent ranks and return the results in rank order.

    With one rank, call it in this process. Otherwise function, arguments and results are pickled.
    """
    if size == 1:
        return [function(Group(), *arguments)]
    if size not in _pools or _pools[size].closed:
        _pools[size] = Pool(size)
    return _pools[size].run(function, *arguments)


def spawn(size: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: int = 60) -> list[Any]:
    """Call a function like `on_ranks`, but on new ranks, whose exchanges time out after `timeout_seconds`."""
    with closing(Pool(size, timeout_seconds)) as pool:
        return pool.run(function, *arguments)


def close_pools() -> None:
    """End all persistent ranks."""
    while _pools:
        _pools.popitem()[1].close()


class Pool:
    """Ranks that run one function after another. A failure ends all of them, since some may wait for others."""

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
            theirs.close()  # so that the death of a rank is an end of file here

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(group, *arguments)` on every rank and return the results in rank order."""
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
            return self._results()
        except BaseException:
            self.close(wait_seconds=0)
            raise

    def close(self, wait_seconds: float = 5) -> None:
        """End the ranks; kill those that do not end within `wait_seconds`."""
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
    """Return whether a rank failed, and its result or its traceback."""
    try:
        failed, value = pipe.recv()
    except (EOFError, ConnectionError):
        return True, "it ended without a word"
    return failed, value


def _serve(rank: int, size: int, timeout_seconds: int, folder: str, port: int, pipe: Connection) -> None:
    """Run a rank of a pool until the other end of the pipe is closed. Every function gets a new group."""
    torch.set_num_threads(1)
    collect_seldom()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # for ranks that connect again over GPUs
    turn, group = 0, Group()
    while True:
        try:
            function, arguments = pipe.recv()  # after all ranks have finished the previous function
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
