"""Ranks agree on where they meet, also next to what former processes left in the store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch import distributed as dist

from weft.comm.join import _new_store_part

SECONDS = timedelta(seconds=30)


def test_ranks_meet_next_to_names_of_former_processes() -> None:
    """Each group meets in a part of its own, whichever rank comes first and however often its host was restarted."""
    store = dist.HashStore()

    def meet(rank: int, delay: float) -> str:
        time.sleep(delay)
        part = _new_store_part(store, rank, 3, SECONDS)
        part.set(f"value {rank}", str(delay))
        values = "".join(part.get(f"value {other}").decode() for other in range(3))
        part.set(f"done {rank}", "")
        part.wait([f"done {other}" for other in range(3)])
        return values

    for delays in ((0.0, 0.1, 0.2), (0.3, 0.0, 0.1)):
        store.set("name 1", "former")
        with ThreadPoolExecutor(3) as threads:
            results = list(threads.map(meet, range(3), delays))
        assert results == ["".join(map(str, delays))] * 3


def test_a_missing_rank_is_waited_for_until_the_timeout() -> None:
    store = dist.HashStore()
    store.set("name 1", "former")
    with pytest.raises(RuntimeError, match="not all ranks"):
        _new_store_part(store, 0, 2, timedelta(seconds=0.1))
