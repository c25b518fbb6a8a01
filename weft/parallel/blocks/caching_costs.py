"""Costs of caching or fetching a remote vertex at each layer boundary (NeutronStar, section 3, equations 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.cost import Machine
from weft.nn import GraphOperation, Workload
from weft.parallel.blocks.blocks import fetched_width, is_fetched
from weft.partition import Caching

EDGE_BYTES, BACK_BYTES = 4, 8
"""Bytes of an edge in the adjacency (source), and in the transpose that gradients need (target, and edge position)."""
NOMINAL = Machine(seconds_per_flop=4e-11, seconds_per_edge=3e-10, seconds_per_byte=2e-9)
"""Default cost factors, about those of four ranks on two CPU cores at 5 Gbit/s."""


def caching_costs(
    work: Workload,
    operations: Sequence[GraphOperation],
    machine: Machine = NOMINAL,
    *,
    ratio: float | None,
    max_bytes: int | None = None,
) -> Caching:
    """Return the costs of a training step for each remote vertex, by which `hybrid` chooses.

    A row at a layer boundary can be computed, at T_v per FLOP of the dense layers before it and T_e per edge and column
    of the aggregate before it, or fetched, at T_c per byte in both directions. What is cached from epoch to epoch costs
    nothing.

    Args:
        work: The workload.
        operations: The model's outline.
        machine: Cost factors T_v, T_e and T_c.
        ratio: Share of remote vertices to cache at each boundary; None: wherever it costs less.
        max_bytes: Limit of a rank's cached vertices in bytes; None: no limit.
    """
    itemsize, stats = work.itemsize, work.stats
    num_features = stats.num_features or stats.typed.mean_width
    embedded = sum(op.vertex_fraction * op.width * directions(op) for op in operations if op.op == "embed")
    num_boundaries = max((op.hops.stop for op in operations), default=0)
    costs = torch.zeros(num_boundaries, 5, dtype=torch.float64)
    widths = [num_features / 2] + [0.0] * num_boundaries  # features have no gradient
    first_costly = 0
    # For each layer boundary, the columns of `costs` are:
    # 0: seconds to compute a row with dense layers (and, for the first one, to fetch its embedding row),
    # 1: seconds per in-edge of the aggregate before it,
    # 2: seconds to fetch a row for the aggregates after it,
    # 3: bytes of a cached row before and after the aggregate, with gradients,
    # 4: bytes of an in-edge in the block that computes it.
    for boundary in range(num_boundaries):
        current = [op for op in operations if boundary in op.hops]
        fetched = [op for op in current if is_fetched(op, boundary)]
        numbers = sum(fetched_width(op, boundary) * directions(op) for op in fetched)
        flops = sum(op.flops for op in current if boundary == op.hop)
        dense_passes = 3 if boundary > first_costly else 2  # forward, gradients of weights, and of rows unless constant
        widths[boundary + 1] = sum(op.width for op in current)
        costs[boundary, 0] = machine.seconds_per_flop * flops * dense_passes
        if boundary == 0:  # the embedding row of a cached vertex still comes from its owner
            costs[boundary, 0] += machine.seconds_per_byte * itemsize * embedded
        costs[boundary, 2] = machine.seconds_per_byte * itemsize * numbers
        costs[boundary, 3] = 2 * itemsize * (widths[boundary] + widths[boundary + 1])
        costs[boundary, 4] = EDGE_BYTES + BACK_BYTES if boundary else 0
        passes = sum(edge_width(op, boundary) * directions(op) for op in current if not work.is_cached(op))
        if boundary + 1 < num_boundaries:
            costs[boundary + 1, 1] = machine.seconds_per_edge * passes
        if boundary == 0 and not fetched:
            first_costly = 1
    return Caching(costs=costs, first=first_costly, ratio=ratio, max_bytes=max_bytes)


def edge_width(op: GraphOperation, hop: int) -> int:
    """Return the number of columns that an aggregate reads per edge. Its first step also reads attention logits.

    Args:
        op: The aggregate.
        hop: Number of the aggregate over edges.
    """
    return op.width + (op.logit_width - op.separate_logit_width if hop == op.hop else 0)


def directions(op: GraphOperation) -> int:
    """Return 1 for an operation that is only run forward, and 2 if a gradient flows back through it."""
    return 1 + op.backward
