"""Pipeline: the order in which messages and chunks arrive changes no result, and lost ranks are reported."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.lib.cases import Case
from tests.lib.planted import check_planted, replaced
from tests.lib.ranks import on_ranks, spawn
from tests.lib.session import Given, Session, part_by
from weft.comm import Group, Messages
from weft.nn import Workload
from weft.parallel.chunks.run.chunk_aggregates import ChunkAggregates
from weft.partition import METHODS
from weft.strategies import VertexOptions
from weft.strategies.pipeline.row_order import halo_plan, order_ranks
from weft.strategies.vertex.plan import CommunicatedPlan
from weft.utils.errors import RunError

SLOW = pytest.mark.slow


@pytest.mark.parametrize(("error", "shows"), [("rows_flow", "logits"), ("grads_flow", "gradient")])
def test_a_planted_error_shows(error: str, shows: str) -> None:
    check_planted(3, error, Case(model="gcn"), Given(chunks=3), shows=shows)


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Delay every message and the results of every chunk by a random time."""
    chance = random.Random(seed)

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            time.sleep(chance.random() * 0.004)
            return function(*arguments, **options)

        return wrapped

    with ExitStack() as stack:
        for owner, name in ((Messages, "send"), (ChunkAggregates, "_load"), (ChunkAggregates, "_accumulate")):
            stack.enter_context(replaced(owner, name, late(getattr(owner, name))))
        yield


def check_delays(group: Group, case: Case, options: Given) -> None:
    """Check that no bit of the results depends on when messages arrive and chunks are done."""
    runs: list[list[Tensor]] = []
    for seed in range(3):
        with delays(10 * seed + group.rank):
            placed = Session(case, "pipeline", group, options)
            logits, _ = placed.step(0)
            runs.append([logits.clone(), *placed.gradients().values(), placed.evaluation().clone()])
    for others in runs[1:]:
        for first, other in zip(runs[0], others, strict=True):
            assert torch.equal(first, other)


@pytest.mark.parametrize(
    "case",
    [Case(model="gat", norm="batch"), pytest.param(Case(model="gcn", decoupled=True), marks=SLOW)],
    ids=lambda c: c.id,
)
def test_delays_change_no_bit(case: Case) -> None:
    on_ranks(3, check_delays, case, Given(chunks=4, partition=part_by("random", case, 3)))


class GoneError(Exception):
    """Error of a rank that leaves while others wait for its messages."""


def lose_a_sender(group: Group, number: int) -> str:
    """Let rank 1 leave before it sends a message, by number, and return the error of this rank."""
    placed = Session(Case(model="gcn"), "pipeline", group, Given(chunks=3))
    sent = count()

    def send(*arguments: Any) -> None:
        if group.rank == 1 and next(sent) == number:
            group.close()
            raise GoneError
        right(*arguments)

    right = Messages.send
    with replaced(Messages, "send", send), pytest.raises((RunError, GoneError)) as caught:
        placed.step(0)
    return str(caught.value)


@pytest.mark.slow  # tests/comm/test_exchange.py loses a peer in the quick tests
@pytest.mark.parametrize("number", [0, 4, 10])
def test_a_peer_lost_while_it_sends_is_named(number: int) -> None:
    message, _ = spawn(2, lose_a_sender, number, timeout_seconds=2)
    assert message.startswith("rank 0 lost rank 1 in "), message
    assert "messages 'halo'" in message
    assert "\n" not in message


def lose_connections(group: Group, what: str) -> str:
    """Let Gloo close the connections after a timeout, as after Ctrl-Z and fg, and return the error of this rank."""
    placed = Session(Case(model="gcn"), "pipeline", group, Given(chunks=3))

    def closed(*_: Any, **__: Any) -> None:
        raise RuntimeError("Application timeout caused pair closure")

    with replaced(dist, what, closed), pytest.raises(RunError) as caught:
        placed.step(0)
    return str(caught.value)


@pytest.mark.parametrize("what", ["isend", "irecv"])
def test_closed_connections_are_a_lost_peer(what: str) -> None:
    for rank, message in enumerate(spawn(2, lose_connections, what, timeout_seconds=5)):
        assert message.startswith(f"rank {rank} lost a peer that is alive but late in "), message
        assert message.endswith("(Application timeout caused pair closure)")


@pytest.mark.parametrize("priority", [True, False])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_chunks_wait_for_what_they_read(method: str, priority: bool) -> None:
    """Halo plans contain exactly what the edges of the graph require; with priority, boundary rows come first."""
    case, size, num_chunks = Case(model="gcn", num_vertices=60, weighted=True), 3, 4
    graph, model = case.build()

    part = part_by(method, case, size)
    vertices = CommunicatedPlan(Workload(model, graph), size, VertexOptions(partition=part))
    ranks = order_ranks(vertices.layout.blocks.all_dependencies, priority=priority)
    bounds = [[order.needed.num_own * chunk // num_chunks for chunk in range(num_chunks + 1)] for order in ranks]
    plans = [halo_plan(ranks, bounds, rank, at_once=False) for rank in range(size)]
    chunk_of: dict[int, tuple[int, int]] = {}
    for rank, (order, rank_bounds) in enumerate(zip(ranks, bounds, strict=True)):
        for chunk, (first, end) in enumerate(pairwise(rank_bounds)):
            chunk_of |= dict.fromkeys(order.needed.owned[first:end].tolist(), (rank, chunk))
    source, target = (side.tolist() for side in graph.in_edges.edges())
    for rank, (order, plan) in enumerate(zip(ranks, plans, strict=True)):
        assert plan is not None
        block, rows = order.needed.hops[0].block, order.needed.rows
        endpoints = [rows[side.long()].tolist() for side in block.edges()]
        weights = zip(*endpoints, block.weight.tolist(), strict=True)
        weighted_edges = zip(source, target, graph.in_edges.weight.tolist(), strict=True)
        assert sorted(weights) == sorted(edge for edge in weighted_edges if int(part[edge[1]]) == rank)
        read = [
            {chunk_of[s] for s, t in zip(*endpoints, strict=True) if chunk_of[t][1] == chunk}
            for chunk in range(num_chunks)
        ]
        for chunk, units in enumerate(read):
            local = [number + 1 for owner, number in units if owner == rank]
            assert plan.reads_own[chunk] == max([*local, chunk + 1])
            for owner in set(range(size)) - {rank}:
                remote = [number + 1 for other, number in units if other == owner]
                assert plan.reads[chunk][owner] == max(remote, default=0)
        for owner, number in product(range(size), range(num_chunks)):
            if owner == rank:
                continue
            arrives = rows[plan.receives[owner][number]].tolist()
            other = plans[owner]
            assert other is not None
            assert arrives == ranks[owner].needed.owned[other.sends[number][rank]].tolist()
            assert set(arrives) == {s for s, t in zip(*endpoints, strict=True) if chunk_of[s] == (owner, number)}
            last = max((chunk for chunk in range(num_chunks) if (owner, number) in read[chunk]), default=None)
            assert last is None or (owner, number) in plan.done_after[last]
        assert sum(map(len, plan.done_after)) == sum(span.stop > span.start for each in plan.receives for span in each)
        if priority:
            crossing = {s for s, t in zip(source, target, strict=True) if part[s] != part[t]}
            crossing |= {t for s, t in zip(source, target, strict=True) if part[s] != part[t]}
            owned = order.needed.owned.tolist()
            boundary = crossing & set(owned)
            assert set(owned[: len(boundary)]) == boundary
