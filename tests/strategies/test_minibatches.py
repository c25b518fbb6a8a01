"""Mini-batches: `split` on P ranks is `split` on one and `sampled` on P; one batch of everything is `single`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import on_ranks
from tests.strategies.cases import Case, cases, chosen, point, pyg_cases, typed_cases
from tests.strategies.session import Flops, Given, check_close, check_counts, check_flops, part_by, reference, workload
from weft.comm import Group
from weft.core.errors import InputError
from weft.engine.metrics import NodeTask
from weft.nn import embeddings
from weft.nn.families import ATTENTION

STEPS = 5
EPOCHS = 8


@dataclass(frozen=True)
class Seen:
    """What a strategy gives on all ranks: logits of the first batches' vertices, gradients and losses by step."""

    logits: list[Tensor]
    gradients: dict[str, Tensor]
    losses: Tensor


def train(group: Group, case: Case, name: str, given: Given) -> Seen:
    """Some steps of Adam, whose counts are held against the trace of each."""
    work = workload(case)
    plan = given.plan(name, work, group.size)
    placed = plan.place(group, seed=7)
    meter, model = group.meter, placed.model
    task = NodeTask(work.graph, placed.rows, group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3)
    logits, losses, gradients = list[Tensor](), list[float](), dict[str, Tensor]()
    meter.take("train")
    for epoch in range(EPOCHS):
        steps = iter(placed.steps(epoch))
        while len(losses) < STEPS:
            model.zero_grad()
            with meter.during("train"), Flops() as flops:
                if (step := next(steps, None)) is None:
                    break
                rows = placed.forward(step)
                loss, grad = task.loss(rows, step)
                placed.backward(rows, grad)
            trace = plan.trace(group.rank, training=True, epoch=epoch, number=step.number)
            check_counts(meter.take("train"), trace, case)
            check_flops(flops, trace, case)
            gradients = gradients or {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
            whole = rows.new_zeros(work.graph.num_vertices, rows.shape[1])
            assert step.vertices is not None
            whole[step.vertices] = rows.detach()
            logits.append(group.all_reduce(whole, tag="test"))
            losses.append(float(group.all_reduce(torch.tensor(loss, dtype=torch.float64), tag="test")))
            optimizer.step()
    for parameter in embeddings(model):
        whole = torch.zeros(work.graph.typed.num_embedded, gradients[parameter].shape[1], dtype=torch.float64)
        whole[placed.embedded] = gradients[parameter]
        gradients[parameter] = group.all_reduce(whole, tag="test")
    return Seen(logits, gradients, torch.tensor(losses, dtype=torch.float64))


def check_same(seen: Seen, expected: Seen, what: str) -> None:
    check_close(seen.losses, expected.losses, f"{what}: losses")
    for number, (one, other) in enumerate(zip(seen.logits, expected.logits, strict=True)):
        check_close(one, other, f"{what}: logits of step {number}")
    assert seen.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        check_close(seen.gradients[name], gradient, f"{what}: gradient of {name}")


def check_rank(group: Group, case: Case, name: str, given: Given, expected: Seen) -> None:
    check_same(train(group, case, name, given), expected, f"{name}-{case.id}-P{group.size}")


def check(case: Case, name: str, size: int, given: Given) -> None:
    expected = train(Group(), case, "split", Given(**{**given, "partition": None}))
    on_ranks(size, check_rank, case, name, given, expected)


def matrix() -> list[Any]:
    named = {
        f"{name}-{case.id}-{sampling}-P{size}": (name, case, sampling, size)
        for name, size, sampling, case in product(
            ("split", "sampled"), (1, 2, 3, 4), ("uniform", "labor"), [*cases(), *pyg_cases(), *typed_cases()]
        )
        if not case.decoupled or sampling == "uniform"
    }
    quick = chosen([one for one, (*_, size) in named.items() if size in (2, 3)], 1 / 6)
    return [point(*one, name=name, quick=name in quick) for name, one in named.items()]


@pytest.mark.parametrize(("name", "case", "sampling", "size"), matrix())
def test_equals_one_rank(name: str, case: Case, sampling: str, size: int) -> None:
    part = part_by("random", case, size) if size > 1 else None
    given = Given(
        batch_size="3" if case.num_vertices > 9 else "1",
        fanout="2",
        sampling=sampling,
        seed=5,
        partition=part,
        prefetch_batches=0,
    )
    if name == "sampled" and size > 1 and (case.norm == "batch" or case.typed in ("some", "none", "one")):
        with pytest.raises(InputError, match="give --strategy split"):
            given.plan(name, workload(case), size)
        return
    if name == "split" and size > 1 and case.decoupled and case.model in ATTENTION:
        with pytest.raises(InputError, match="no --decoupled model with attention"):
            given.plan(name, workload(case), size)
        return
    check(case, name, size, given)


WHOLE = [case for case in [*cases(), *pyg_cases(), *typed_cases()] if case.norm != "batch"]


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.id)
def test_one_batch_of_everything_is_single(case: Case) -> None:
    """Dropout included: the first step of an epoch draws a full-graph step's masks."""
    given = Given(batch_size="all", fanout="all", seed=5, prefetch_batches=0)
    seen, expected = train(Group(), case, "split", given), reference(case)
    vertices = seen.logits[0].abs().sum(1).nonzero().view(-1)
    ids = workload(case).graph.ids
    rows = vertices if ids is None else ids[vertices]
    check_close(seen.logits[0][vertices], expected.logits[rows], "logits")
    check_close(seen.losses[: case.steps], expected.losses[: case.steps], "losses")
    for name, gradient in expected.gradients.items():
        check_close(seen.gradients[name], gradient, f"gradient of {name}")
