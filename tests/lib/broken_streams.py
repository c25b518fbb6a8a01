"""Functions that make standard streams of a command's process unusable, before its first line."""

from __future__ import annotations

import os
import sys

FULL = "/dev/full"
"""Device that is always full."""


def close(*numbers: int) -> None:
    """Close standard streams of this process, as if it had been started without them."""
    for number in numbers:
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
        os.close(number)


def fill(*numbers: int) -> None:
    """Let standard streams of this process write to a full disk."""
    for number in numbers:
        os.dup2(os.open(FULL, os.O_WRONLY), number)


def end_reader(*numbers: int) -> None:
    """Let standard streams of this process write to a pipe without a reader, as after `2>&1 | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    for number in numbers:
        os.dup2(writing, number)


def leave_early(*numbers: int) -> None:
    """Let standard streams of this process write to a pipe whose reader ends after the first bytes."""
    reading, writing = os.pipe()
    if not os.fork():
        os.close(writing)
        os.read(reading, 20)
        os._exit(0)
    os.close(reading)
    for number in numbers:
        os.dup2(writing, number)
    os.close(writing)
