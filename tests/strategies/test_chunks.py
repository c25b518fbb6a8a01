"""Products chunk by chunk under tensor: the numbers of single, every row once over the network, a limit kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from parity import Case, Given, Session, cases, check_case, check_close, planted_error, reference, typed_cases
from ranks import spawn

from weft.chunks.bounds import cut_evenly, cut_to_fit, make_chunks
from weft.chunks.columns import spilled
from weft.chunks.crossing import Crossing
from weft.comm import Group
from weft.core.errors import InputError
from weft.nn import MODELS, WorkingSet, Workload
from weft.strategies.tensor.plan import TensorPlan

COUNTS = (1, 2, 7, 32)
WITHOUT = ("", "pipeline")


def all_cases() -> list[Case]:
    return [*cases(), *typed_cases()]


def least(case: Case, size: int) -> int:
    graph, model = case.build()
    return TensorPlan(Workload(model, graph), size).least_bytes()


def without(case: Case, saving: str) -> Case:
    return replace(case, without=",".join(filter(None, (case.without, saving))))


def check_cases(group: Group, turns: int) -> int:
    """Every case, or some in turns, each under one of the ways to cut it."""
    ways = list(product((*COUNTS[1:], "limit"), WITHOUT))
    chosen = list(enumerate(all_cases()))[::turns]
    for number, case in chosen:
        chunks, saving = ways[(number + 3 * group.size) % len(ways)]
        if chunks != "limit":
            check_case(group, without(case, saving), "tensor", Given(chunks=int(chunks)))
            continue
        limit = 2 * least(case, group.size)
        placed = check_case(group, without(case, saving), "tensor", Given(device_memory=limit))
        assert 0 < placed.meter.take("train").working_bytes <= limit
    with planted_error("tensor"), pytest.raises(AssertionError, match=r"logits|gradient"):
        check_case(group, Case(model="gcn"), "tensor", Given(chunks=3))
    return len(chosen)


def check_pipeline(group: Group) -> None:
    """The pipeline changes no bit."""
    for model in MODELS:
        case = Case(model=model, decoupled=model != "gin")
        runs = []
        for saving in WITHOUT:
            placed = Session(without(case, saving), "tensor", group, Given(chunks=4))
            runs.append([placed.step(0)[0], *placed.gradients().values()])
        assert all(map(torch.equal, *runs)), f"{case}: the pipeline changes bits"


def check_counts(group: Group) -> int:
    """Every model in 1, 2, 7 and 32 chunks: losses are single's, and the pipeline changes no bit."""
    checked = 0
    for (model, decoupled), chunks in product(product(MODELS, (False, True)), COUNTS):
        case = Case(model=model, decoupled=decoupled, layers=2)
        runs = []
        for saving in WITHOUT:
            placed = Session(without(case, saving), "tensor", group, Given(chunks=chunks))
            logits, _ = placed.step(0)
            runs.append([logits, *placed.gradients().values()])
            parts = [report["losses"] for report in group.all_gather_object({"losses": placed.losses(5)})]
            losses = torch.tensor(parts, dtype=torch.float64).sum(0)
            check_close(losses, torch.tensor(reference(case).losses, dtype=torch.float64), f"{case} {chunks}")
            checked += 1
        assert all(map(torch.equal, *runs)), f"{case} in {chunks} chunks: the pipeline changes bits"
    return checked


@pytest.mark.parametrize("size", [1, 3])
def test_chunks_equal_single(size: int) -> None:
    assert spawn(size, check_cases, size) == [-(-len(all_cases()) // size)] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_chunks_of_every_case_equal_single(size: int) -> None:
    assert spawn(size, check_cases, 1) == [len(all_cases())] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_count_equals_single(size: int) -> None:
    assert spawn(size, check_counts) == [2 * 2 * len(MODELS) * len(COUNTS)] * size


def test_the_pipeline_changes_no_bit() -> None:
    spawn(3, check_pipeline)


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
        crossing = Crossing.of(chunks, rank, 3, pipeline=True)
        for sets in (crossing.arrivals, crossing.departures):
            rows = [one for one in sets if one is not None]
            assert torch.equal(torch.cat([one.ids for one in rows]).sort().values, torch.arange(graph.num_vertices))
            assert torch.cat([one.own for one in rows]).sort().values.tolist() == list(range(len(range(rank, 23, 3))))
        assert all(max(one.counts) - min(one.counts) <= 1 for one in crossing.departures if one is not None)


@pytest.mark.parametrize("case", [Case(model="gat", heads=3), typed_cases()[3]], ids=["gat", "rgcn"])
def test_a_limit_that_nothing_fits_in_is_refused_with_the_least(case: Case) -> None:
    bytes_needed = least(case, 1)
    placed = Session(case, "tensor", Group(), Given(device_memory=bytes_needed))
    placed.step(0)
    assert 0 < placed.meter.take("train").working_bytes <= bytes_needed
    with pytest.raises(InputError, match=f"give at least {bytes_needed:,}"):
        Session(case, "tensor", Group(), Given(device_memory=bytes_needed - 1))


def test_files_hold_the_same_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.chunks.columns.SPILLED_BYTES", 0)
    adjacency = Case(model="gcn", weighted=True).build()[0].in_edges
    moved = spilled(adjacency)
    for name in ("indptr", "indices", "weight"):
        assert torch.equal(getattr(moved, name), getattr(adjacency, name))
        assert torch.equal(getattr(moved.transpose, name), getattr(adjacency.transpose, name))
