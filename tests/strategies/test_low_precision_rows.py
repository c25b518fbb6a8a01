"""Rows of bfloat16 under every strategy that has them: near `single`, bytes as the trace says and half of float32's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.cases import MACHINE, OWN, RESIDENT, Case
from tests.lib.pairwise import param
from tests.lib.ranks import on_ranks
from tests.lib.session import Flops, Given, Session, check_counts, check_flops, workload
from weft.comm import Group
from weft.data import Graph
from weft.nn import Workload
from weft.nn.layers.phases import PhasedModel
from weft.strategies import get_strategy
from weft.utils.errors import InputError

UNIT = 2**-8
"""What rounding to bfloat16 changes a number by at most, as a share of it."""
ROUNDINGS = 8
"""On the way of a row through a layer: what it begins with, dropout, map, its two parts, sums that are sent, the
aggregate, the bias."""
NARROW = Given(machine=MACHINE)
WIDE = Given(machine=replace(MACHINE, seconds_per_byte=MACHINE.seconds_per_byte / 2))
"""By which `hybrid` chooses alike where a number has twice as many bytes."""
PARAMETERS = {"gradients", "statistics"}
"""Tags of what is float32: sums of parameters' gradients, and of batch norm."""


@dataclass(frozen=True, kw_only=True)
class NarrowCase(Case):
    """A case in float32, or with rows of bfloat16."""

    narrow: bool = True

    def build(self) -> tuple[Graph, nn.Module]:
        graph, model = super().build()
        assert isinstance(model, PhasedModel)
        if self.narrow:
            model.row_dtype = torch.bfloat16
        return graph, model.float()


CASES = [
    NarrowCase(model="gcn", weighted=True),
    NarrowCase(model="gcn", decoupled=True, norm="layer"),
    NarrowCase(model="sage", norm="batch"),
    NarrowCase(model="sage", sparse=True, input_dropout=0.2, residual=True),
    NarrowCase(model="gin", hidden=8),
    NarrowCase(model="gat", attention_dropout=0.3),
    NarrowCase(model="gat", decoupled=True, layers=2),
    NarrowCase(model="gcn", labels=2),
]


@cache
def of_single(case: NarrowCase) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Logits, gradients and evaluation of all vertices on one rank."""
    whole = Session(replace(case, without="reach"), "single", Group())
    logits, _ = whole.step(0)
    return logits, whole.gradients(), whole.evaluation()


def pairs() -> list[Any]:
    """Return every case under every strategy on two and three ranks; some are quick."""
    params = []
    for (first, case), (second, name), size in product(enumerate(CASES), enumerate(RESIDENT), (2, 3)):
        quick = name not in OWN and (first + 2 * second) % 12 == size - 2
        params.append(param(case, name, size, name=f"{name}-{case.id}-P{size}", quick=quick))
    return params


@pytest.mark.parametrize(("case", "name", "size"), pairs())
def test_near_single(case: NarrowCase, name: str, size: int) -> None:
    """What differs is where rows are rounded: at most so often on the way through a layer, by so much each time."""
    on_ranks(size, check_near, case, name)


def check_near(group: Group, case: NarrowCase, name: str) -> None:
    logits, gradients, evaluation = of_single(case)
    placed = Session(case, name, group, NARROW, traced=True)
    bound = ROUNDINGS * case.layers * UNIT
    placed.meter.take("train")
    with Flops() as flops:
        found, loss = placed.step(0)
    counts, trace = placed.meter.take("train"), placed.trace(training=True)
    check_counts(counts, trace, case)
    check_flops(flops, trace, case)
    assert found.dtype == torch.float32, "logits are given out in float32"
    check_within(found, logits[placed.rows(training=True)], bound, "logits")
    for parameter, gradient in gradients.items():
        assert placed.gradients()[parameter].dtype == torch.float32
        check_within(placed.gradients()[parameter], gradient, bound, f"gradient of {parameter}")
    check_within(placed.evaluation(), evaluation[placed.rows(training=False)], bound, "evaluation")

    again = Session(case, name, group, NARROW)
    logits_again, loss_again = again.step(0)
    assert torch.equal(found, logits_again)
    assert loss == loss_again

    wide = WIDE.plan(name, workload(replace(case, narrow=False)), group.size)
    for tag, sent in wide.trace(group.rank, training=True).bytes_sent.items():
        assert sent == counts.bytes_sent[tag] * (1 if tag in PARAMETERS else 2), tag


def test_bytes_of_float32_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: a trace that takes rows for as wide as parameters promises twice the bytes."""
    trace = NARROW.plan("tensor", workload(CASES[0]), 2).trace(0, training=True)
    with monkeypatch.context() as patched:
        patched.setattr(Workload, "itemsize", property(lambda work: work.dtype.itemsize))
        planted = NARROW.plan("tensor", workload(CASES[0]), 2).trace(0, training=True)
    assert planted.bytes_sent["rows_to_cols"] == 2 * trace.bytes_sent["rows_to_cols"] > 0


def check_within(found: Tensor, wanted: Tensor, bound: float, what: str) -> None:
    if wanted.numel():
        error, size = float((found - wanted).abs().max()), float(wanted.abs().max())
        assert error <= bound * size, f"{what}: {error / max(size, 1e-30):.3g} of the largest, more than {bound:.3g}"


@pytest.mark.parametrize("name", ["offload", "pipeline"])
def test_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"--dtype bfloat16: strategy {name} .* give --strategy single, tensor"):
        get_strategy(name)(workload(CASES[0]), 1)


def test_tensor_refuses_chunks() -> None:
    with pytest.raises(InputError, match=r"--dtype bfloat16: .* leave out --device-memory and --chunks"):
        Given(chunks=3).plan("tensor", workload(CASES[0]), 2)
