"""Chunk programs that are traced with a few rows of a model, and self-loops added to the edges of a round."""

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
    """GCN transforms first if that is narrower, but aggregates constant features untransformed."""
    first, second, third, last = program(model="gcn", hidden=9).segments
    assert [widths(segment) for segment in (first, second, third, last)] == [
        [NUM_FEATURES],
        [9],
        [NUM_CLASSES],
        [NUM_CLASSES],
    ]
    assert [segment.live[0].differentiable for segment in (first, second, third, last)] == [False, True, True, True]
    assert [segment.width for segment in (first, second, third)] == [NUM_FEATURES, 9, NUM_CLASSES]
    assert [segment.hop for segment in (first, second, third, last)] == [0, 1, 2, 3]
    assert last.boundary is None
    assert not last.aggregates


def test_rows_that_are_read_in_two_ways_are_one_port() -> None:
    """GIN adds the row of each target to those of its sources, and both are read from the same rows."""
    for segment in program(model="gin").segments[:-1]:
        assert segment.sources["x"] == segment.rows["own"] == 0
        assert len(segment.live) == 1


def test_a_residual_is_live_only_where_it_is_added() -> None:
    """The first and the last layer have no residual, since input and output differ in width."""
    first, second, third, _ = program(model="gcn", hidden=9, residual=True).segments
    assert [segment.rows for segment in (first, second, third)] == [{}, {"residual": 0}, {}]
    assert widths(second) == [9]
    assert [widths(segment) for segment in (first, third)] == [[NUM_FEATURES], [NUM_CLASSES]]


def test_attention_has_ports_for_both_endpoints() -> None:
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
def test_the_first_aggregate_is_constant_without_dropout_before_it(options: dict[str, Any], constant: bool) -> None:
    segments = program(model="sage", **options).segments
    assert [segment.constant for segment in segments] == [constant, *[False] * (len(segments) - 1)]


def test_what_has_parameters_before_it_is_not_constant() -> None:
    assert not program(model="gat").segments[0].constant
    assert not program(model="gcn", decoupled=True).segments[0].constant
    graph, model = typed_cases()[0].build()
    assert not ProgramTracer(graph, model, Optimisations()).program(training=True).segments[0].constant


def test_a_result_is_needed_if_a_dense_layer_or_a_function_follows() -> None:
    """No result is needed after a last GCN layer that transforms first: the gradient of a bias needs no rows."""
    assert [segment.needs_result for segment in program(model="gcn", hidden=9).segments[:-1]] == [True, True, False]
    # The last layer aggregates 3 columns, then transforms.
    assert program(model="gcn", hidden=3).segments[-2].needs_result
    assert [segment.needs_result for segment in program(model="gcn", decoupled=True).segments[:-1]] == [False]


def test_dropout_calls_are_counted_through_the_segments() -> None:
    """The view of each stage draws one mask in training, and none in an evaluation."""
    segments = program(model="gcn", layers=3, input_dropout=0.3).segments
    assert [segment.calls for segment in segments] == [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)]
    assert [segment.calls for segment in program(model="gcn", input_dropout=0.3, training=False).segments] == [
        (0, 0, 0)
    ] * 4
    shared = program(model="gcn", decoupled=True, layers=3).segments  # one view for all updates
    assert [segment.calls for segment in shared] == [(0,), (2,)]


def test_statistics_of_a_batch_norm_are_no_aggregates() -> None:
    traced = program(model="gcn", norm="batch", layers=2)
    assert traced.num_hops == 2
    assert [segment.boundary is not None and isinstance(segment.op, Total) for segment in traced.segments] == [
        False, True, True, False, False,
    ]  # fmt: skip
    assert [segment.hop for segment in traced.segments] == [0, 1, 1, 1, 2]
    assert [segment.rows for segment in traced.segments[1:3]] == [{"x": 0}, {"x": 0}]
    assert [segment.targets for segment in traced.segments[1:3]] == [{"x": 0}, {}]  # squares are summed at once
    assert program(model="gcn", norm="batch", layers=2, training=False).num_hops == 2


def test_tracing_does_not_change_the_model() -> None:
    graph, model = Case(model="gcn", norm="batch").build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    for training in (True, False):
        ProgramTracer(graph, model, Optimisations()).program(training=training)
    assert isinstance(model, Stack)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_and_evaluation_have_the_same_aggregates() -> None:
    """A run is planned once, so the segments of training and evaluation must have the same aggregates."""
    placed = Session(Case(model="sage", norm="batch", input_dropout=0.3), "offload", Group())
    programs = placed.plan.programs
    assert programs[True].num_hops == programs[False].num_hops == 3


def test_missing_loops_become_last_edges() -> None:
    indptr, missing = torch.tensor([0, 2, 2, 5]), torch.tensor([True, True, False])
    longer, position = with_loops(indptr, missing)
    assert longer.tolist() == [0, 3, 4, 7]
    assert position.tolist() == [0, 1, -1, -1, 2, 3, 4]
    assert spread(torch.tensor([10, 11, 12, 13, 14]), position, torch.tensor([7, 8])).tolist() == [
        10, 11, 7, 8, 12, 13, 14,
    ]  # fmt: skip


@pytest.mark.parametrize("missing", [[False] * 3, [True] * 3])
def test_all_or_no_loops_missing(missing: list[bool]) -> None:
    indptr = torch.tensor([0, 0, 1, 1])
    longer, position = with_loops(indptr, torch.tensor(missing))
    assert longer.tolist() == ([0, 1, 3, 4] if missing[0] else [0, 0, 1, 1])
    assert position.tolist() == ([-1, 0, -1, -1] if missing[0] else [0])
    weights = spread(torch.tensor([0.5]), position, torch.ones(sum(missing)))
    assert weights.sum() == 0.5 + sum(missing)


def test_no_rows_have_no_loops() -> None:
    longer, position = with_loops(torch.tensor([0]), torch.tensor([], dtype=torch.bool))
    assert longer.tolist() == [0]
    assert len(position) == 0
