"""Rows of bfloat16 under every strategy that supports them: close to `single`, half of the bytes of float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.cases import EXAMPLE_STRATEGIES, MACHINE, RESIDENT, Case
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
"""Largest relative error of rounding a number to bfloat16."""
ROUNDINGS = 8
"""Number of roundings of a row in a layer: input, dropout, dense layer, its two parts, partial sums that are sent,
aggregate, bias."""
CHUNKED = ("offload", "pipeline")
"""Strategies that store rows on the host, whose gradients are float32 until every chunk has added to them."""
BFLOAT16 = Given(machine=MACHINE, chunks=3)
FLOAT32 = Given(machine=replace(MACHINE, seconds_per_byte=MACHINE.seconds_per_byte / 2))
"""Options of float32 runs. Half the time per byte and twice the bytes per number, so `hybrid` caches the same rows."""
FLOAT32_TAGS = {"gradients", "statistics"}
"""Tags of exchanges in float32: gradients of parameters, and statistics of batch norm."""


@dataclass(frozen=True, kw_only=True)
class LowPrecisionCase(Case):
    """A case in float32, or with rows of bfloat16."""

    low_precision: bool = True

    def build(self) -> tuple[Graph, nn.Module]:
        graph, model = super().build()
        assert isinstance(model, PhasedModel)
        if self.low_precision:
            model.row_dtype = torch.bfloat16
        return graph, model.float()


CASES = [
    LowPrecisionCase(model="gcn", weighted=True),
    LowPrecisionCase(model="gcn", decoupled=True, norm="layer"),
    LowPrecisionCase(model="sage", norm="batch"),
    LowPrecisionCase(model="sage", sparse=True, input_dropout=0.2, residual=True),
    LowPrecisionCase(model="gin", hidden=8),
    LowPrecisionCase(model="gat", attention_dropout=0.3),
    LowPrecisionCase(model="gat", decoupled=True, layers=2),
    LowPrecisionCase(model="gcn", labels=2),
]


@cache
def results_of_single(case: LowPrecisionCase) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Logits, gradients and evaluation of all vertices on one rank."""
    whole = Session(replace(case, without="reach"), "single", Group())
    logits, _ = whole.step(0)
    return logits, whole.gradients(), whole.evaluation()


def pairs() -> list[Any]:
    """Return every case under every strategy on two and three ranks, offload also on one; some are quick."""
    params = []
    for (first, case), (second, name), size in product(enumerate(CASES), enumerate([*RESIDENT, *CHUNKED]), (1, 2, 3)):
        if (size == 1 and name != "offload") or (name in CHUNKED and case.model == "gat"):
            continue
        quick = name not in EXAMPLE_STRATEGIES and (first + 2 * second) % 12 == max(size - 2, 0)
        params.append(param(case, name, size, name=f"{name}-{case.id}-P{size}", quick=quick))
    return params


@pytest.mark.parametrize(("case", "name", "size"), pairs())
def test_near_single(case: LowPrecisionCase, name: str, size: int) -> None:
    """Results differ from `single`'s by at most the error of `ROUNDINGS` roundings in each layer."""
    on_ranks(size, check_near, case, name)


def check_near(group: Group, case: LowPrecisionCase, name: str) -> None:
    expected_logits, gradients, evaluation = results_of_single(case)
    options = BFLOAT16 if name in CHUNKED else Given(machine=MACHINE)
    placed = Session(case, name, group, options, traced=True)
    bound = ROUNDINGS * case.layers * UNIT
    placed.meter.take("train")
    with Flops() as flops:
        logits, loss = placed.step(0)
    counts, trace = placed.meter.take("train"), placed.trace(training=True)
    check_counts(counts, trace, case)
    check_flops(flops, trace, case)
    assert logits.dtype == torch.float32, "logits are returned in float32"
    check_within(logits, expected_logits[placed.rows(training=True)], bound, "logits")
    for parameter, gradient in gradients.items():
        assert placed.gradients()[parameter].dtype == torch.float32
        check_within(placed.gradients()[parameter], gradient, bound, f"gradient of {parameter}")
    check_within(placed.evaluation(), evaluation[placed.rows(training=False)], bound, "evaluation")

    again = Session(case, name, group, options)
    logits_again, loss_again = again.step(0)
    assert torch.equal(logits, logits_again)
    assert loss == loss_again

    if name in CHUNKED:
        return
    float32_plan = FLOAT32.plan(name, workload(replace(case, low_precision=False)), group.size)
    for tag, num_bytes in float32_plan.trace(group.rank, training=True).bytes_sent.items():
        assert num_bytes == counts.bytes_sent[tag] * (1 if tag in FLOAT32_TAGS else 2), tag


def test_a_trace_with_the_wrong_itemsize_has_twice_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error, rows with the itemsize of parameters, doubles the bytes of the trace."""
    trace = Given().plan("tensor", workload(CASES[0]), 2).trace(0, training=True)
    with monkeypatch.context() as patched:
        patched.setattr(Workload, "itemsize", property(lambda work: work.dtype.itemsize))
        planted = Given().plan("tensor", workload(CASES[0]), 2).trace(0, training=True)
    assert planted.bytes_sent["rows_to_cols"] == 2 * trace.bytes_sent["rows_to_cols"] > 0


def check_within(actual: Tensor, expected: Tensor, bound: float, what: str) -> None:
    if expected.numel():
        error, size = float((actual - expected).abs().max()), float(expected.abs().max())
        assert error <= bound * size, f"{what}: {error / max(size, 1e-30):.3g} of the largest, more than {bound:.3g}"


@pytest.mark.parametrize("name", CHUNKED)
def test_attention_in_chunks_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"--dtype bfloat16: under strategy {name}, attention .* or give --model gcn"):
        get_strategy(name).check_rows(workload(LowPrecisionCase(model="gat")))


def test_tensor_refuses_chunks() -> None:
    with pytest.raises(InputError, match=r"--dtype bfloat16: .* leave out --device-memory and --chunks"):
        Given(chunks=3).plan("tensor", workload(CASES[0]), 2)
