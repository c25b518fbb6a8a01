"""What gloo writes to standard error by itself while ranks connect is left out: its errors say the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
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


def new_group(ranks: list[int], timeout: timedelta | None, backend: str | None = None) -> dist.ProcessGroup:
    """PyTorch's process group of some ranks; all ranks make it, also those that are not of it."""
    with without_gloo_lines():
        made: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend=backend)
    return made
