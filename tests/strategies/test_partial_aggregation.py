"""The least halo under vertex strategies: fewer rows, the same numbers, beside halos of sources where one is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.lib.cases import MACHINE, Case
from tests.lib.graphs import NUM_CLASSES, NUM_FEATURES
from tests.lib.ranks import on_ranks
from tests.lib.session import NOTHING, Given, check_close, check_counts, check_on_ranks, workload
from weft.comm import Group
from weft.nn import Stack, Workload
from weft.nn.layers.conv import GATConv, GCNConv, SAGEConv
from weft.strategies import Step
from weft.strategies.vertex.plan import VertexPlan

CASES = [
    Case(model="gcn", num_vertices=150, weighted=True, layers=2, norm="batch"),
    Case(model="sage", num_vertices=150, decoupled=True),
    Case(model="gin", num_vertices=150, typed="some"),
]
SIZES = [pytest.param(size, marks=pytest.mark.slow if size in (2, 4) else ()) for size in (2, 3, 4)]


def halo_bytes(plan: VertexPlan) -> int:
    """What all ranks send of rows in a training step."""
    return sum(plan.trace(rank, training=True).bytes_sent["halo"] for rank in range(plan.size))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("without", ["", "ring", "overlap", "cover"])
def test_with_and_without_it_communicated_equals_single(case: Case, size: int, without: str) -> None:
    check_on_ranks(size, replace(case, without=without), "communicated")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_it_sends_fewer_rows_and_aggregates_an_edge_more_for_each_partial_result(case: Case) -> None:
    for size in (2, 3, 4):
        plan, without = (
            NOTHING.plan("communicated", workload(replace(case, without=one)), size) for one in ("", "cover")
        )
        assert halo_bytes(plan) < halo_bytes(without)
        traces, others = ([each.trace(rank, training=True) for rank in range(size)] for each in (plan, without))
        assert sum(one.edges for one in traces) > sum(one.edges for one in others)
        assert sum(one.bytes_sent["halo"] for one in traces) == sum(one.bytes_received["halo"] for one in traces)


def test_hybrid_pays_for_a_row_of_a_sum_what_the_cover_does_on_the_mean() -> None:
    """So it caches no more than where each row of a source is paid."""
    case = CASES[0]
    plan, without = (
        Given(machine=MACHINE).plan("hybrid", workload(replace(case, without=one)), 3) for one in ("", "cover")
    )
    for rank, needed in enumerate(NOTHING.plan("communicated", workload(case), 3).all_dependencies):
        hop = needed.hops[1]
        share = sum(hop.cover.received) / len(hop.fetched)
        costs, paid = without.caching_of(rank).costs, plan.caching_of(rank).costs
        assert share < 1
        assert float(paid[1, 2]) == pytest.approx(share * float(costs[1, 2]))
        assert torch.equal(paid[0], costs[0])  # constant features
        assert len(plan.dependencies(rank).rows) <= len(without.dependencies(rank).rows)


def mixed() -> Stack:
    """Sums, and between them attention, which wants the rows of sources over the same edges."""
    torch.manual_seed(1)
    layers = [GCNConv(NUM_FEATURES, 6), GATConv(6, 6, heads=2), SAGEConv(6, 6), GCNConv(6, NUM_CLASSES)]
    return Stack(layers).double()


def check_mixed(group: Group) -> None:
    graph, _ = CASES[0].build()
    work, step = Workload(mixed(), graph), Step(epoch=0, training=True)
    whole = NOTHING.plan("single", work).place(Group())
    expected = whole.forward(step)
    expected.backward(torch.ones_like(expected))
    for name in ("communicated", "hybrid"):
        plan = Given(machine=MACHINE).plan(name, work, group.size)
        trace = plan.trace(group.rank, training=True)
        placed = plan.place(group)
        group.meter.take("train")
        with group.meter.during("train"):
            logits = placed.forward(step)
            placed.backward(logits, torch.ones_like(logits))
        check_counts(group.meter.take("train"), trace, CASES[0])
        check_close(logits.detach(), expected.detach()[placed.rows], name)
        for (parameter, mine), theirs in zip(placed.model.named_parameters(), whole.model.parameters(), strict=True):
            check_close(mine.grad, theirs.grad, parameter)


@pytest.mark.parametrize("size", SIZES)
def test_sums_and_attention_over_the_same_edges(size: int) -> None:
    on_ranks(size, check_mixed)
