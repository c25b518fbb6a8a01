"""The processor's cores that this process may use, and a rank's share of them."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


@cache
def cores() -> tuple[int, ...]:
    """Numbers of those that were given to this process, by socket, and a core's threads one after the other."""
    return tuple(sorted(os.sched_getaffinity(0), key=_place))


def num_cores() -> int:
    """How many were given to this process."""
    return len(cores())


def cores_per_rank(parts: int) -> int:
    """How many each of so many ranks has, at least 1."""
    return max(1, num_cores() // parts)


def rank_cores(part: int, parts: int) -> tuple[int, ...]:
    """Those of one of so many ranks: at least one, which others have as well where there are more ranks than cores."""
    first = part * num_cores() // parts
    return cores()[first : max(first + 1, (part + 1) * num_cores() // parts)]


def pin_to_rank_cores(part: int, parts: int) -> None:
    """From now on, all threads of this process run on its share: a rank that waits leaves its cores to its own network.

    Nothing, where this process has other cores than the one that started it: somebody has given it some already.
    """
    with suppress(OSError):  # a parent that is gone, or cores that were taken away meanwhile
        if os.sched_getaffinity(0) != os.sched_getaffinity(os.getppid()):
            return
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread), rank_cores(part, parts))


def _place(core: int) -> tuple[int, ...]:
    """Its socket, its core in there, and its thread; where the system does not tell, cores are alike."""
    folder = TOPOLOGY / f"cpu{core}" / "topology"
    try:
        return (*(int((folder / name).read_text()) for name in ("physical_package_id", "core_id")), core)
    except (OSError, ValueError):
        return (0, core, core)
