"""Measure the disk, for temporary files that do not fit in memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from weft.cost import Disk
from weft.storage.unnamed_files import ScratchFile

NUM_BYTES, PIECE_BYTES = 1 << 27, 1 << 23
"""Size of the file, and of each read and write."""
ROUNDS = 3
"""Number of measurements, of which the median counts."""


def measure_disk() -> Disk:
    """Measure the seconds per byte to read and to write a file in the folder of temporary files.

    The file is written to the disk and dropped from the page cache before it is read.

    Raises:
        RunError: There is no room for 128 MiB.
    """
    file, piece = ScratchFile(NUM_BYTES), torch.ones(PIECE_BYTES, dtype=torch.uint8)

    def write() -> None:
        for offset in range(0, NUM_BYTES, PIECE_BYTES):
            file.write(offset, piece)
        os.fdatasync(file.handle)
        os.posix_fadvise(file.handle, 0, NUM_BYTES, os.POSIX_FADV_DONTNEED)

    def read() -> None:
        for offset in range(0, NUM_BYTES, PIECE_BYTES):
            file.read(offset, piece)

    write()
    measured = [(seconds_per_byte(read), seconds_per_byte(write)) for _ in range(ROUNDS)]
    file.close()
    return Disk(*map(statistics.median, zip(*measured, strict=True)))


def seconds_per_byte(transfer: Callable[[], None]) -> float:
    """Return the seconds per byte of a function that transfers NUM_BYTES."""
    start = time.perf_counter()
    transfer()
    return (time.perf_counter() - start) / NUM_BYTES
