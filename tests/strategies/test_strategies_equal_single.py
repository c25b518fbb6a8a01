"""The parity matrix: each exact strategy x model x option x number of ranks is a test: `pytest -k "tensor and gat"`.

The quick tests contain each pair of properties at least once (tests/lib/matrix.py); `pytest -m ""` runs all.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.lib.cases import EXACT, MACHINE, PARTS_OF_LOGITS, Case, cases
from tests.lib.graphs import NUM_CLASSES, NUM_FEATURES
from tests.lib.matrix import SIZES, Point, all_cases, params
from tests.lib.pairwise import param
from tests.lib.planted import PLANTED, check_planted
from tests.lib.ranks import on_ranks
from tests.lib.session import (
    NOTHING,
    Given,
    Session,
    check_case,
    check_close,
    check_on_ranks,
    part_by,
    reference,
)
from weft.comm import Group
from weft.nn import MODELS, GINConv, Linear, RowLayer, Stack, View, Workload
from weft.partition import METHODS
from weft.strategies import STRATEGIES, Step
from weft.utils.errors import InputError


@pytest.mark.parametrize(("point", "full"), params(EXACT))
def test_equals_single(point: Point, full: bool) -> None:
    """Results equal those of `single`, or layers that read edges are refused by strategies that cannot provide them."""
    if point.case.reads_edges and STRATEGIES[point.strategy].traits.block_error:
        on_ranks(point.size, check_refused, point.strategy, point.case)
        return
    case, options = point.resolved()
    check_on_ranks(point.size, case, point.strategy, options, full=full)


def check_refused(group: Group, name: str, case: Case) -> None:
    with pytest.raises(InputError, match=r"view\.block"):
        Session(case, name, group)


ONE_OR_THREE = [param(size, name=f"P{size}", quick=size in (1, 3)) for size in SIZES]
SEVERAL = ONE_OR_THREE[1:]
EMBEDDED = Case(model="rgcn", typed="some", layers=2, bases=2)


@pytest.mark.parametrize("size", ONE_OR_THREE)
def test_cached_rows_of_embeddings_where_a_rank_has_none(size: int) -> None:
    empty = torch.zeros(EMBEDDED.num_vertices, dtype=torch.int32)
    check_on_ranks(size, EMBEDDED, "cached", Given(partition=empty))


@pytest.mark.parametrize("size", ONE_OR_THREE)
def test_embedded_rows_of_which_some_are_cached(size: int) -> None:
    check_on_ranks(size, EMBEDDED, "hybrid", Given(partition=part_by("random", EMBEDDED, size), cache_ratio=0.5))


PARTITIONED = [
    (Case(model=model, decoupled=decoupled, input_dropout=0.3, weighted=True), method)
    for model, decoupled, method in product(MODELS, (False, True), METHODS)
]


@pytest.mark.parametrize("size", SEVERAL)
def test_costs_determine_what_is_cached(size: int) -> None:
    """Under many partitions, hybrid caches some sources of a later layer and fetches others."""
    mixed = [is_mixed(case, method, size) for case, method in PARTITIONED[::5]]
    assert sum(mixed) > 2 * len(mixed) // 5


def is_mixed(case: Case, method: str, size: int) -> bool:
    """Return True if some rank caches sources of a later layer and fetches others."""
    graph, model = case.build()
    options = Given(partition=part_by(method, case, size), machine=MACHINE)
    plans = options.plan("hybrid", Workload(model, graph), size).layout.blocks.all_dependencies
    return any(layer.num_inputs > plan.num_own and len(layer.fetched) for plan in plans for layer in plan.hops[1:])


@pytest.mark.parametrize("name", ["communicated", "cached", "hybrid"])
@pytest.mark.parametrize("size", SEVERAL)
def test_all_vertices_are_rank_0s(size: int, name: str) -> None:
    empty = torch.zeros(23, dtype=torch.int32)
    check_on_ranks(size, Case(model="sage", norm="batch"), name, Given(partition=empty, cache_ratio=0.5))


def check_limited(group: Group) -> None:
    limited = check_case(group, Case(model="gcn"), "hybrid", Given(cache_ratio=1.0, cache_memory=2000))
    assert limited.strategy.describe()["cached_bytes"] <= 2000


@pytest.mark.parametrize("size", SEVERAL)
def test_hybrid_caches_within_a_memory_limit(size: int) -> None:
    reference(Case(model="gcn"))
    on_ranks(size, check_limited)


@pytest.mark.parametrize("error", EXACT)
@pytest.mark.parametrize("size", SEVERAL)
def test_a_planted_error_shows(size: int, error: str) -> None:
    """Each error is in rows or gradients that the strategy moves."""
    if error not in PLANTED:
        pytest.skip(f"no error of {error} is planted")
    check_planted(size, error, Case(model="gcn"), Given(cache_ratio=0.5, scratch=Path(tempfile.gettempdir())))


@pytest.mark.parametrize("size", SEVERAL)
def test_a_planted_error_in_partial_logits_shows(size: int) -> None:
    check_planted(size, "logits", PARTS_OF_LOGITS, Given(), shows="logits")


@pytest.mark.parametrize("error", ["masks_by_local_ids", "masks_of_first_heads"])
@pytest.mark.parametrize("size", SEVERAL)
def test_a_planted_error_in_masks_of_edges_shows(size: int, error: str) -> None:
    check_planted(size, error, Case(model="gat", attention_dropout=0.5), Given(), shows="logits")


@pytest.mark.parametrize("error", ["pairs", "embedded_rows", "summed_embedding"])
@pytest.mark.parametrize("size", SEVERAL)
def test_a_planted_error_of_types_shows(size: int, error: str) -> None:
    check_planted(size, error, EMBEDDED, Given(cache_ratio=0.5), shows=r"logits|gradient|losses")


class TwoAggregates(torch.nn.Module):
    """A layer that aggregates the result of its first aggregate again, and adds its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.out_width = NUM_CLASSES

    def forward(self, view: View, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        y: torch.Tensor = h + view.propagate(view.propagate(h, reduce="mean"), norm="gcn")
        return y


class AddedRows(TwoAggregates):
    """A layer that ignores that it may have fewer targets than sources."""

    def forward(self, view: View, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        y: torch.Tensor = h + view.propagate(h)
        return y


def check_custom_layers(group: Group) -> None:
    """Check that these layers run if ranks keep every row, and are refused if rows may be cached."""
    graph, _ = Case(model="gcn").build()
    for layer, message in (
        (TwoAggregates, "give each its own stage, or use --strategy communicated"),
        (AddedRows, r"use view\.targets\(x\)"),
    ):
        torch.manual_seed(1)
        model = Stack([layer()]).double()
        step = Step(epoch=0, training=False)
        work = Workload(model, graph)
        whole = NOTHING.plan("single", work).place(Group()).forward(step)
        placed = NOTHING.plan("communicated", work, group.size).place(group)
        check_close(placed.forward(step), whole[placed.rows], layer.__name__)
        for name in ("cached", "hybrid"):
            with pytest.raises(InputError, match=message):
                Given(machine=MACHINE).plan(name, work, group.size).place(group)


def check_model_without_aggregates(group: Group) -> None:
    """Check that a model without aggregates gives the same results under every strategy."""
    graph, _ = Case(model="gcn").build()
    torch.manual_seed(1)
    model = Stack([RowLayer(Linear(NUM_FEATURES, 4), 4), RowLayer(Linear(4, NUM_CLASSES), NUM_CLASSES)]).double()
    step = Step(epoch=0, training=False)
    work = Workload(model, graph)
    whole = NOTHING.plan("single", work).place(Group()).forward(step)
    for name in EXACT:
        placed = Given(machine=MACHINE).plan(name, work, group.size).place(group)
        check_close(placed.forward(step), whole[placed.rows], name)


def check_extreme_shapes(group: Group) -> None:
    """Check a graph whose feature rows have no columns, and one with fewer vertices than there are ranks."""
    for num_vertices, width, options in ((23, 0, Given(chunks=3)), (2, NUM_FEATURES, Given(chunks=1))):
        case = Case(model="gin", num_vertices=num_vertices)
        graph, _ = case.build()
        graph = replace(graph, x=graph.x[:, :width])
        for name in EXACT:
            torch.manual_seed(1)
            with warnings.catch_warnings(action="ignore"):  # PyTorch initializes no empty weights
                model = Stack([GINConv(width, 4), GINConv(4, NUM_CLASSES)]).double()
            work = Workload(model, graph)
            step = Step(epoch=0, training=True)
            whole = NOTHING.plan("single", work).place(Group()).forward(step).detach()
            part = torch.arange(graph.num_vertices, dtype=torch.int32) % group.size
            placed = Given(machine=MACHINE, partition=part, **options).plan(name, work, group.size).place(group)
            logits = placed.forward(step)
            placed.backward(logits, torch.ones_like(logits))
            check_close(logits.detach(), whole[placed.rows], f"{name}, {num_vertices} rows of width {width}")


def test_rows_without_columns_and_more_ranks_than_vertices() -> None:
    on_ranks(4, check_extreme_shapes)


def test_layers_that_need_every_row() -> None:
    on_ranks(2, check_custom_layers)


def test_models_without_aggregates() -> None:
    on_ranks(2, check_model_without_aggregates)


@pytest.mark.parametrize("case", [case for case in cases() if case.order != "none"], ids=lambda case: case.id)
def test_single_equals_itself_in_another_order(case: Case) -> None:
    check_on_ranks(1, case, "single")


def test_names_of_cases_are_unique() -> None:
    every = all_cases()
    assert len({case.id for case in every}) == len(every)
