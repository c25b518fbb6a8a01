"""Losses and gradients of steps on some vertices equal those of PyTorch on the same vertices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.lib.ranks import spawn
from tests.lib.session import NOTHING
from tests.training.test_link_prediction import Case
from tests.training.test_row_batching import labelled
from weft.comm import Group
from weft.nn import Workload
from weft.strategies import Step
from weft.training.tasks.metrics import NodeTask

NUM_VERTICES = 103


def random_rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check_nodes(group: Group, multilabel: bool) -> None:
    graph = labelled(NUM_VERTICES, multilabel=multilabel)
    assert graph.y is not None
    assert graph.train_mask is not None
    row_ids, logits = torch.arange(group.rank, NUM_VERTICES, group.size), random_rows(NUM_VERTICES, 5).requires_grad_()
    task = NodeTask(graph, row_ids, group)
    trained = (graph.train_mask if multilabel else graph.train_mask & (graph.y >= 0)).nonzero().view(-1)
    of_loss = functional.binary_cross_entropy_with_logits if multilabel else functional.cross_entropy
    y = graph.y.double() if multilabel else graph.y
    for number, batch in enumerate(trained.split(7)):
        local_batch = batch[batch % group.size == group.rank]
        step = Step(epoch=3, number=number, training=True, vertices=local_batch, batch_size=len(batch))
        expected = of_loss(logits[batch], y[batch])
        (expected_grad,) = torch.autograd.grad(expected, logits)
        loss, grad = task.loss(logits.detach()[local_batch], step)
        total = sum(report["loss"] for report in group.all_gather_object({"loss": loss.item()}))
        assert total == pytest.approx(expected.item(), abs=1e-12)
        torch.testing.assert_close(grad, expected_grad[local_batch], rtol=0, atol=1e-12)


def check_all_nodes(group: Group) -> None:
    for multilabel in (False, True):
        check_nodes(group, multilabel)


@pytest.mark.parametrize("size", [1, 2])
def test_nodes(size: int) -> None:
    spawn(size, check_all_nodes)


def test_each_step_of_an_epoch_has_other_dropout_masks() -> None:
    """The first step has the mask of an epoch of one step."""
    graph, model = Case(graph="directed").build()
    strategy = NOTHING.plan("single", Workload(model, graph)).place(Group(), seed=3)
    alone, first, second = (
        strategy.forward(Step(epoch=2, training=True, **more)) for more in ({}, {"number": 0}, {"number": 1})
    )
    assert torch.equal(alone, first)
    assert not torch.equal(first, second)
