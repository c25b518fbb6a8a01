"""What a process holds: its peak, and the memory that an epoch frees for the next one."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # glibc's malloc.h
NEVER = 2**31 - 1
STEP_BYTES = 64 << 20


def keep_pages() -> bool:
    """Tells the C library to keep freed memory; whether it does.

    Training allocates and frees the same large arrays every epoch. By default each is mapped and unmapped, and the
    kernel zeroes it page by page at the first touch, which costs more than reading it. From now on this process returns
    no memory to the system before it ends. Does nothing where the C library is another than glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(*option) == 1 for option in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, STEP_BYTES))
    )


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident (Linux; 0 elsewhere).

    Not getrusage's figure, which a process inherits from the one that started it.
    """
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0
