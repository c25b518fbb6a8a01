"""What caching or fetching a remote vertex costs, level by level (NeutronStar, section 3, equations 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.cost import Machine
from weft.nn import GraphOperation, Sum, Workload
from weft.partition import Caching
from weft.strategies.resident import BACK_BYTES, EDGE_BYTES

NOMINAL = Machine(seconds_per_flop=4e-11, seconds_per_edge=3e-10, seconds_per_byte=2e-9)
"""Of no machine in particular: about what four ranks on two cores measured at 5 Gbit/s."""


def caching_costs(
    work: Workload,
    operations: Sequence[GraphOperation],
    machine: Machine,
    *,
    ratio: float | None,
    max_bytes: int | None,
) -> Caching:
    """The costs of a training step of a workload with these operations.

    A row of level h costs its maps since the aggregate before, T_v, and that aggregate over its in-edges, T_e; fetching
    it, T_c both ways. What is kept from epoch to epoch costs nothing.
    """
    itemsize, stats = work.itemsize, work.stats
    num_features = stats.num_features or stats.typed.mean_width
    embedded = sum(asked.share * asked.width * directions(asked) for asked in operations if asked.op == "embed")
    num_levels = max((asked.hops.stop for asked in operations), default=0)
    costs = torch.zeros(num_levels, 5, dtype=torch.float64)
    widths = [num_features / 2] + [0.0] * num_levels  # features have no gradient
    first = 0
    for level in range(num_levels):
        here = [asked for asked in operations if level in asked.hops]
        fetched = [asked for asked in here if is_fetched(asked, level)]
        numbers = sum(fetched_width(asked, level) * directions(asked) for asked in fetched)
        flops = sum(asked.flops for asked in here if level == asked.hop)
        maps = 3 if level > first else 2  # forward, the weights' gradient and, but for constants, the rows'
        widths[level + 1] = sum(asked.width for asked in here)
        costs[level, 0] = machine.seconds_per_flop * flops * maps
        if level == 0:  # the row of a cached vertex is fetched where it is trained
            costs[level, 0] += machine.seconds_per_byte * itemsize * embedded
        costs[level, 2] = machine.seconds_per_byte * itemsize * numbers
        costs[level, 3] = 2 * itemsize * (widths[level] + widths[level + 1])
        costs[level, 4] = EDGE_BYTES + BACK_BYTES if level else 0
        passes = sum(edge_width(asked, level) * directions(asked) for asked in here if not work.is_cached(asked))
        if level + 1 < num_levels:
            costs[level + 1, 1] = machine.seconds_per_edge * passes
        if level == 0 and not fetched:
            first = 1
    return Caching(costs=costs, first=first, ratio=ratio, max_bytes=max_bytes)


def is_fetched(asked: GraphOperation, hop: int) -> bool:
    """Whether sources of this aggregate cross the network: all but the constant features, and what is made of them."""
    return hop > asked.hop or asked.origin == "rows"


def is_sum(asked: GraphOperation, hop: int) -> bool:
    """Whether it adds up sources that cross the network, so that partial results may cross instead."""
    return isinstance(asked.op, Sum) and is_fetched(asked, hop)


def fetched_width(asked: GraphOperation, hop: int) -> int:
    """Numbers of a fetched row: its columns, and once what logits need of a source besides, which serve all steps."""
    return asked.width + (asked.separate_logit_width if hop == asked.hop else 0)


def edge_width(asked: GraphOperation, hop: int) -> int:
    """Columns that an aggregate reads by edge, and once those of logits that need both ends."""
    return asked.width + (asked.logit_width - asked.separate_logit_width if hop == asked.hop else 0)


def directions(asked: GraphOperation) -> int:
    """Forward, and backward where a gradient flows."""
    return 1 + asked.backward
