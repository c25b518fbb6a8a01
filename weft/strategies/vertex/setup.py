"""What ranks agree on before the first step: their blocks, and the halos that bring what these lack."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from weft.comm import Group, Halo, Route, make_route, make_sum_route
from weft.nn import GraphOperation, Sum
from weft.partition import Dependencies, Hop
from weft.strategies.resident import ResidentPlaced
from weft.strategies.vertex.blocks import Block

MakeHalo = Callable[[Route, Group, str], Halo]


def make_blocks(
    placed: ResidentPlaced,
    needed: Dependencies,
    asked: Sequence[GraphOperation],
    covered: Collection[int],
    make_halo: MakeHalo,
) -> list[Block]:
    """The block of each aggregate; those that have the same rows on every rank are one. All ranks call it.

    asked: by the model. covered: the aggregates that fetch the fewest rows, if these are fewer. The halo of sources is
    made where anything but such sums goes over the edges.
    """
    group, hops = placed.group, needed.hops
    fetched = [len(hop.fetched) for hop in hops]
    repeated = [int(number > 0 and hop is hops[number - 1]) for number, hop in enumerate(hops)]
    summed = [sum(hop.cover.summed) if number in covered else 0 for number, hop in enumerate(hops)]
    counts = torch.tensor([fetched, repeated, summed], dtype=torch.int64, device=group.device)
    exchanged, shared, combined = group.all_reduce(counts, tag="route").tolist()
    blocks: list[Block] = []
    for number, hop in enumerate(hops):
        if shared[number] == group.size:
            blocks.append(blocks[-1])
            continue
        end = next((other for other in range(number + 1, len(hops)) if shared[other] < group.size), len(hops))
        combining = any(combined[number:end])
        others = any(not isinstance(op.op, Sum) and {*op.hops} & {*range(number, end)} for op in asked)
        halo = least = None
        inputs = needed.rows[: hop.num_inputs]
        if combining:
            least = make_halo(least_halo_route(hop, inputs, placed), group, f"least halo {number}")
        if exchanged[number] and (others or not combining):
            route = make_route(hop.fetched, hop.received, inputs, len(inputs), group)
            halo = make_halo(route, group, f"halo {number}")
        blocks.append(Block(hop, needed.rows, placed, halo, least))
    return blocks


def least_halo_route(hop: Hop, inputs: Tensor, placed: ResidentPlaced) -> Route:
    """The route of a hop's cover; inputs: int64, the vertices of its inputs. All ranks call it."""
    cover = hop.cover
    asked = cover.asked.cast(placed.work.dtype)
    edges, num_rows = cover.edges_asked, len(inputs)
    return make_sum_route(asked, hop.fetched, cover.received, edges, inputs, num_rows, placed.group)
