"""What is found out of a model with a few rows, and how a round's edges get their missing loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lib.cases import Case, typed_cases
from tests.lib.graphs import NUM_CLASSES, NUM_FEATURES
from tests.lib.session import Session
from weft.comm import Group
from weft.config.optimisations import Optimisations
from weft.nn import Stack, Total
from weft.parallel.chunks.program.chunk_program import ChunkProgram, Segment
from weft.parallel.chunks.program.tracer import ProgramTracer
from weft.parallel.chunks.run.slots import spread, with_loops


def program(*, training: bool = True, without: str = "", **options: Any) -> ChunkProgram:
    graph, model = Case(**options).build()
    return ProgramTracer(graph, model, Optimisations.without(without)).program(training=training)


def widths(segment: Segment) -> list[int]:
    return [port.width for port in segment.live]


def test_ports_are_the_rows_that_a_boundary_leaves() -> None:
    """GCN maps first where that is narrower, and takes its constant features as they are."""
    first, second, third, last = program(model="gcn", hidden=9).segments
    assert [widths(one) for one in (first, second, third, last)] == [[NUM_FEATURES], [9], [NUM_CLASSES], [NUM_CLASSES]]
    assert [one.live[0].differentiable for one in (first, second, third, last)] == [False, True, True, True]
    assert [one.width for one in (first, second, third)] == [NUM_FEATURES, 9, NUM_CLASSES]
    assert [one.hop for one in (first, second, third, last)] == [0, 1, 2, 3]
    assert last.boundary is None
    assert not last.aggregates


def test_rows_that_are_read_in_two_ways_are_one_port() -> None:
    """GIN adds its own rows to those of its sources: the same."""
    for segment in program(model="gin").segments[:-1]:
        assert segment.sources["x"] == segment.rows["own"] == 0
        assert len(segment.live) == 1


def test_a_residual_crosses_only_where_it_is_added() -> None:
    """The features are of another width than the first layer's result, and the logits have none."""
    first, second, third, _ = program(model="gcn", hidden=9, residual=True).segments
    assert [one.rows for one in (first, second, third)] == [{}, {"residual": 0}, {}]
    assert widths(second) == [9]
    assert [widths(one) for one in (first, third)] == [[NUM_FEATURES], [NUM_CLASSES]]


def test_attention_has_ports_for_both_ends() -> None:
    segment = program(model="gat", hidden=9, heads=3).segments[0]
    assert sorted(segment.sources) == ["h", "logit_src"]
    assert sorted(segment.targets) == ["logit_dst"]
    assert [segment.live[segment.sources["h"]].width, segment.live[segment.targets["logit_dst"]].width] == [9, 3]
    assert not segment.op.linear


@pytest.mark.parametrize(
    ("options", "constant"),
    [
        ({"dropout": 0.4}, True),
        ({"input_dropout": 0.3}, False),
        ({"input_dropout": 0.3, "training": False}, True),
        ({"without": "reuse"}, False),
    ],
)
def test_the_first_answer_is_constant_where_nothing_is_dropped_before_it(
    options: dict[str, Any], constant: bool
) -> None:
    segments = program(model="sage", **options).segments
    assert [one.constant for one in segments] == [constant, *[False] * (len(segments) - 1)]


def test_what_has_parameters_before_it_is_not_constant() -> None:
    assert not program(model="gat").segments[0].constant
    assert not program(model="gcn", decoupled=True).segments[0].constant
    graph, model = typed_cases()[0].build()
    assert not ProgramTracer(graph, model, Optimisations()).program(training=True).segments[0].constant


def test_an_answer_is_needed_where_a_map_or_a_function_follows() -> None:
    """Not behind a last GCN layer that maps first: the gradient of a bias needs no rows."""
    assert [one.needs_result for one in program(model="gcn", hidden=9).segments[:-1]] == [True, True, False]
    assert program(model="gcn", hidden=3).segments[-2].needs_result  # the last layer aggregates 3 columns, then maps
    assert [one.needs_result for one in program(model="gcn", decoupled=True).segments[:-1]] == [False]


def test_masks_are_counted_through_the_parts() -> None:
    """Each stage's view draws one mask before the stage's rows, none in an evaluation."""
    segments = program(model="gcn", layers=3, input_dropout=0.3).segments
    assert [one.calls for one in segments] == [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)]
    assert [one.calls for one in program(model="gcn", input_dropout=0.3, training=False).segments] == [(0, 0, 0)] * 4
    shared = program(model="gcn", decoupled=True, layers=3).segments  # one view for all updates
    assert [one.calls for one in shared] == [(0,), (2,)]


def test_statistics_of_a_batch_norm_are_no_products() -> None:
    found = program(model="gcn", norm="batch", layers=2)
    assert found.num_hops == 2
    assert [one.boundary is not None and isinstance(one.op, Total) for one in found.segments] == [
        False, True, True, False, False,
    ]  # fmt: skip
    assert [one.hop for one in found.segments] == [0, 1, 1, 1, 2]
    assert [one.rows for one in found.segments[1:3]] == [{"x": 0}, {"x": 0}]
    assert [one.targets for one in found.segments[1:3]] == [{"x": 0}, {}]  # the squares are added up at once
    assert program(model="gcn", norm="batch", layers=2, training=False).num_hops == 2


def test_a_rehearsal_leaves_the_model_as_it_was() -> None:
    graph, model = Case(model="gcn", norm="batch").build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    for training in (True, False):
        ProgramTracer(graph, model, Optimisations()).program(training=training)
    assert isinstance(model, Stack)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_whole_run_is_planned_once_for_both() -> None:
    """The segments of training and of evaluation ask for the same aggregates."""
    placed = Session(Case(model="sage", norm="batch", input_dropout=0.3), "offload", Group())
    programs = placed.plan.programs
    assert programs[True].num_hops == programs[False].num_hops == 3


def test_missing_loops_become_last_edges() -> None:
    indptr, missing = torch.tensor([0, 2, 2, 5]), torch.tensor([True, True, False])
    longer, place = with_loops(indptr, missing)
    assert longer.tolist() == [0, 3, 4, 7]
    assert place.tolist() == [0, 1, -1, -1, 2, 3, 4]
    assert spread(torch.tensor([10, 11, 12, 13, 14]), place, torch.tensor([7, 8])).tolist() == [
        10, 11, 7, 8, 12, 13, 14,
    ]  # fmt: skip


@pytest.mark.parametrize("missing", [[False] * 3, [True] * 3])
def test_all_or_no_loops_missing(missing: list[bool]) -> None:
    indptr = torch.tensor([0, 0, 1, 1])
    longer, place = with_loops(indptr, torch.tensor(missing))
    assert longer.tolist() == ([0, 1, 3, 4] if missing[0] else [0, 0, 1, 1])
    assert place.tolist() == ([-1, 0, -1, -1] if missing[0] else [0])
    kept = spread(torch.tensor([0.5]), place, torch.ones(sum(missing)))
    assert kept.sum() == 0.5 + sum(missing)


def test_no_rows_have_no_loops() -> None:
    longer, place = with_loops(torch.tensor([0]), torch.tensor([], dtype=torch.bool))
    assert longer.tolist() == [0]
    assert len(place) == 0
