"""Who is missing when a collective fails."""

from __future__ import annotations

import time

from torch.distributed import distributed_c10d

GRACE_SECONDS = 3.0
"""How long a rank that lost a peer waits for the others to say that they live."""


def missing_ranks(rank: int, size: int) -> str:
    """Return the names of the ranks that do not sign in at the store within `GRACE_SECONDS`; `rank` signs in itself."""
    try:
        store = distributed_c10d.PrefixStore("weft/alive", distributed_c10d._get_default_store())
        store.set(str(rank), "here")
        deadline = time.monotonic() + GRACE_SECONDS
        silent = list(range(size))
        while silent and time.monotonic() < deadline:
            silent = [one for one in silent if not store.check([str(one)])]
            time.sleep(0.05)
    except RuntimeError:
        return "a peer"
    return " and ".join(f"rank {one}" for one in silent) or "a peer that lives but is late"
