"""Start of gloo process groups, without gloo's messages and with a lower scheduling class for its threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, suppress
from datetime import timedelta

import torch.distributed as dist

from weft.utils.standard_streams import STDERR, lossy


@contextmanager
def without_native_stderr() -> Iterator[None]:
    """Discard what C++ code writes to standard error in the `with` block; Python still writes to it."""
    lossy(sys.stderr).flush()
    try:
        original = os.dup(STDERR)
    except OSError:  # standard error is closed
        yield
        return
    with open(os.devnull, "wb") as devnull:
        os.dup2(devnull.fileno(), STDERR)
    try:
        with (
            open(original, "w", buffering=1, closefd=False) as stream,
            closing(lossy(stream)) as python_stderr,
            redirect_stderr(python_stderr),
        ):
            yield
    finally:
        os.dup2(original, STDERR)
        os.close(original)


@contextmanager
def batch_scheduling() -> Iterator[None]:
    """Start threads in the `with` block in the scheduling class SCHED_BATCH, if the system allows it.

    A thread of this class does not preempt the thread that wakes it. gloo's socket thread polls without sleeping while
    another thread of the process is about to send. Without SCHED_BATCH it does so on that thread's core, and delays it
    until the kernel's next tick, up to 4 ms later (github.com/pytorch/gloo/issues/246).
    """
    batch, default = getattr(os, "SCHED_BATCH", None), getattr(os, "SCHED_OTHER", None)
    if batch is None or os.sched_getscheduler(0) != default:
        yield
        return
    with ExitStack() as after:
        with suppress(PermissionError):
            os.sched_setscheduler(0, batch, os.sched_param(0))
            after.callback(os.sched_setscheduler, 0, default, os.sched_param(0))
        yield


@contextmanager
def starting_gloo() -> Iterator[None]:
    """Let the `with` block start a process group without messages of gloo and with `batch_scheduling`."""
    with without_native_stderr(), batch_scheduling():
        yield


def new_gloo_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """Return a new gloo process group of all ranks, each of which must call this function.

    Args:
        timeout: Time after which a peer that does not answer counts as lost; None: PyTorch's default.
    """
    with starting_gloo():
        process_group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    return process_group
