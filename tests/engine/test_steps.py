"""Steps that read some of the rows: losses, gradients and scores are those of these rows alone, computed densely."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.engine.test_blocks import labelled
from tests.engine.test_link import Case
from tests.ranks import spawn
from tests.strategies.session import NOTHING
from weft.comm import Group
from weft.data import Links, negative_key
from weft.engine.link import LinkTask
from weft.engine.metrics import SPLITS, NodeTask
from weft.nn import Workload
from weft.strategies import Step

NUM_VERTICES = 103


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ranks_rows(group: Group, num_vertices: int) -> Tensor:
    return torch.arange(group.rank, num_vertices, group.size)


def batches(own: Tensor) -> list[tuple[Tensor, Step]]:
    """Steps of an epoch: which vertices each reads, of all ranks, and the step of this rank; the last reads none."""
    read = [range(40), range(40, 103, 2), range(41, 103, 2), range(0)]
    return [
        (torch.tensor(vertices), Step(epoch=3, number=number, rows=rows_among(own, vertices), training=True))
        for number, vertices in enumerate(read)
    ]


def rows_among(own: Tensor, vertices: range) -> Tensor:
    return torch.isin(own, torch.tensor(vertices)).nonzero().view(-1)


def check_nodes(group: Group, multilabel: bool) -> None:
    graph = labelled(NUM_VERTICES, multilabel=multilabel)
    assert graph.y is not None
    own, logits = ranks_rows(group, NUM_VERTICES), drawn(NUM_VERTICES, 5).requires_grad_()
    task = NodeTask(graph, own, group)
    for vertices, step in batches(own):
        masks = [getattr(graph, f"{split}_mask") for split in SPLITS]
        known = torch.isin(torch.arange(NUM_VERTICES), vertices)
        if not multilabel:
            known &= graph.y >= 0
        train, val, test = ((mask & known).nonzero().view(-1) for mask in masks)
        of_loss = functional.binary_cross_entropy_with_logits if multilabel else functional.cross_entropy
        y = graph.y.double() if multilabel else graph.y
        expected = of_loss(logits[train], y[train]) if len(train) else logits.sum() * 0
        (expected_grad,) = torch.autograd.grad(expected, logits)
        loss, grad = task.loss(logits.detach()[own], step)
        total = sum(report["loss"] for report in group.all_gather_object({"loss": loss}))
        assert total == pytest.approx(expected.item(), abs=1e-12)
        torch.testing.assert_close(grad, expected_grad[own], rtol=0, atol=1e-12)
        counts = task.counts(logits.detach()[own], step)
        scores = task.scores([report["counts"] for report in group.all_gather_object({"counts": counts})])
        for split, rows in zip(SPLITS, (train, val, test), strict=True):
            if not multilabel:
                right = (logits[rows].argmax(1) == graph.y[rows]).double().mean().item() if len(rows) else None
                assert scores[f"{split}_accuracy"] == (None if right is None else pytest.approx(right))


def check_all_nodes(group: Group) -> None:
    for multilabel in (False, True):
        check_nodes(group, multilabel)


@pytest.mark.parametrize("size", [1, 2])
def test_nodes(size: int) -> None:
    spawn(size, check_all_nodes)


def check_links(group: Group) -> None:
    case = Case(graph="directed", negatives=3)
    graph, model = case.build()
    links, num_vertices = Links.of(graph), graph.num_vertices
    own, z = ranks_rows(group, num_vertices), drawn(num_vertices, 6).requires_grad_()
    task = LinkTask(case.config, links, model.decoder, own, group)
    for vertices, step in batches(own):
        chosen = links.train[torch.isin(links.train[:, 0], vertices)]
        draw = negative_key(case.config.seed, 3, step.number) if step.number else negative_key(case.config.seed, 3)
        pairs = torch.cat([chosen, *(links.negatives(chosen, draw, number) for number in range(3))])
        label = (torch.arange(len(pairs)) < len(chosen)).double()
        logits = (z[pairs[:, 0]] * z[pairs[:, 1]]).sum(1)
        expected = functional.binary_cross_entropy_with_logits(logits, label) if len(pairs) else z.sum() * 0
        (expected_grad,) = torch.autograd.grad(expected, z)
        loss, grad = task.loss(z.detach()[own], step)
        total = sum(report["loss"] for report in group.all_gather_object({"loss": loss}))
        assert total == pytest.approx(expected.item(), abs=1e-12)
        torch.testing.assert_close(grad, expected_grad[own], rtol=0, atol=1e-12)
        check_link_scores(task, links, vertices, z.detach(), step)


def check_link_scores(task: LinkTask, links: Links, vertices: Tensor, z: Tensor, step: Step) -> None:
    scores = task.counts(z[task.own], step)
    for side, part in enumerate((links.val, links.test)):
        positive = part[torch.isin(part[:, 0], vertices)]
        none = links.non_edges(part, negative_key(3, side, 0))[torch.isin(part[:, 0], vertices)]
        name = f"{('val', 'test')[side]}_auc"
        if not len(positive):
            assert name not in scores
            continue
        above, below = ((z[pairs[:, 0]] * z[pairs[:, 1]]).sum(1).float() for pairs in (positive, none))
        wins = (above[:, None] > below).double() + (above[:, None] == below).double() / 2
        assert scores[name] == pytest.approx(wins.mean().item())


@pytest.mark.parametrize("size", [1, 2])
def test_links(size: int) -> None:
    spawn(size, check_links)


def test_each_step_of_an_epoch_drops_other_numbers() -> None:
    """The first as if it were alone; what is read of the rows has no part in it."""
    graph, model = Case(graph="directed").build()
    strategy = NOTHING.plan("single", Workload(model, graph)).place(Group(), seed=3)
    alone, first, second, rows = (
        strategy.forward(Step(epoch=2, training=True, **more))
        for more in ({}, {"number": 0}, {"number": 1}, {"number": 1, "rows": torch.tensor([0, 5])})
    )
    assert torch.equal(alone, first)
    assert torch.equal(second, rows)
    assert not torch.equal(first, second)
