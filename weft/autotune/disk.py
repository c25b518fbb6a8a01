"""Measures what temporary files take that memory does not hold."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from weft.cost import Disk
from weft.storage.unnamed_files import ScratchFile

NUM_BYTES, PIECE = 1 << 27, 1 << 23
ROUNDS = 3


def measure_disk() -> Disk:
    """Seconds of a byte in the folder of temporary files, where each is written out and read anew.

    RunError where there is no room for 128 MiB.
    """
    file, piece = ScratchFile(NUM_BYTES), torch.ones(PIECE, dtype=torch.uint8)

    def write() -> None:
        for at in range(0, NUM_BYTES, PIECE):
            file.write(at, piece)
        os.fdatasync(file.handle)
        os.posix_fadvise(file.handle, 0, NUM_BYTES, os.POSIX_FADV_DONTNEED)

    def read() -> None:
        for at in range(0, NUM_BYTES, PIECE):
            file.read(at, piece)

    write()
    found = [(seconds(read), seconds(write)) for _ in range(ROUNDS)]
    file.close()
    return Disk(*map(statistics.median, zip(*found, strict=True)))


def seconds(move: Callable[[], None]) -> float:
    """Those of a byte."""
    start = time.perf_counter()
    move()
    return (time.perf_counter() - start) / NUM_BYTES
