"""Blocks of a rank and their halos, whose routes all ranks determine together before the first step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm import Group, Halo, Route, make_route, make_sum_route
from weft.nn import GraphOperation, Sum
from weft.parallel.blocks.blocks import Block, PlacedRows
from weft.partition import Dependencies, Hop

MakeHalo = Callable[[Route, Group, str], Halo]
"""Function that creates a halo from its route, the ranks and a name."""


def make_blocks(
    placed: PlacedRows,
    needed: Dependencies,
    operations: Sequence[GraphOperation],
    covered: Collection[int],
    make_halo: MakeHalo,
) -> list[Block]:
    """Return the block of each aggregate; successive aggregates with the same rows on every rank share one.

    All ranks must call it.
    A block has a halo of source rows if anything but covered sums runs on it.

    Args:
        placed: The plan on this rank.
        needed: What the rank computes and fetches.
        operations: The model's outline.
        covered: Numbers of the aggregates that fetch the fewest rows that can replace the halo.
        make_halo: Function that creates a halo.
    """
    group, hops = placed.group, needed.hops
    fetched = [len(hop.fetched) for hop in hops]
    repeats = [int(number > 0 and hop is hops[number - 1]) for number, hop in enumerate(hops)]
    summed = [sum(hop.cover.summed) if number in covered else 0 for number, hop in enumerate(hops)]
    counts = torch.tensor([fetched, repeats, summed], dtype=torch.int64, device=group.device)
    exchanged, shared, num_sums = group.all_reduce(counts, tag="route").tolist()
    kinds = halo_kinds(
        operations, exchanged=exchanged, shared=[number == group.size for number in shared], summed=num_sums
    )
    blocks: list[Block] = []
    for number, (hop, kind) in enumerate(zip(hops, kinds, strict=True)):
        if kind is None:
            blocks.append(blocks[-1])
            continue
        halo = least_halo = None
        inputs = needed.rows[: hop.num_inputs]
        if kind.least:
            least_halo = make_halo(least_halo_route(hop, inputs, placed), group, f"least halo {number}")
        if kind.whole:
            route = make_route(hop.fetched, hop.received, inputs, len(inputs), group)
            halo = make_halo(route, group, f"halo {number}")
        blocks.append(Block(hop, needed.rows, placed, halo, least_halo))
    return blocks


class HaloKinds(NamedTuple):
    """Halos that a block has."""

    whole: bool
    """True if it has a halo of all missing source rows."""
    least: bool
    """True if it has a halo of the fewest rows that can replace these in sums."""


def halo_kinds(
    operations: Sequence[GraphOperation], *, exchanged: Sequence[int], shared: Sequence[bool], summed: Sequence[int]
) -> list[HaloKinds | None]:
    """Return the halos of each aggregate's block; None if the aggregate shares the block of the one before it.

    Args:
        operations: The model's outline.
        exchanged: Number of rows that ranks fetch before each aggregate, all ranks together.
        shared: True for an aggregate that has the block of the one before it, on all ranks.
        summed: Number of edges of each aggregate in partial sums, if it fetches the fewest rows; else 0.
    """
    kinds: list[HaloKinds | None] = []
    for number, is_shared in enumerate(shared):
        end = next((other for other in range(number + 1, len(shared)) if not shared[other]), len(shared))
        least = any(summed[number:end])
        needs_sources = any(not isinstance(op.op, Sum) and {*op.hops} & {*range(number, end)} for op in operations)
        whole = bool(exchanged[number]) and (needs_sources or not least)
        kinds.append(None if is_shared else HaloKinds(whole, least))
    return kinds


def least_halo_route(hop: Hop, inputs: Tensor, placed: PlacedRows) -> Route:
    """Return the route of the fewest rows that can replace a halo. All ranks must call it.

    Args:
        hop: The aggregate's block, with its cover.
        inputs: Vertices of the block's input rows, int64.
        placed: The plan on this rank.
    """
    cover = hop.cover
    requested = cover.requested.cast(placed.work.dtype)
    edges, num_rows = cover.requested_edges, len(inputs)
    return make_sum_route(requested, hop.fetched, cover.received, edges, inputs, num_rows, placed.group)
