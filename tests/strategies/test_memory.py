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
from weft.strategies import get_strategy

GRAPH = "rmat:vertices=2k,edges=12k,features=16,classes=4"
RANKS, NEAR = 2, 0.1


@pytest.mark.parametrize("model", ["gcn", "gat", "gatv2"])
def test_rows_that_come_are_told(model: str) -> None:
    """Those of an attention are there twice at most: gradients go on when what its kernels keep is gone."""
    told, seen = zip(*on_ranks(RANKS, step_bytes, model), strict=True)
    assert max(told) == pytest.approx(max(seen), rel=NEAR)


def step_bytes(group: Group, model: str) -> tuple[int, int]:
    """Of a rank under `communicated`: what its plan says, and what was alive at most."""
    graph = weft.load(GRAPH)
    torch.manual_seed(0)
    made = make_model(model, graph.num_features, graph.num_classes, hidden=64, layers=3)
    plan = get_strategy("communicated")(Workload(made, graph), group.size)
    placed = plan.place(group)
    task = NodeTask(graph, placed.rows, group, placed.empty_rows, placed.rows_device)
    most = 0
    for epoch in range(2):  # the first one makes what is kept
        placed.model.zero_grad()
        (step,) = placed.steps(epoch)
        with TensorPeak() as peak:
            logits = placed.forward(step)
            placed.backward(logits, task.loss(logits, step)[1])
        most = peak.most
    return plan.memory(group.rank), most
