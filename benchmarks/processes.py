"""Contenders in processes of their own, which take turns."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def start(target: Callable[..., None], *arguments: Any, **environment: str) -> Connection:
    """A process of its own for `target(*arguments, pipe)`, and the pipe to it: it breaks where the process ends."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    before = dict(os.environ)
    os.environ.update(environment)
    context.Process(target=target, args=(*arguments, child), daemon=True).start()
    os.environ.clear()
    os.environ.update(before)
    child.close()
    return pipe


def ask(pipe: Connection, question: Any) -> Any:
    """A process's answer."""
    pipe.send(question)
    return pipe.recv()


def take_turns(pipes: dict[str, Connection], rounds: int) -> dict[str, list[float]]:
    """Seconds of each process's epochs, one process after the other, there and back: A B C C B A ...

    What follows one that heats the processor, or leaves its caches full, takes a few percent longer.
    """
    names = list(pipes)
    turns = [{name: ask(pipes[name], "epoch") for name in names[:: -1 if turn % 2 else 1]} for turn in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in pipes}
