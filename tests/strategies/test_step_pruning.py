"""Steps that leave out the rows which no training vertex's loss, or no vertex's score, depends on: the same numbers."""

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
from tests.lib.session import Given, Session, check_case, check_close, workload
from weft.comm import Group
from weft.nn import Dot, Inputs, LinkModel, SAGEConv, Stack, View, Workload
from weft.partition import ReceptiveField
from weft.strategies import STRATEGIES, ResidentPlaced, Step
from weft.training.tasks.metrics import NodeTask

HAVING = [name for name in RESIDENT if "reach" in STRATEGIES[name].optimisations] + ["single"]
CASE = Case(model="gcn", **FEW_LABELS)


@pytest.mark.parametrize("case", labelled_cases(), ids=lambda case: case.id)
def test_steps_are_restricted_wherever_they_can_be(case: Case) -> None:
    """tests/lib/matrix.py has their numbers; here, whether a plan restricts steps at all."""
    for name in HAVING:
        if case.reads_edges and STRATEGIES[name].traits.block_error:
            continue
        size = STRATEGIES[name].max_ranks or 3
        reaches = Given(machine=MACHINE).plan(name, workload(case), size).receptive_fields
        of_types = name == "tensor" and case.typed
        assert isinstance(reaches[False], str if of_types else ReceptiveField)
        assert isinstance(reaches[True], str if of_types or case.norm == "batch" else ReceptiveField)
    if not case.typed:
        plan = Given(chunks=3).plan("offload", workload(case), 3)
        assert isinstance(plan.receptive_field, str if case.norm == "batch" else ReceptiveField)


@pytest.mark.parametrize("name", [*HAVING, "offload"])
def test_it_aggregates_fewer_edges_and_maps_fewer_rows(name: str) -> None:
    size = 1 if name == "single" else 3
    plan, without = (
        Given(machine=MACHINE).plan(name, workload(replace(CASE, without=one)), size) for one in ("", "reach")
    )
    for training in (True, False):
        traces, wholes = ([one.trace(rank, training=training) for rank in range(size)] for one in (plan, without))
        assert sum(one.edges for one in traces) < sum(one.edges for one in wholes) / 2
        assert sum(one.flops for one in traces) < sum(one.flops for one in wholes) / 2
        sent, of_all = (sum(sum(one.bytes_sent.values()) for one in each) for each in (traces, wholes))
        assert sent < of_all or name in ("single", "cached")  # which fetch nothing
    assert name == "offload" or plan.memory() < without.memory()


@pytest.mark.parametrize("name", ["communicated", "tensor"])
def test_plans_let_go_of_what_such_steps_hold(name: str) -> None:
    plan: Any = Given().plan(name, workload(CASE), 2)
    few = plan.step_plans[True]
    held = weakref.ref((few.pruned if name == "tensor" else few).dependencies(0))
    assert held()
    plan.release()
    gc.collect()
    assert not held()


def test_nothing_is_copied_where_labels_are_everywhere() -> None:
    plan = Given().plan("single", workload(Case(model="gcn")))
    assert set(plan.step_plans.values()) == {plan}
    placed = plan.place(Group())
    assert not placed.pruned_inputs
    assert "reach" not in placed.describe()
    assert placed.topology.adjacency.indices.data_ptr() == plan.work.graph.in_edges.indices.data_ptr()


class Centred(torch.nn.Module):
    """A layer whose rows know each other, as they may on one rank."""

    out_width = NUM_CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(NUM_FEATURES, NUM_CLASSES)

    def forward(self, view: View, x: Tensor) -> Tensor:
        y: Tensor = self.conv(view, x - x.mean(0))
        return y


class Twice(Centred):
    """A layer that aggregates twice, so that nobody can tell which rows are between."""

    def forward(self, view: View, x: Tensor) -> Tensor:
        y: Tensor = view.propagate(self.conv(view, x))
        return y


def linked() -> LinkModel:
    return LinkModel(Stack([SAGEConv(NUM_FEATURES, NUM_CLASSES)]), Dot())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Stack([Centred()]), "mixes vertices outside of message passing"),
        (lambda: Stack([Twice()]), "aggregates one after another"),
        (linked, "links may join any vertices"),
        (lambda: workload(replace(CASE, norm="batch")).model, "BatchNorm takes its statistics over all rows"),
    ],
    ids=["coupled", "twice", "links", "batch norm"],
)
def test_where_all_rows_are_read_the_record_says_why(model: Any, said: str) -> None:
    work = Workload(model().double(), CASE.build()[0])
    placed = Given().plan("single", work).place(Group())
    assert isinstance(placed, ResidentPlaced)
    assert True not in placed.pruned_inputs
    assert said in placed.describe()["reach"]["training"]
    (step,) = placed.steps(0)
    assert step.vertices is None


def test_it_can_be_switched_off_and_on_for_a_step() -> None:
    """A step without vertices is of all rows, whatever the plan's own steps read."""
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
    assert few.batch_size == len(few.vertices) == CASE.labels
    check_close(placed.forward(few), logits[few.vertices], "reached rows, dropout included")


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
    """Two runs have the same bits."""
    runs = [Session(CASE, name, group, Given(machine=MACHINE)) for _ in range(2)]
    first, second = (one.losses(3, one.step(0)[1]) for one in runs)
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
    """Rows that stand in another order than those whose features they have."""
    right = ResidentPlaced.make_inputs

    def wrong(placed: ResidentPlaced, rows: slice | Tensor) -> Inputs:
        return right(placed, rows if isinstance(rows, slice) else rows.flip(0))

    monkeypatch.setattr(ResidentPlaced, "make_inputs", wrong)
    with pytest.raises(AssertionError, match="logits"):
        check_case(Group(), CASE, "single")
