"""Runs a function on P ranks: gloo, rendezvous by file, one thread a rank, a hard limit, the first traceback.

Ranks are forked from a process that has imported PyTorch and does nothing else, since the import takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from weft.comm import Group, join
from weft.core.meter import Meter

LIMIT_SECONDS = 240


def spawn(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(group, *arguments)` on every rank; the results in rank order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["weft.strategies", "weft.engine"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(target=_main, args=(rank, size, folder, pipes[rank][1], function, arguments), daemon=True)
            for rank in range(size)
        ]
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()  # so that a rank that dies without a word is an end of file here
        try:
            return [_result(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
        finally:
            for process in ranks:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
            for receiver, _ in pipes:
                receiver.close()


def _result(rank: int, pipe: Connection) -> Any:
    assert pipe.poll(LIMIT_SECONDS), f"rank {rank} gave no result within {LIMIT_SECONDS} s"
    failed, value = pipe.recv()
    if failed:
        raise AssertionError(f"rank {rank} failed:\n{value}")
    return value


def _main(
    rank: int, size: int, folder: str, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        init = f"file://{Path(folder) / 'meet'}"
        group: Group = join(timeout_seconds=60, meter=Meter(), init_method=init)
        result = function(group, *arguments)
        group.close()
        pipe.send((False, result))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
