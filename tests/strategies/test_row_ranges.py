"""Steps in ranges of rows: the results of `single`, the counts of the trace, the memory of the estimate."""

from __future__ import annotations

import functools
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.lib.cases import FEW_LABELS, Case
from tests.lib.session import Session, check_case, check_close, check_trace, reference, workload
from tests.strategies.test_memory import step_peaks, without_collector
from weft.comm import Group
from weft.config.config import TaskOptions
from weft.data import Graph
from weft.nn import Workload, make_model
from weft.parallel import row_ranges
from weft.parallel.row_ranges import LossFunction, RangedSum, rounded
from weft.runtime.memory.heap import release_pages_of
from weft.runtime.memory.tensor_peak import TensorPeak
from weft.storage import host_rows
from weft.strategies import single
from weft.strategies.single import SinglePlan
from weft.training.tasks.metrics import NodeTask
from weft.training.tasks.scores import make_metrics


@dataclass(frozen=True)
class Frozen(Case):
    """A model whose first two layers do not train, so that gradients end behind them."""

    def make_model(self, graph: Graph) -> nn.Module:
        model = super().make_model(graph)
        for layer in model.layers[:2]:
            layer.requires_grad_(False)
        return model


CASES = [
    Case(model="gcn"),
    Case(model="gcn", layers=2, **FEW_LABELS),
    Case(model="gcn", weighted=True, **FEW_LABELS),
    Case(model="sage", norm="layer", residual=True, **FEW_LABELS),
    Case(model="gin", frozen=True),
    Case(model="pyg-jk"),
    Frozen(model="gcn", **FEW_LABELS),
    Case(model="gcn", sparse=True, **FEW_LABELS),
]


@pytest.fixture(autouse=True)
def ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps of `single` run in ranges of a few rows, but for those without `reach`, which are the reference."""
    monkeypatch.setattr(SinglePlan, "_fit_memory", lambda plan, _: not plan.work.optimisations.reach)
    monkeypatch.setattr(SinglePlan, "_retained_share", lambda *_: 0.0)
    monkeypatch.setattr(row_ranges, "RANGE_BYTES", 1000)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_results_and_counts_are_those_of_all_rows(case: Case, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are computed twice, or their autograd graphs stay, or those of some do."""
    monkeypatch.setattr(SinglePlan, "_retained_share", lambda *_: share)
    placed = check_case(Group(), case, "single", full=True)
    assert all(layout.in_ranges for layout in placed.plan.layouts.values())


@pytest.mark.parametrize("model", ["gcn", "sage"])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_reads_of_files_are_those_of_the_trace(model: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """GraphSAGE reads the features of targets as well as the aggregates; rows may be computed again from them."""
    monkeypatch.setattr(SinglePlan, "_retained_share", lambda *_: share)
    monkeypatch.setattr(host_rows, "FILE_SHARE", 0)
    placed = check_case(Group(), Case(model=model, **FEW_LABELS), "single")
    for training, times in ((True, 2), (False, 1)):
        inputs = placed.strategy.pruned_inputs[training].inputs
        (aggregated,) = inputs.cached.values()
        num_rows = len(aggregated) * (2 if model == "sage" else 1)
        expected = {"features": times * num_rows * aggregated.shape[1] * aggregated.itemsize}
        assert placed.plan.trace(0, training=training).to_device == expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_losses_of_ranges_give_the_gradients_of_all_rows(
    case: Case, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SinglePlan, "_retained_share", lambda *_: share)
    monkeypatch.setattr(Workload, "losses_by_row", property(lambda work: work.optimisations.reach))
    monkeypatch.setattr(row_ranges, "RANGE_BYTES", 100)
    session, expected, spans = Session(case, "single", Group(), traced=True), reference(case, full=True), set()

    def loss(rows: Tensor, span: slice | None) -> tuple[Tensor, Tensor]:
        assert span is not None
        spans.add(span.start)
        return session.task.loss(rows, step, span)

    (step,) = session.strategy.steps(0)
    with session.meter.during("train"):
        total = session.strategy.train(step, loss)
    assert len(spans) > 1
    check_close(total, expected.losses[0], f"{case}: loss")
    gradients = session.gradients()
    assert gradients.keys() == expected.gradients.keys()
    for parameter, gradient in expected.gradients.items():
        check_close(gradients[parameter], gradient, f"{case}: gradient of {parameter}")
    check_trace(session, None, training=True)
    step = session.strategy.evaluation(0)
    with session.meter.during("eval"):
        ranges = [*session.strategy.logit_ranges(step)]
    assert len(ranges) > 1
    assert [span.start for span, _ in ranges[1:]] == [span.stop for span, _ in ranges[:-1]]
    check_trace(session, None, training=False)
    logits = torch.cat([each for _, each in ranges])
    check_close(logits, session.strategy.forward(step), f"{case}: evaluation")
    placed, labels = session.strategy, session.strategy.graph
    metrics = make_metrics(TaskOptions(metrics="accuracy,roc_auc"), labels)  # a sum over rows, and one of all rows
    task = NodeTask(labels, placed.rows, placed.group, metrics=metrics)
    counts, of_ranges = task.counts(logits, step), task.counts_of(ranges, step)
    assert {split: [*scores] for split, scores in of_ranges.items()} == {
        split: [*each] for split, each in counts.items()
    }
    for split, of_split in of_ranges.items():
        assert {"accuracy", "roc_auc"} <= {*of_split}
        for name, score in of_split.items():
            assert score == pytest.approx(counts[split][name]), (split, name)


@pytest.mark.parametrize(
    "case",
    [
        Case(model="gat"),
        Case(model="gcn", decoupled=True),
        Case(model="gcn", input_dropout=0.3),
        Case(model="sage", norm="batch"),
    ],
    ids=lambda case: case.id,
)
def test_models_that_need_all_rows_at_once_keep_them(case: Case) -> None:
    placed = check_case(Group(), case, "single")
    assert not any(layout.in_ranges for layout in placed.plan.layouts.values())


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", [pytest.param("gcn", marks=pytest.mark.slow), "sage"])
@pytest.mark.parametrize(("share", "labelled"), [(0.0, 1), (0.5, 1), (1.0, 1), (0.0, 100)])
def test_memory_is_that_of_the_sums(
    model: str, dtype: torch.dtype, share: float, labelled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate is exact to 3 %, and a fraction of that of all rows unless all graphs of ranges stay.

    If all vertices are labelled, there are more logits than hidden numbers, and those of a range are freed at once.
    """
    monkeypatch.setattr(SinglePlan, "_retained_share", lambda *_: share)
    by_row = labelled == 100
    hidden, num_classes = (16, 64) if by_row else (64, 4)
    graph = weft.load(f"cites:vertices=300k,edges=1m,features=16,classes={num_classes},labelled={labelled}%")
    monkeypatch.setattr(row_ranges, "RANGE_BYTES", 1 << 16)
    network = make_model(model, 16, num_classes, hidden=hidden)
    network.row_dtype = None if dtype == torch.float32 else dtype
    work = Workload(network, graph, num_classes=num_classes if by_row else None)
    plan = SinglePlan(work)
    placed = plan.place(Group())
    steps = step_peaks(placed, epochs=2, with_loss=by_row, whole=not by_row)
    measured = max(most for most, _ in steps[1:])
    with without_collector(), TensorPeak() as evaluation:
        for _ in placed.logit_ranges(placed.evaluation(0)):
            pass
    with without_collector():
        estimated = plan.memory()
        of_evaluation = plan.layouts[False].step_memory(0, training=False).most
    assert abs(estimated - measured) < 0.03 * measured
    assert abs(of_evaluation - evaluation.most) < 0.05 * evaluation.most
    monkeypatch.setattr(SinglePlan, "_fit_memory", lambda *_: True)
    assert estimated < SinglePlan(work).memory() * (0.33 + 0.67 * share)


def test_sums_are_rounded_before_their_pages_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_ranges, "RANGE_BYTES", 3 * mmap.PAGESIZE + 512)  # ranges begin within pages
    sums = torch.randn(5000, 16)
    expected = sums.to(torch.bfloat16)
    assert rounded(sums, torch.bfloat16).equal(expected)
    assert (sums == 0).float().mean() > 0.5  # pages that lie in one range are zero when they are read again


def test_releasing_pages_keeps_what_is_next_to_them() -> None:
    memory = torch.ones(5 * mmap.PAGESIZE, dtype=torch.uint8)
    release_pages_of(memory.data_ptr() + 100, 3 * mmap.PAGESIZE)
    assert memory[:100].all()
    assert memory[100 + 3 * mmap.PAGESIZE :].all()
    assert 2 * mmap.PAGESIZE <= (memory == 0).sum() <= 3 * mmap.PAGESIZE


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("bfloat16", 0.05)], ids=["float64", "bfloat16"])
def test_runs_have_the_loss_of_all_rows(
    dtype: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the last epoch depends on the gradients of all before."""
    options: dict[str, Any] = {"epochs": 3, "dtype": dtype, "class_weights": "balanced"}
    calls, right = [], LossFunction.forward
    monkeypatch.setattr(LossFunction, "forward", lambda *arguments: calls.append(1) or right(*arguments))
    losses = []
    for fits in (True, False):
        monkeypatch.setattr(SinglePlan, "_fit_memory", lambda *_, fits=fits: fits)
        losses.append(weft.train("digits", "sage", out=tmp_path / str(fits), **options).summary["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    assert len(calls) == 3


def test_a_loop_gets_all_logits_of_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SinglePlan, "_fit_memory", lambda *_: False)
    placed = weft.place("digits", "sage")
    (batch,) = placed.batches(0)
    assert placed.placed.plan.layouts[True].in_ranges
    logits = placed(batch)
    assert len(logits) == len(placed.vertices)
    placed.backward(logits.square().sum())
    assert all(parameter.grad is not None for parameter in placed.model.parameters())


def test_small_runs_do_not_run_in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    small = SinglePlan(workload(CASES[1]))
    assert not any(layout.in_ranges for layout in small.layouts.values())
    limit = small.memory()
    monkeypatch.setattr(single, "memory_limit_bytes", lambda: limit)
    layouts = SinglePlan(workload(CASES[1])).layouts
    assert all(layout.in_ranges for layout in layouts.values())
    assert layouts[True].retained_share == 0


def test_graphs_of_ranges_stay_as_far_as_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(SinglePlan, "_fit_memory", lambda *_: False)
    needs, shares, plan = [], [], SinglePlan(workload(CASES[1]))
    for plan.layouts[True].retained_share in (0.0, 1.0):
        step = plan.layouts[True].temporary_memory(0, training=True)[0]
        needs.append(plan._lasting_memory(plan.layouts) + step)
    for limit in (0, sum(needs) / 2 / single.RETAINED_SHARE, 1 << 40):
        monkeypatch.setattr(single, "memory_limit_bytes", lambda limit=limit: limit)
        shares.append(SinglePlan(workload(CASES[1])).layouts[True].retained_share)
    assert shares == [0, pytest.approx(0.5, abs=0.01), 1]


def test_an_error_in_a_range_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RangedSum.gradient

    @functools.wraps(right)
    def wrong(ranged: RangedSum, rows: slice, grad: torch.Tensor) -> Any:
        return right(ranged, rows, grad) * bool(rows.start)

    monkeypatch.setattr(RangedSum, "gradient", wrong)
    with pytest.raises(AssertionError, match="gradient of"):
        check_case(Group(), CASES[0], "single")
