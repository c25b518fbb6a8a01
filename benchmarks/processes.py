"""Contenders that run in separate processes and take turns."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def start(target: Callable[..., None], *arguments: Any, **environment: str) -> Connection:
    """Start a new process that runs `target(*arguments, pipe)`, and return the connection to it.

    Args:
        target: Function to run; its last argument is its end of the connection.
        *arguments: Its other arguments.
        **environment: Environment variables to set in the new process.
    """
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
    """Send a request to a process and return its answer."""
    pipe.send(question)
    return pipe.recv()


def take_turns(pipes: dict[str, Connection], rounds: int) -> dict[str, list[float]]:
    """Run an epoch of each process per round, and return the seconds by process and round.

    Every other round is in reverse order (A B C C B A ...): a process that follows one that heats the processor, or
    fills its caches, takes a few percent longer.

    Args:
        pipes: Connections to the processes, by name.
        rounds: Number of rounds.
    """
    names = list(pipes)
    turns = [{name: ask(pipes[name], "epoch") for name in names[:: -1 if turn % 2 else 1]} for turn in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in pipes}
