"""Products chunk by chunk under tensor: the numbers of single, every row once over the network, a limit kept."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.ranks import on_ranks
from tests.strategies.cases import Case, cases, chosen, point, turn, typed_cases
from tests.strategies.planted import check_planted
from tests.strategies.session import Given, Session, check_case, check_close, check_on_ranks, reference
from weft.chunks.bounds import cut_evenly, cut_to_fit, make_chunks
from weft.chunks.columns import offloaded
from weft.chunks.exchange_plan import ExchangePlan
from weft.comm import Group
from weft.core.errors import InputError
from weft.nn import MODELS, WorkingSet, Workload
from weft.strategies.tensor.plan import TensorOptions, TensorPlan

COUNTS = (1, 2, 7, 32)
WITHOUT = ("", "pipeline")
SLOW = pytest.mark.slow


def all_cases() -> list[Case]:
    return [*cases(), *typed_cases()]


def least(case: Case, size: int) -> int:
    graph, model = case.build()
    return TensorPlan(Workload(model, graph), size).least_bytes()


def ways() -> list[Any]:
    """Every case under one of the ways to cut it."""
    points = []
    for size in (1, 2, 3, 4):
        named = {}
        for case in all_cases():
            every = list(product((*COUNTS[1:], "limit"), WITHOUT))
            chunks, saving = every[turn(f"{case.id}-P{size}", len(every))]
            way = "limit" if chunks == "limit" else f"{chunks}chunks"
            name = "-".join(filter(None, ("tensor", case.id, way, saving and f"no_{saving}", f"P{size}")))
            named[name] = (case.without_saving(saving), chunks, size)
        quick = {1: set(named), 3: chosen(named, 1 / 3)}.get(size, set())
        points += [point(*values, name=name, quick=name in quick) for name, values in named.items()]
    return points


@pytest.mark.parametrize(("case", "chunks", "size"), ways())
def test_chunks_equal_single(case: Case, chunks: int | str, size: int) -> None:
    if isinstance(chunks, int):
        check_on_ranks(size, case, "tensor", Given(chunks=chunks))
    else:
        reference(case)
        on_ranks(size, check_limit, case, 2 * least(case, size))


def check_limit(group: Group, case: Case, limit: int) -> None:
    placed = check_case(group, case, "tensor", Given(device_memory=limit))
    assert 0 < placed.meter.take("train").working_bytes <= limit


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)])
def test_a_planted_error_shows(size: int) -> None:
    check_planted(size, "tensor", Case(model="gcn"), Given(chunks=3))


def check_pipeline(group: Group) -> None:
    """The pipeline changes no bit."""
    for model in MODELS:
        case = Case(model=model, decoupled=model != "gin")
        runs = []
        for saving in WITHOUT:
            placed = Session(case.without_saving(saving), "tensor", group, Given(chunks=4))
            runs.append([placed.step(0)[0], *placed.gradients().values()])
        assert all(map(torch.equal, *runs)), f"{case}: the pipeline changes bits"


def check_counts(group: Group, case: Case, chunks: int) -> None:
    """Losses are single's, and the pipeline changes no bit."""
    runs = []
    for saving in WITHOUT:
        placed = Session(case.without_saving(saving), "tensor", group, Given(chunks=chunks))
        logits, _ = placed.step(0)
        runs.append([logits, *placed.gradients().values()])
        check_close(placed.all_losses(case.steps), reference(case).losses, f"{case} {chunks}")
    assert all(map(torch.equal, *runs)), "the pipeline changes bits"


COUNTED = [Case(model=one, decoupled=decoupled, layers=2) for one, decoupled in product(MODELS, (False, True))]


@SLOW
@pytest.mark.parametrize("size", [1, 2, 3, 4], ids=lambda size: f"P{size}")
@pytest.mark.parametrize("chunks", COUNTS, ids=lambda chunks: f"{chunks}chunks")
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.id)
def test_every_count_equals_single(case: Case, chunks: int, size: int) -> None:
    """Every model in 1, 2, 7 and 32 chunks."""
    reference(case)
    on_ranks(size, check_counts, case, chunks)


def test_the_pipeline_changes_no_bit() -> None:
    on_ranks(3, check_pipeline)


def test_chunks_cover_the_graph() -> None:
    adjacency = Case(model="gcn").build()[0].in_edges
    for bounds in (cut_evenly(adjacency, 5), cut_to_fit(adjacency, WorkingSet(8, 8, 4), 400)[0]):
        assert bounds[0] == 0
        assert bounds[-1] == adjacency.num_targets
        chunks = make_chunks(adjacency, bounds)
        source, target = adjacency.edges()
        found = [one.block.edges() for one in chunks]
        sources = torch.cat([one.sources[edges[0]] for one, edges in zip(chunks, found, strict=True)])
        targets = torch.cat([one.first + edges[1] for one, edges in zip(chunks, found, strict=True)])
        assert torch.equal(sources, source)
        assert torch.equal(targets, target)
        assert torch.equal(torch.cat([one.fresh for one in chunks]).sort().values, torch.arange(adjacency.num_targets))


def test_ranges_are_the_longest_that_fit() -> None:
    adjacency, needs = Case(model="gcn").build()[0].in_edges, WorkingSet(100, 30, 7)
    for limit in (400, 1000, 3000, 10**6):
        bounds, most = cut_to_fit(adjacency, needs, limit)
        sizes = [needs.bytes(one.block) for one in make_chunks(adjacency, bounds)]
        assert max(sizes) == most
        for first, end, num_bytes in zip(bounds, bounds[1:], sizes, strict=False):
            assert num_bytes <= limit or end == first + 1
            if end < adjacency.num_targets:
                longer = make_chunks(adjacency, (first, end + 1))[0]
                assert needs.bytes(longer.block) > limit


def test_rows_are_dealt_evenly_and_cross_once() -> None:
    graph = Case(model="gcn").build()[0]
    chunks = make_chunks(graph.in_edges, cut_evenly(graph.in_edges, 4))
    for rank in range(3):
        exchange_plan = ExchangePlan.of(chunks, rank, 3, pipeline=True)
        for sets in (exchange_plan.receives, exchange_plan.sends):
            rows = [one for one in sets if one is not None]
            assert torch.equal(torch.cat([one.ids for one in rows]).sort().values, torch.arange(graph.num_vertices))
            assert torch.cat([one.own for one in rows]).sort().values.tolist() == list(range(len(range(rank, 23, 3))))
        assert all(max(one.counts) - min(one.counts) <= 1 for one in exchange_plan.sends if one is not None)


@pytest.mark.parametrize("case", [Case(model="gat", heads=3), typed_cases()[3]], ids=["gat", "rgcn"])
def test_a_limit_that_nothing_fits_in_is_refused_with_the_least(case: Case) -> None:
    bytes_needed = least(case, 1)
    placed = Session(case, "tensor", Group(), Given(device_memory=bytes_needed))
    placed.step(0)
    assert 0 < placed.meter.take("train").working_bytes <= bytes_needed
    with pytest.raises(InputError, match=f"give at least {bytes_needed:,}"):
        Given(device_memory=bytes_needed - 1).plan("tensor", placed.plan.work).require()


@pytest.mark.parametrize("asked", [{"chunks": 2}, {"device_memory": 1 << 30}])
def test_memory_of_a_step_in_chunks_is_not_foreseen(asked: dict[str, int]) -> None:
    graph, model = Case(model="gcn").build()
    plan = TensorPlan(Workload(model, graph), 2, TensorOptions(**asked))
    with pytest.raises(NotImplementedError, match="chunk by chunk"):
        plan.memory()


def test_files_hold_the_same_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.chunks.columns.OFFLOADED_BYTES", 0)
    adjacency = Case(model="gcn", weighted=True).build()[0].in_edges
    moved = offloaded(adjacency)
    for name in ("indptr", "indices", "weight"):
        assert torch.equal(getattr(moved, name), getattr(adjacency, name))
        assert torch.equal(getattr(moved.transpose, name), getattr(adjacency.transpose, name))
