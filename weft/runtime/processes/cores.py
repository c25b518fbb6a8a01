"""CPU cores that this process may use, and each rank's part of them."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


@cache
def cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may use.

    They are ordered by socket, with the hardware threads of a core next to each other.
    """
    return tuple(sorted(os.sched_getaffinity(0), key=_place))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(cores())


def cores_per_rank(parts: int) -> int:
    """Return the number of cores for each of `parts` ranks, at least 1."""
    return max(1, num_cores() // parts)


def rank_cores(part: int, parts: int) -> tuple[int, ...]:
    """Return the cores of a rank: at least one, which ranks share if there are more ranks than cores.

    Args:
        part: Number of the rank on this host.
        parts: Number of ranks on this host.
    """
    first = part * num_cores() // parts
    return cores()[first : max(first + 1, (part + 1) * num_cores() // parts)]


def pin_to_rank_cores(part: int, parts: int) -> None:
    """Restrict all threads of this process to the cores of its rank.

    A waiting rank then leaves its cores to its own network threads. Does nothing if the cores of this process differ
    from those of its parent: somebody has already assigned cores to it.

    Args:
        part: Number of the rank on this host.
        parts: Number of ranks on this host.
    """
    with suppress(OSError):  # the parent has ended, or cores were taken away in the meantime
        if os.sched_getaffinity(0) != os.sched_getaffinity(os.getppid()):
            return
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread), rank_cores(part, parts))


def _place(core: int) -> tuple[int, ...]:
    """Return socket, core and hardware thread of a core number; without this information all cores count alike."""
    folder = TOPOLOGY / f"cpu{core}" / "topology"
    try:
        return (*(int((folder / name).read_text()) for name in ("physical_package_id", "core_id")), core)
    except (OSError, ValueError):
        return (0, core, core)
