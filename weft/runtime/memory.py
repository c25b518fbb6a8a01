"""What a process holds and may hold: its peak, its limit, and the memory that an epoch frees for the next one."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from weft.runtime.stop_request import SIGNALS
from weft.utils.errors import InputError
from weft.utils.units import format_bytes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # glibc's malloc.h
NEVER = -1  # a large number would still trim a heap that ends in 2 GiB of free memory
STEP_BYTES = 64 << 20
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
PRELOAD = "LD_PRELOAD"


def keep_freed_memory() -> bool:
    """Tells the C library to keep freed memory, here and in processes started from here; whether it does.

    Training allocates and frees the same large arrays every epoch. By default each is mapped and unmapped, and the
    kernel zeroes it page by page at the first touch, which costs more than reading it. From now on this process returns
    no memory to the system before it ends; those that it starts have a heap of large arrays besides. Does nothing where
    the C library is another than glibc.
    """
    os.environ |= heap_environment()
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(*option) == 1 for option in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, STEP_BYTES))
    )


def release_freed_memory() -> None:
    """Returns freed memory to the system now, even where it is kept otherwise; nothing where glibc is not there."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def heap_environment() -> dict[str, str]:
    """The environment of a process that is to have a heap of its own for large arrays (csrc/heap.c).

    Nothing where LD_PRELOAD is set, to this or to anything else, or where the C library is another than glibc.
    """
    native = find_spec("weft._native")
    heap = Path(native.origin).with_name("_heap.so") if native and native.origin else Path()
    return {PRELOAD: str(heap)} if PRELOAD not in os.environ and heap.is_file() else {}


def restart_with_heap() -> None:
    """Replaces this process by itself, with a heap for large arrays that only a process that starts can have.

    In the C library's, small pieces come to lie between large arrays that were freed, so that the next of the same size
    does not fit there. Does nothing where there is none to be had; see `heap_environment`.
    """
    if found := heap_environment():
        os.environ |= found
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the new one listens
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident (Linux; 0 elsewhere).

    Not getrusage's figure, which a process inherits from the one that started it.
    """
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


def memory_limit_bytes() -> int:
    """The most memory that this process may take: the machine's, or less under a container's limit or `ulimit -v`."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    process_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if process_limit != resource.RLIM_INFINITY:
        limits.append(process_limit)
    return min([*limits, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    """Bytes that the process's cgroups allow it, and those that these are in, of either version of cgroups."""
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            stated = folder / name
            if folder.is_relative_to(root) and stated.is_file() and (said := stated.read_text().strip()).isdecimal():
                yield int(said)


def check_fits_memory(num_bytes: int, what: str, remedy: str) -> None:
    """Raises InputError where `what` would take more memory than there is; to be called before it is taken."""
    limit = memory_limit_bytes()
    if num_bytes > limit:
        needed, found = format_bytes(num_bytes), format_bytes(limit)
        raise InputError(f"{what} would take {needed} of memory, and there are {found}: {remedy}")
