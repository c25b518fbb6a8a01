"""A model's rows' part, run from pause to pause, is its forward pass."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.strategies.cases import Case, cases, pyg_cases, typed_cases
from tests.strategies.session import Session
from weft.comm import Group
from weft.core.random import key
from weft.nn import Total, WholeLayer
from weft.nn.phases import Pause, Resumed
from weft.strategies import Step


def resumed(placed: Session, *, training: bool) -> tuple[Tensor, list[Pause]]:
    """The result of a model that is run part by part, each aggregate made over the whole graph; its pauses."""
    model, strategy, pauses = cast(Any, placed.model), placed.strategy, []
    model.train(training)
    views = [strategy.view(stage, key(7, 0, stage)) for stage in strategy.stages]
    x, after = strategy.inputs.rows, None
    while isinstance(reached := model.resume(len(pauses), views, x, after), Pause):
        pauses.append(reached)
        answer = views[reached.stage].aggregate(*reached.request, reached.steps)
        after = Resumed(answer=answer, rows=reached.rows, shared=reached.shared, note=reached.note)
    return reached, pauses


def test_part_by_part_is_the_whole() -> None:
    """Every case, in training, with the gradients of its parameters, and in an evaluation."""
    for case in (*cases(), *typed_cases(), *pyg_cases()):
        placed = Session(case, "single", Group())
        for training in (True, False):
            whole = placed.strategy.forward(Step(epoch=0, training=training))
            found = []
            for y in (whole, resumed(placed, training=training)[0]):
                placed.model.zero_grad()
                if training:
                    y.square().sum().backward()
                found.append([y.detach(), *placed.gradients().values()])
            for first, second in zip(*found, strict=True):
                torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-12, msg=str(case))


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_pauses_twice_in_training(training: bool) -> None:
    placed = Session(Case(model="gcn", norm="batch"), "single", Group())
    _, pauses = resumed(placed, training=training)
    assert [isinstance(one.request.op, Total) for one in pauses] == (
        [False, True, True, False, True, True, False] if training else [False] * 3
    )
    assert [one.stage for one in pauses] == ([0, 0, 0, 1, 1, 1, 2] if training else [0, 1, 2])


def test_a_decoupled_model_asks_once_for_all_its_products() -> None:
    _, (pause,) = resumed(Session(Case(model="gat", decoupled=True, layers=4), "single", Group()), training=True)
    assert pause.steps == 4
    assert pause.request.op.loops
    assert set(pause.request.source) == {"h", "logit_src"}
    assert set(pause.request.target) == {"logit_dst"}


def test_a_layer_without_phases_is_an_aggregate_itself() -> None:
    _, pauses = resumed(Session(Case(model="SAGEConv", layers=2, hidden=8), "single", Group()), training=True)
    assert [type(one.request.op) for one in pauses] == [WholeLayer] * 2
