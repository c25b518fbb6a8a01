"""Memory that an epoch frees and the next one needs again, and the heap for large arrays."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from importlib.util import find_spec
from pathlib import Path

from weft.utils.log import LOGGER

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""Options of mallopt, from malloc.h of glibc."""
NEVER_TRIM = -1
"""Trim threshold that is never reached, unlike the largest positive one: 2 GiB of free memory would reach that."""
MAPPED_BYTES, MAPPED_ARRAYS = 1 << 20, 1 << 16
"""Least bytes and largest number of arrays that are mapped on their own, with `map_large_arrays`."""
STEP_BYTES = 64 << 20
"""Bytes by which the heap grows at a time."""
HEAP_FILE = "_heap.so"
"""File of the separate heap, next to the native module."""
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


def map_large_arrays() -> bool:
    """Tell the C library to return large arrays to the system as soon as they are freed, and return True if it does.

    This undoes `keep_freed_memory`: steps take more time, but freed arrays fragment no memory. Does nothing without
    glibc, or in a process with the separate heap (`heap_environment`), which needs neither.
    """
    try:
        if HEAP_FILE in Path("/proc/self/maps").read_text():
            return False
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    options = (M_MMAP_THRESHOLD, MAPPED_BYTES), (M_MMAP_MAX, MAPPED_ARRAYS), (M_TRIM_THRESHOLD, MAPPED_BYTES)
    return all(mallopt(*option) == 1 for option in options)


def release_freed_memory() -> None:
    """Return freed memory to the system now, even after `keep_freed_memory`. Does nothing without glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def release_pages_of(address: int, num_bytes: int) -> None:
    """Return the whole pages of a part of an array to the system, although the array stays allocated.

    Their data is lost; a page that belongs only partly to the range stays. Does nothing without glibc.

    Args:
        address: Begin of the part, in private memory that maps no file.
        num_bytes: Size of the part.
    """
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        if end > first:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
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
    LOGGER.warning(f"runs without weft's allocator, and needs more time and memory ({reason})")


def _heap_file() -> Path | None:
    """Return the library of the separate heap, or None if there is none or LD_PRELOAD is already set."""
    native = find_spec("weft._native")
    heap = Path(native.origin).with_name(HEAP_FILE) if native and native.origin else Path()
    return heap if PRELOAD not in os.environ and heap.is_file() else None
