"""How fast rows move on this machine: what equation 4 of HongTu (section 5.3) weighs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from weft.comm import Group
from weft.core.host import host_rows
from weft.partition import Rates

ROWS, WIDTH, TRIES = 1 << 14, 64, 3


def measured_rates(group: Group) -> Rates:
    """Rows a second from the host, between ranks and on the device, as the slowest rank has them."""
    rows = host_rows(ROWS, WIDTH, torch.float32, device=group.device)
    buffer = torch.zeros(ROWS, WIDTH, device=group.device)
    every = torch.arange(ROWS)
    counts = [ROWS * WIDTH // group.size] * group.size
    some = buffer.view(-1)[: sum(counts)]
    found = (
        rate(group, lambda: rows.gather(every, buffer, every)),
        rate(group, lambda: group.all_to_all(some, counts, counts, tag="probe")),
        rate(group, lambda: buffer.index_select(0, every.to(group.device))),
    )
    rows.close()
    slowest = [min(each) for each in zip(*(one["rates"] for one in group.share({"rates": found})), strict=True)]
    return Rates(*slowest)


def rate(group: Group, move: Callable[[], object]) -> float:
    """Rows a second of what moves all of them, the best of some tries."""
    best = float("inf")
    for _ in range(TRIES):
        group.synchronize()
        start = time.perf_counter()
        move()
        group.synchronize()
        best = min(best, time.perf_counter() - start)
    return ROWS / best
