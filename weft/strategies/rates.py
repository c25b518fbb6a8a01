"""How fast rows move on this machine: what equation 4 of HongTu (section 5.3) weighs."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from weft.comm import Group
from weft.core.host import host_rows
from weft.partition import Rates
from weft.strategies.probe import least_seconds

ROWS, WIDTH = 1 << 14, 64


def measured_rates(group: Group, folder: Path | None) -> Rates:
    """How fast rows move from the host, between ranks and on the device, as the slowest rank has it.

    As ratios to the first, to powers of two: noise is not to decide the order of chunks, which two runs are to share.
    folder: that of the host's files.
    """
    rows = host_rows(ROWS, WIDTH, torch.float32, device=group.device, folder=folder)
    buffer = torch.zeros(ROWS, WIDTH, device=group.device)
    every = torch.arange(ROWS)
    counts = [ROWS * WIDTH // group.size] * group.size
    some = buffer.view(-1)[: sum(counts)]
    moves = (
        lambda: rows.gather(every, buffer, every),
        lambda: group.all_to_all(some, counts, counts, tag="probe"),
        lambda: buffer.index_select(0, every.to(group.device)),
    )
    found = [ROWS / least_seconds(move, group) for move in moves]
    rows.close()
    slowest = [
        min(each) for each in zip(*(one["rates"] for one in group.all_gather_object({"rates": found})), strict=True)
    ]
    return Rates(*(2.0 ** round(math.log2(rate / slowest[0])) for rate in slowest))
