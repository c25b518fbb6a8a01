"""The bytes that a plan says a step makes, beside those of the tensors that are alive while ranks run it."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.ranks import on_ranks
from weft.comm import Group
from weft.core.tensor_peak import TensorPeak
from weft.engine.metrics import NodeTask
from weft.nn import Workload, make_model
from weft.strategies import Plan, get_strategy
from weft.strategies.resident import ResidentPlan
from weft.strategies.vertex.plan import CommunicatedPlan
from weft.strategies.vertex.stale import StalePlan

GRAPH = "rmat:vertices=2k,edges=12k,features=16,classes=4"
RANKS, NEAR = 2, 0.1


@pytest.mark.parametrize("model", ["gcn", "gat", "gatv2"])
@pytest.mark.parametrize("strategy", ["communicated", "cached", "hybrid", "stale"])
def test_rows_that_come_are_told(strategy: str, model: str) -> None:
    """Those of an attention are there twice at most: gradients go on when what its kernels keep is gone."""
    told, seen = zip(*on_ranks(RANKS, step_bytes, strategy, model), strict=True)
    assert max(told) == pytest.approx(max(seen), rel=NEAR)


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_old_halos_are_told(model: str) -> None:
    """A step that exchanges leaves as much anew, which one that does not leaves alone; sums over the least rows too."""
    for told, seen in on_ranks(RANKS, table_bytes, model):
        assert told == seen > 0


def table_bytes(group: Group, model: str) -> tuple[int, int]:
    """Of the halos that a rank keeps under `stale`: what its plan says, and what a later exchange makes."""
    work = workload(model)
    plan, without = (get_strategy(strategy)(work, group.size) for strategy in ("stale", "communicated"))
    assert isinstance(plan, StalePlan)
    assert isinstance(without, CommunicatedPlan)
    every = plan.options.refresh_every
    left = [alive for _, alive in step_peaks(plan, group, epochs=every + 2)]
    told = plan.kept(group.rank).device - without.kept(group.rank).device
    return told, left[every] - left[every + 1]


@pytest.mark.parametrize("model", ["sage", "gat"])
@pytest.mark.parametrize("strategy", ["tensor", "communicated"])
def test_narrow_rows_take_less(strategy: str, model: str) -> None:
    """Little more than half: the rest is sums before they are rounded."""
    told, seen = zip(*on_ranks(RANKS, step_bytes, strategy, model, torch.bfloat16), strict=True)
    _, wide = zip(*on_ranks(RANKS, step_bytes, strategy, model), strict=True)
    assert max(told) == pytest.approx(max(seen), rel=NEAR)
    assert max(seen) < 0.75 * max(wide)


def step_bytes(group: Group, strategy: str, model: str, rows: torch.dtype | None = None) -> tuple[int, int]:
    """Of a rank: what its plan says, and what was alive at most in a step after the first, which makes what is kept.

    rows: their type, if it is not the parameters'.
    """
    work = workload(model)
    work.model.row_dtype = rows  # type: ignore[assignment]
    plan = get_strategy(strategy)(work, group.size)
    assert isinstance(plan, ResidentPlan)
    return plan.memory(group.rank), step_peaks(plan, group, epochs=2)[-1][0]


def workload(model: str) -> Workload:
    graph = weft.load(GRAPH)
    torch.manual_seed(0)
    return Workload(make_model(model, graph.num_features, graph.num_classes, hidden=64, layers=3), graph)


def step_peaks(plan: Plan, group: Group, *, epochs: int) -> list[tuple[int, int]]:
    """The bytes of each training step's tensors: at most, and behind it."""
    placed = plan.place(group)
    task = NodeTask(plan.work.graph, placed.rows, group, placed.empty_rows, placed.rows_device)
    found = []
    for epoch in range(epochs):
        placed.model.zero_grad()
        (step,) = placed.steps(epoch)
        with TensorPeak() as peak:
            logits = placed.forward(step)
            placed.backward(logits, task.loss(logits, step)[1])
        found.append((peak.most, peak.alive))
    return found
