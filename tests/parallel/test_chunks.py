"""Aggregates of `tensor` in chunks: results of `single`, each row sent once, peak memory within the limit."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from tests.lib.cases import Case, typed_cases
from tests.lib.matrix import least_limit
from tests.lib.pairwise import param
from tests.lib.planted import check_planted, replaced
from tests.lib.ranks import on_ranks
from tests.lib.session import STEPS, Given, Session, check_case, check_close, reference
from weft.comm import Group
from weft.nn import MODELS, Aggregate, Attend, Max, Sum, WorkingSet
from weft.parallel.chunks.cut.ranges import RankHop
from weft.parallel.chunks.cut.residency import ChunkSources
from weft.parallel.chunks.run.chunk_runtime import as_slice
from weft.parallel.columns.chunking import PREFETCH_FACTOR, Chunking, least_bytes, working_bytes
from weft.parallel.columns.column_pass import ColumnRounds
from weft.utils.errors import InputError

COUNTS = (1, 2, 7, 32)
WITHOUT = ("", "pipeline")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([3, 4, 5], slice(3, 6)),
        ([7], slice(7, 8)),
        ([], slice(0, 0)),
        ([3, 5, 4], None),
        ([3, 3], None),
        ([5, 4], None),
        ([2, 3, 5], None),
    ],
)
def test_contiguous_vertices_are_not_copied(indices: list[int], expected: slice | None) -> None:
    ids = torch.tensor(indices, dtype=torch.int64)
    result = as_slice(ids)
    assert result is ids if expected is None else result == expected


LIMITED_CASES = [Case(model=model, decoupled=model == "sage") for model in MODELS] + typed_cases()[:1]


@pytest.mark.parametrize(
    ("case", "size"),
    [
        param(case, size, name=f"{case.id}-P{size}", quick=(number + 2 * (size // 2)) % 4 == 0)
        for (number, case), size in product(enumerate(LIMITED_CASES), (1, 3))
    ],
)
def test_the_working_set_stays_within_the_limit(case: Case, size: int) -> None:
    reference(case, full=True)
    on_ranks(size, check_limit, case, 2 * least_limit(case, size))


def check_limit(group: Group, case: Case, limit: int) -> None:
    placed = check_case(group, case, "tensor", Given(device_memory=limit), full=True)
    assert 0 < placed.meter.take("train").working_bytes <= limit


MOVED = [Case(model=model, decoupled=decoupled) for model, decoupled in product(("gcn", "gat", "gatv2"), (False, True))]
MOVED += [Case(model="pyg-sage-max"), *typed_cases()[3:4]]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_transfers_equal_the_trace(size: int) -> None:
    """Limits range from the least to one that fits everything, with as few chunks as possible and with more."""
    on_ranks(size, check_moves)


def check_moves(group: Group) -> None:
    for case, (times, chunks) in product(MOVED, ((1, 0), (8, 3), (100, 0))):
        options = Given(device_memory=times * least_limit(case, group.size), chunks=chunks)
        placed = Session(case, "tensor", group, options, traced=True)
        placed.step(0)
        trace, counts = placed.trace(training=True), placed.meter.take("train")
        assert counts.to_device == trace.to_device, case
        assert counts.to_host == trace.to_host, case
        assert trace.to_device.keys() >= {"sources", "edges", "gradients"}
        assert trace.to_host.keys() == {"rows", "gradients"}


@pytest.mark.parametrize(("way", "uncounted"), [("read_grads", "to_device"), ("accumulate_rows", "to_host")])
def test_gradients_that_are_not_counted_are_detected(way: str, uncounted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, right = Case(model="gat", heads=3), getattr(ColumnRounds, way)

    def wrong(runtime: ColumnRounds, *arguments: Any) -> Any:
        with replaced(runtime, "transfer", lambda *_: None):
            return right(runtime, *arguments)

    monkeypatch.setattr(ColumnRounds, way, wrong)
    with pytest.raises(AssertionError, match=uncounted):
        check_limit(Group(), case, 2 * least_limit(case, 1))


def test_rows_in_memory_are_not_transferred() -> None:
    placed = check_case(Group(), Case(model="gat", heads=3), "tensor", Given(chunks=3))
    assert not placed.trace(training=True).to_device


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)])
def test_a_planted_error_shows(size: int) -> None:
    check_planted(size, "tensor" if size > 1 else "columns", Case(model="gcn"), Given(chunks=3))


def check_pipeline(group: Group) -> None:
    """Check that the pipeline changes no bit."""
    for model in MODELS:
        case = Case(model=model, decoupled=model != "gin")
        runs = []
        for saving in WITHOUT:
            placed = Session(case.without_saving(saving), "tensor", group, Given(chunks=4))
            runs.append([placed.step(0)[0], *placed.gradients().values()])
        assert all(map(torch.equal, *runs)), f"{case}: the pipeline changes bits"


def check_counts(group: Group, case: Case, chunks: int) -> None:
    """Check that losses equal those of `single`, and that the pipeline changes no bit."""
    runs = []
    for saving in WITHOUT:
        placed = Session(case.without_saving(saving), "tensor", group, Given(chunks=chunks))
        logits, loss = placed.step(0)
        runs.append([logits, *placed.gradients().values()])
        check_close(placed.all_losses(STEPS, loss), reference(case, full=True).losses, f"{case} {chunks}")
    assert all(map(torch.equal, *runs)), "the pipeline changes bits"


COUNTED = [Case(model=model, decoupled=decoupled, layers=2) for model, decoupled in product(MODELS, (False, True))]


@SLOW
@pytest.mark.parametrize("size", [1, 2, 3, 4], ids=lambda size: f"P{size}")
@pytest.mark.parametrize("chunks", COUNTS, ids=lambda chunks: f"{chunks}chunks")
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.id)
def test_every_count_equals_single(case: Case, chunks: int, size: int) -> None:
    """Every model gives the same results in 1, 2, 7 and 32 chunks."""
    reference(case, full=True)
    on_ranks(size, check_counts, case, chunks)


def test_the_pipeline_changes_no_bit() -> None:
    on_ranks(3, check_pipeline)


LIMITED = [Sum(norm="gcn"), Max(), Attend((0, 3, 6), 0.2)]


def working_set_of(op: Aggregate) -> WorkingSet:
    return op.working_set(Case(model="gcn").build()[0].in_edges, 6, itemsize=8)


@pytest.mark.parametrize("op", LIMITED, ids=lambda op: type(op).__name__)
def test_rounds_stay_within_every_limit_from_the_least_on(op: Aggregate) -> None:
    graph, needs = Case(model="gcn").build()[0], working_set_of(op)
    least, counts = least_bytes(graph.in_edges, op, needs), []
    for limit in (least, least + 8, 2 * least, PREFETCH_FACTOR * least, 6 * least, 1 << 20):
        cut = Chunking(graph, limit=limit).cut(op, needs)
        rounds = list(cut.schedule.make_rounds())
        assert cut.num_bytes == working_bytes(needs, cut.schedule, ahead=cut.ahead) <= limit
        assert cut.ahead == (limit >= PREFETCH_FACTOR * least)
        targets = [
            vertex for round_ in rounds for vertex in range(round_.sizes.targets.start, round_.sizes.targets.stop)
        ]
        assert targets == list(range(graph.num_vertices))
        sources = torch.cat([round_.slot_sources[round_.indices.long()] for round_ in rounds])
        assert torch.equal(sources, graph.in_edges.indices.long())
        counts.append(len(rounds))
    assert counts[0] > counts[-1] == 1


def test_chunks_of_one_target_need_the_least_bytes() -> None:
    graph = Case(model="gcn").build()[0]
    for op in LIMITED:
        needs, one_each = working_set_of(op), tuple(range(graph.num_vertices + 1))
        every = torch.arange(graph.num_vertices)
        layer = Chunking(graph).hop
        sources = ChunkSources([RankHop(layer, every)], [one_each], loops=op.loops, ahead=False)
        assert working_bytes(needs, sources.schedule(0), ahead=False) == least_bytes(layer.block, op, needs)


def test_no_more_chunks_than_targets() -> None:
    graph, op = Case(model="gcn").build()[0], Max()
    cut = Chunking(graph, count=100 * graph.num_vertices).cut(op, working_set_of(op))
    assert len(cut.bounds) == graph.num_vertices + 1


def test_neighbouring_rounds_share_rows() -> None:
    """Rows that the next chunk reads too stay in their slots; in the backward pass, rows of the previous one."""
    graph, op = Case(model="gcn").build()[0], Sum(norm="gcn")
    chunking = Chunking(graph, limit=1 << 20, count=4)
    rounds = list(chunking.cut(op, working_set_of(op)).schedule.make_rounds())
    resident = [set(round_.slot_sources[round_.slot_sources >= 0].tolist()) for round_ in rounds]
    for before, round_, now, following in zip(
        [set(), *resident], rounds, resident, [*resident[1:], set()], strict=False
    ):
        assert set(round_.load.tolist()) == now - before
        assert set(round_.write_back.tolist()) == now - following
    assert sum(len(round_.load) for round_ in rounds) < sum(map(len, resident))


def test_rows_are_divided_evenly_and_sent_once() -> None:
    graph, op = Case(model="gcn").build()[0], Sum(norm="gcn")
    chunking = Chunking(graph, count=4)
    bounds = chunking.sizes(op, working_set_of(op)).bounds
    for rank in range(3):
        exchange_plan = chunking.exchange_plan(op, bounds, rank, 3)
        for sets in (exchange_plan.receives, exchange_plan.sends):
            rows = [row_set for row_set in sets if row_set is not None]
            assert torch.equal(
                torch.cat([row_set.ids for row_set in rows]).sort().values, torch.arange(graph.num_vertices)
            )
            assert torch.cat([row_set.positions for row_set in rows]).sort().values.tolist() == list(
                range(len(range(rank, 23, 3)))
            )
        assert all(
            max(row_set.counts) - min(row_set.counts) <= 1 for row_set in exchange_plan.sends if row_set is not None
        )


@pytest.mark.parametrize("case", [Case(model="gat", heads=3), typed_cases()[3]], ids=["gat", "rgcn"])
def test_a_limit_that_nothing_fits_in_is_refused_with_the_least(case: Case) -> None:
    bytes_needed = least_limit(case, 1)
    placed = Session(case, "tensor", Group(), Given(device_memory=bytes_needed))
    placed.step(0)
    assert 0 < placed.meter.take("train").working_bytes <= bytes_needed
    few = Given(device_memory=bytes_needed - 1).plan("tensor", placed.plan.work)
    for refused in (few.check_fits, few.memory, partial(few.trace, training=True)):
        with pytest.raises(InputError, match=f"give at least {bytes_needed:,}"):
            refused()
