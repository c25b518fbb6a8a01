"""Memory that this process may use, and the most that it has used."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from weft.utils.errors import InputError
from weft.utils.units import format_bytes

CGROUPS, PROCESS_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Folder of all control groups, and the file that names those of this process."""


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes (Linux; 0 elsewhere).

    Not from getrusage, whose value a process inherits from the one that started it.
    """
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(match.group(1)) * 1024 if match else 0


def memory_limit_bytes() -> int:
    """Return the memory that this process may use: that of the machine, a container's limit, or `ulimit -v`."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    process_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if process_limit != resource.RLIM_INFINITY:
        limits.append(process_limit)
    return min([*limits, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    """Yield the memory limits, in bytes, of the control groups of this process and of their parents (v1 and v2)."""
    for line in PROCESS_CGROUPS.read_text().splitlines() if PROCESS_CGROUPS.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        innermost = root / path.lstrip("/")
        for folder in (innermost, *innermost.parents):
            limit_file = folder / name
            if (
                folder.is_relative_to(root)
                and limit_file.is_file()
                and (text := limit_file.read_text().strip()).isdecimal()
            ):
                yield int(text)


def check_fits_memory(num_bytes: int, what: str, remedy: str) -> None:
    """Check that an allocation fits the memory limit, before making it.

    Args:
        num_bytes: Size of the allocation.
        what: Subject of the error message.
        remedy: Remedy in the error message.

    Raises:
        InputError: The allocation is larger than the limit.
    """
    limit = memory_limit_bytes()
    if num_bytes > limit:
        needed, available = format_bytes(num_bytes), format_bytes(limit)
        raise InputError(f"{what} would need {needed} of memory, but only {available} are available: {remedy}")
