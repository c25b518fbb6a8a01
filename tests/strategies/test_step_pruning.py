"""Pruned steps leave out rows on which no loss or score depends; results stay the same."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.cases import FEW_LABELS, MACHINE, RESIDENT, Case, labelled_cases
from tests.lib.graphs import NUM_CLASSES, NUM_FEATURES
from tests.lib.ranks import on_ranks
from tests.lib.session import Given, Session, check_case, check_close, check_on_ranks, workload
from weft.comm import Group
from weft.nn import Dot, Inputs, LinkModel, ReceptiveField, SAGEConv, Stack, View, Workload
from weft.parallel import row_ranges
from weft.parallel.columns import streamed_columns
from weft.storage import host_rows
from weft.storage.unnamed_files import is_mapped
from weft.strategies import STRATEGIES, ResidentPlaced, Step
from weft.training.tasks.metrics import NodeTask

PRUNING = [name for name in RESIDENT if "reach" in STRATEGIES[name].optimisations] + ["single"]
CASE = Case(model="gcn", **FEW_LABELS)


@pytest.mark.parametrize("case", labelled_cases(), ids=lambda case: case.id)
def test_steps_are_restricted_wherever_they_can_be(case: Case) -> None:
    """Plans restrict steps to a receptive field wherever possible; cases of tests/lib/matrix.py compare results."""
    for name in PRUNING:
        if case.reads_edges and STRATEGIES[name].traits.block_error:
            continue
        size = STRATEGIES[name].max_ranks or 3
        receptive_fields = Given(machine=MACHINE).plan(name, workload(case), size).receptive_fields
        of_types = name == "tensor" and case.typed
        assert isinstance(receptive_fields[False], str if of_types else ReceptiveField)
        assert isinstance(receptive_fields[True], str if of_types or case.norm == "batch" else ReceptiveField)
    if not case.typed:
        plan = Given(chunks=3).plan("offload", workload(case), 3)
        assert isinstance(plan.receptive_field, str if case.norm == "batch" else ReceptiveField)


@pytest.mark.parametrize("name", [*PRUNING, "offload"])
def test_pruned_steps_aggregate_fewer_edges_and_transform_fewer_rows(name: str) -> None:
    size = 1 if name == "single" else 3
    plan, without = (
        Given(machine=MACHINE).plan(name, workload(replace(CASE, without=optimisation)), size)
        for optimisation in ("", "reach")
    )
    for training in (True, False):
        traces, wholes = ([each.trace(rank, training=training) for rank in range(size)] for each in (plan, without))
        assert sum(trace.edges for trace in traces) < sum(trace.edges for trace in wholes) / 2
        assert sum(trace.flops for trace in traces) < sum(trace.flops for trace in wholes) / 2
        sent, of_all = (sum(sum(trace.bytes_sent.values()) for trace in each) for each in (traces, wholes))
        assert sent < of_all or name in ("single", "cached")  # these fetch nothing
    assert name == "offload" or plan.memory() < without.memory()


@pytest.mark.parametrize("size", [1, 2])
def test_counts_equal_the_trace_where_a_layer_keeps_all_rows(size: int) -> None:
    """The target rows of the first layer are all rows, but not the constant features, as the outline assumes."""
    case = Case(model="sage", sparse=True, num_vertices=20, labels=4)
    field = Given().plan("single", workload(case)).receptive_fields[True]
    assert field.rows[0] == field.rows[1] > field.rows[2]
    check_on_ranks(size, case, "communicated", full=True)


@pytest.mark.parametrize("name", ["communicated", "tensor"])
def test_plans_release_the_dependencies_of_pruned_steps(name: str) -> None:
    plan: Any = Given().plan(name, workload(CASE), 2)
    few = plan.layouts[True]
    dependencies = weakref.ref((few.pruned if name == "tensor" else few).blocks.dependencies(0))
    assert dependencies()
    plan.release()
    gc.collect()
    assert not dependencies()


@pytest.mark.parametrize("strategy", ["split", "sampled"])
def test_the_feature_cache_counts_next_to_pruned_evaluations(strategy: str) -> None:
    plan, without = (
        Given(batch_size="3", fanout="2", cache_memory=memory).plan(strategy, workload(CASE), 1)
        for memory in (200, None)
    )
    assert plan.layouts[False] is not plan.layout
    cache = plan.extra_memory(0)
    assert plan.peak_memory().device - without.peak_memory().device == cache > 0


def test_plans_release_profiled_batches() -> None:
    plan: Any = Given(batch_size="5").plan("split", workload(Case(model="sage")), 1)
    batch = weakref.ref(plan.profiled_steps[0][0])
    assert batch()
    plan.release()
    gc.collect()
    assert not batch()


def test_nothing_is_copied_where_labels_are_everywhere() -> None:
    plan = Given().plan("single", workload(Case(model="gcn")))
    assert set(plan.layouts.values()) == {plan.layout}
    placed = plan.place(Group())
    assert not placed.pruned_inputs
    assert "reach" not in placed.describe()
    assert placed.topology.adjacency.indices.data_ptr() == plan.work.graph.in_edges.indices.data_ptr()


class Centred(torch.nn.Module):
    """A layer that subtracts the mean of all rows, which is possible on one rank."""

    out_width = NUM_CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(NUM_FEATURES, NUM_CLASSES)

    def forward(self, view: View, x: Tensor) -> Tensor:
        y: Tensor = self.conv(view, x - x.mean(0))
        return y


class Twice(Centred):
    """A layer that aggregates twice, so that weft does not know the rows in between."""

    def forward(self, view: View, x: Tensor) -> Tensor:
        y: Tensor = view.propagate(self.conv(view, x))
        return y


def linked() -> LinkModel:
    return LinkModel(Stack([SAGEConv(NUM_FEATURES, NUM_CLASSES)]), Dot())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Stack([Centred()]), "mixes vertices outside of message passing"),
        (lambda: Stack([Twice()]), "aggregates one after another"),
        (linked, "links may join any vertices"),
        (lambda: workload(replace(CASE, norm="batch")).model, "BatchNorm sums over all rows"),
    ],
    ids=["coupled", "twice", "links", "batch norm"],
)
def test_the_record_says_why_steps_are_not_pruned(model: Any, reason: str) -> None:
    work = Workload(model().double(), CASE.build()[0])
    placed = Given().plan("single", work).place(Group())
    assert isinstance(placed, ResidentPlaced)
    assert True not in placed.pruned_inputs
    assert reason in placed.describe()["reach"]["training"]
    (step,) = placed.steps(0)
    assert step.vertices is None


def test_a_step_can_be_pruned_or_not() -> None:
    """A step without vertices computes all rows, even if the plan prunes its steps."""
    work = workload(CASE)
    placed = Given().plan("single", work).place(Group())
    whole = Given().plan("single", workload(replace(CASE, without="reach"))).place(Group())
    assert isinstance(placed, ResidentPlaced)
    assert isinstance(whole, ResidentPlaced)
    assert set(placed.pruned_inputs) == {True, False}
    assert not whole.pruned_inputs
    step = Step(epoch=3, training=True)
    logits = whole.forward(step)
    check_close(placed.forward(step), logits, "all rows")
    (few,) = placed.steps(3)
    assert few.vertices is not None
    assert len(few.vertices) == CASE.labels
    check_close(placed.forward(few), logits[few.vertices], "rows of the pruned step, dropout included")


@pytest.mark.parametrize("name", ["single", "hybrid", "tensor"])
def test_training_steps_share_the_rows_of_evaluations_that_are_few_more(name: str) -> None:
    size, case = 1 if name == "single" else 2, Case(model="gcn", num_vertices=150, labels=4, scored=1, layers=2)
    plan = Given(machine=MACHINE).plan(name, workload(case), size)
    assert plan.receptive_fields[True] is plan.receptive_fields[False]
    assert plan.layouts[True] is plan.layouts[False] is not plan.layout
    check_on_ranks(size, case, name, Given(machine=MACHINE))
    if size == 1:
        placed = plan.place(Group())
        task = NodeTask(placed.graph, placed.rows, placed.group)
        (step,) = placed.steps(0)
        assert placed.pruned_inputs[True] is placed.pruned_inputs[False]
        assert len(step.vertices) == case.labels + case.scored
        assert len(task.examples(step).rows) == task.examples(step).size == case.labels


@pytest.mark.parametrize(
    "case", [CASE, replace(CASE, model="sage"), replace(CASE, sparse=True)], ids=lambda case: case.id
)
def test_features_are_aggregated_column_by_column(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sage` also reads the features of targets, and sparse features are transformed before they are aggregated."""
    monkeypatch.setattr(host_rows, "FILE_SHARE", 0)
    monkeypatch.setattr(streamed_columns, "block_widths", lambda *_: [2, 2, 2, 1])
    monkeypatch.setattr(row_ranges, "RANGE_BYTES", 500)
    check_case(Group(), case, "single")


@pytest.mark.parametrize("strategy", ["single", "communicated", "tensor", "offload"])
def test_large_copies_of_features_are_in_files(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are the same, the copies map files, and the estimate knows their size."""
    monkeypatch.setattr(host_rows, "FILE_SHARE", 0)
    monkeypatch.setattr(host_rows, "COPY_BYTES", 200)  # several blocks
    check_case(Group(), CASE, strategy)
    if strategy in ("single", "communicated"):
        plan = Given().plan(strategy, workload(CASE))
        placed = plan.place(Group())
        inputs = [placed.pruned_inputs[training].inputs for training in (True, False)]
        mapped = [each.rows for each in inputs] + [rows for each in inputs for rows in each.cached.values()]
        assert len(mapped) == (4 if strategy == "single" else 2)
        assert all(map(is_mapped, mapped))
        edges = [each.needed.hops[0].block.indices for each in placed.pruned_inputs.values()]
        mapped += edges if strategy == "single" else []  # these are too few for a file here
        assert plan.peak_memory().in_file == sum(each.nbytes for each in mapped)


def test_scores_are_those_of_all_rows() -> None:
    work = workload(CASE)
    placed = Given().plan("single", work).place(Group())
    task = NodeTask(work.graph, placed.rows, placed.group)
    every, few = Step(epoch=0, training=False), placed.evaluation(0)
    assert few.vertices is not None
    counts = task.counts(placed.forward(few), few)
    assert counts == task.counts(placed.forward(every), every)
    assert counts["train"]["accuracy"][1] == counts["val"]["accuracy"][1] == CASE.labels


def check_twice(group: Group, name: str) -> None:
    """Check that two runs have the same bits."""
    runs = [Session(CASE, name, group, Given(machine=MACHINE)) for _ in range(2)]
    first, second = (session.losses(3, session.step(0)[1]) for session in runs)
    assert first == second
    for parameter, gradient in runs[0].gradients().items():
        assert torch.equal(gradient, runs[1].gradients()[parameter])


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3, 4))])
def test_a_run_repeated_is_the_same_to_the_bit(size: int) -> None:
    on_ranks(size, check_twice, "single" if size == 1 else "hybrid")


def test_steps_with_different_numbers_of_edges_are_counted_exactly() -> None:
    """The sum of the edges of three steps need not be a multiple of three."""
    check_case(Group(), Case(model="sage", decoupled=True, **FEW_LABELS), "tensor")


def test_a_planted_error_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features in another order than their vertices change the logits."""
    right = ResidentPlaced.make_inputs

    def wrong(placed: ResidentPlaced, rows: slice | Tensor) -> Inputs:
        return right(placed, rows if isinstance(rows, slice) else rows.flip(0))

    monkeypatch.setattr(ResidentPlaced, "make_inputs", wrong)
    with pytest.raises(AssertionError, match="logits"):
        check_case(Group(), CASE, "single")
