"""Memory of a process: its peak, its limit, and memory that an epoch frees and the next one needs again."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from weft.utils.errors import InputError
from weft.utils.terminal import print_message
from weft.utils.units import format_bytes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Options of mallopt, from malloc.h of glibc."""
NEVER_TRIM = -1
"""Trim threshold that is never reached, unlike the largest positive one: 2 GiB of free memory would reach that."""
STEP_BYTES = 64 << 20
"""Bytes by which the heap grows at a time."""
CGROUPS, PROCESS_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Folder of all control groups, and the file that names those of this process."""
PRELOAD = "LD_PRELOAD"
"""Environment variable of libraries that the dynamic linker loads first."""
SEPARATORS = re.compile(r"[\s:]")
"""Characters between the libraries in LD_PRELOAD."""


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory, and return True if it does.

    Training allocates and frees the same large arrays in every epoch. By default each is mapped and unmapped, and the
    kernel zeroes it page by page at the first access, which costs more than reading it. After this call, the process
    returns no memory to the system before it ends, and processes that it starts also get a heap for large arrays
    (`heap_environment`). Does nothing if the C library is not glibc.
    """
    os.environ |= heap_environment()
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(*option) == 1 for option in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER_TRIM), (M_TOP_PAD, STEP_BYTES))
    )


def release_freed_memory() -> None:
    """Return freed memory to the system now, even after `keep_freed_memory`. Does nothing without glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def heap_environment() -> dict[str, str]:
    """Return environment variables that give a new process a separate heap for large arrays (csrc/heap.c).

    Only a starting process can get this heap. In the C library's heap, small blocks get between freed large arrays, so
    that the next array of the same size does not fit.

    Returns none if LD_PRELOAD is already set, if the C library is not glibc, or if the path of the heap has characters
    that separate paths in LD_PRELOAD.
    """
    heap = _heap_file()
    return {PRELOAD: str(heap)} if heap and not SEPARATORS.search(str(heap)) else {}


def warn_without_heap() -> None:
    """Print a warning if this process was started to have the separate heap, and does not have it."""
    heap = _heap_file()
    if heap is None:
        return
    if SEPARATORS.search(str(heap)):
        reason = f"{heap} contains a blank or a colon: install weft in another folder"
    else:
        reason = "the system ignores LD_PRELOAD: use a Python without file capabilities"
    print_message(f"warning: runs without weft's allocator, and needs more time and memory ({reason})")


def _heap_file() -> Path | None:
    """Return the library of the separate heap, or None if there is none or LD_PRELOAD is already set."""
    native = find_spec("weft._native")
    heap = Path(native.origin).with_name("_heap.so") if native and native.origin else Path()
    return heap if PRELOAD not in os.environ and heap.is_file() else None


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
