"""Search for the ranks that are missing when a collective fails."""

from __future__ import annotations

import time

from torch.distributed import distributed_c10d

GRACE_SECONDS = 3.0
"""Seconds that a rank which lost a peer waits for the others to sign in."""


def missing_ranks(rank: int, size: int) -> str:
    """Return the names of the ranks that do not sign in at the store within `GRACE_SECONDS`.

    Args:
        rank: Number of this rank, which signs in too.
        size: Number of ranks.
    """
    try:
        store = distributed_c10d.PrefixStore("weft/alive", distributed_c10d._get_default_store())
        store.set(str(rank), "here")
        deadline = time.monotonic() + GRACE_SECONDS
        silent = list(range(size))
        while silent and time.monotonic() < deadline:
            silent = [other for other in silent if not store.check([str(other)])]
            time.sleep(0.05)
    except RuntimeError:
        return "a peer"
    return " and ".join(f"rank {other}" for other in silent) or "a peer that is alive but late"
