"""Partial aggregation by minimum vertex cover: fewer rows are sent, results stay the same, also next to attention."""

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
from weft.strategies import ResidentPlan, Step

CASES = [
    Case(model="gcn", num_vertices=150, weighted=True, layers=2, norm="batch"),
    Case(model="sage", num_vertices=150, decoupled=True),
    Case(model="gin", num_vertices=150, typed="some"),
]
SIZES = [pytest.param(size, marks=pytest.mark.slow if size in (2, 4) else ()) for size in (2, 3, 4)]


def halo_bytes(plan: ResidentPlan) -> int:
    """Return the bytes of rows that all ranks send in a training step."""
    return sum(plan.trace(rank, training=True).bytes_sent["halo"] for rank in range(plan.size))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("without", ["", "ring", "overlap", "cover"])
def test_communicated_equals_single_with_and_without_it(case: Case, size: int, without: str) -> None:
    check_on_ranks(size, replace(case, without=without), "communicated")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_it_sends_fewer_rows_and_aggregates_more_edges(case: Case) -> None:
    for size in (2, 3, 4):
        plan, without = (
            NOTHING.plan("communicated", workload(replace(case, without=optimisation)), size)
            for optimisation in ("", "cover")
        )
        assert halo_bytes(plan) < halo_bytes(without)
        traces, others = ([each.trace(rank, training=True) for rank in range(size)] for each in (plan, without))
        assert sum(trace.edges for trace in traces) > sum(trace.edges for trace in others)
        assert sum(trace.bytes_sent["halo"] for trace in traces) == sum(
            trace.bytes_received["halo"] for trace in traces
        )


def test_hybrid_uses_the_mean_cost_of_rows_under_partial_aggregation() -> None:
    """Partial aggregation sends fewer rows, so hybrid caches no more than without it."""
    case = CASES[0]
    plan, without = (
        Given(machine=MACHINE).plan("hybrid", workload(replace(case, without=optimisation)), 3)
        for optimisation in ("", "cover")
    )
    for rank, needed in enumerate(NOTHING.plan("communicated", workload(case), 3).layout.blocks.all_dependencies):
        layer = needed.hops[1]
        rows_per_source = sum(layer.cover.received) / len(layer.fetched)
        costs, partial_costs = without.layout.blocks.caching_of(rank).costs, plan.layout.blocks.caching_of(rank).costs
        assert rows_per_source < 1
        assert float(partial_costs[1, 2]) == pytest.approx(rows_per_source * float(costs[1, 2]))
        assert torch.equal(partial_costs[0], costs[0])  # constant features
        assert len(plan.layout.blocks.dependencies(rank).rows) <= len(without.layout.blocks.dependencies(rank).rows)


def mixed() -> Stack:
    """Return a model of sums and an attention, which needs the rows of sources over the same edges."""
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
        for (parameter, ours), theirs in zip(placed.model.named_parameters(), whole.model.parameters(), strict=True):
            check_close(ours.grad, theirs.grad, parameter)


@pytest.mark.parametrize("size", SIZES)
def test_sums_and_attention_over_the_same_edges(size: int) -> None:
    on_ranks(size, check_mixed)
