"""How gloo begins: its threads wait for a core until others leave one, and what it writes by itself is left out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from datetime import timedelta

import torch.distributed as dist

STDERR = 2


@contextmanager
def without_gloo_lines() -> Iterator[None]:
    """While entered, C++ code writes its lines of standard error to nowhere; Python's go where they did."""
    sys.stderr.flush()
    kept = os.dup(STDERR)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), STDERR)
    try:
        with open(kept, "w", buffering=1, closefd=False) as ours, redirect_stderr(ours):
            yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)


@contextmanager
def threads_in_batch() -> Iterator[None]:
    """While entered, threads that this one begins are of the kernel's class for batches, where it has and allows one.

    So that none takes the core of the thread that has just woken it. gloo's one for sockets does not sleep while
    another of its process is about to send, but tries again and again: on that one's core until the kernel's next tick,
    4 ms later (github.com/pytorch/gloo/issues/246).
    """
    batch, own = getattr(os, "SCHED_BATCH", None), getattr(os, "SCHED_OTHER", None)
    if batch is None or os.sched_getscheduler(0) != own:
        yield
        return
    with ExitStack() as after:
        with suppress(PermissionError):
            os.sched_setscheduler(0, batch, os.sched_param(0))
            after.callback(os.sched_setscheduler, 0, own, os.sched_param(0))
        yield


@contextmanager
def beginning_gloo() -> Iterator[None]:
    """While a process group is made: without its lines, and its threads of that class."""
    with without_gloo_lines(), threads_in_batch():
        yield


def new_gloo_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """Make one more process group of all ranks, through gloo. All ranks must call it."""
    with beginning_gloo():
        process_group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    return process_group
