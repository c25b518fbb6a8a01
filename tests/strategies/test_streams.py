"""Copies of rows on a fake device: results of `single` without a race, and a race for each wait that is left out."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.lib.cases import Case
from tests.lib.pairwise import param
from tests.lib.planted import replaced
from tests.lib.ranks import on_ranks
from tests.lib.session import Given, Planned, Session, check_case, part_by, reference
from tests.lib.streams import DEVICE_NAME, FakeStreams, RaceError
from weft.comm import Group
from weft.parallel.chunks.run import chunk_runtime
from weft.runtime.streams import COMPUTE, LOAD, STORE, pinned_bytes
from weft.storage.host_rows import host_rows

PINNED = Given(chunks=8, device=str(DEVICE_NAME))
"""Options of rows in pinned memory, with chunks that reuse slots."""
CASES = [
    Case(model="gcn"),
    Case(model="gat", norm="batch"),
    Case(model="sage", decoupled=True),
    Case(model="gcn", without="prefetch"),
    Case(model="sage", without="reuse"),  # with pinned rows, its first aggregate reads the graph's features
]
WAITS = {
    "on load in bring": "pinned",  # before compute has written slots
    "finish in bring": "pinned",  # before a slot is used again
    "join in load_ahead": "pinned",  # before compute reads loaded rows
    "lend in to_device": "pinned",
    "lend in read": "pinned",
    "on store in write": "pinned",  # before results are stored
    "lend in write": "pinned",
    "finish in host_reads": "pinned",  # before the host reads stored rows
    "finish in host_writes": "pinned",
    "join in stream_reads": "pinned",  # before stored rows are loaded
    "finish in to_host": "pinned",
    "finish in _buffer": "files",  # before staging memory is filled again
}
"""Each wait and loan of the two strategies, with the location of rows at which no other wait covers it."""
REDUNDANT = {"join in stream_writes"}
"""Waits that only tests/runtime/test_streams.py shows to be necessary."""


def options_for(rows: str, folder: Path) -> Given:
    return Given(**PINNED, scratch=folder) if rows == "files" else PINNED


def fake_group(streams: FakeStreams, group: Group | None = None) -> Group:
    """Return a rank on the fake device, which communicates with others through gloo."""
    group = group or Group()
    group.device, group.streams, group.staged = DEVICE_NAME, streams, True
    return group


def races() -> list[Any]:
    """Return every case, location of rows and speed of copies; a quarter is quick."""
    return [
        param(case, rows, late, name=f"{case.id}-{rows}-{late}", quick=(number + 2 * (rows == "files") + late) % 4 == 0)
        for number, case in enumerate(CASES)
        for rows, late in product(("pinned", "files"), (False, True))
    ]


@pytest.mark.parametrize(("case", "rows", "late"), races())
def test_offload_has_no_race(case: Case, rows: str, late: bool, tmp_path: Path) -> None:
    options = options_for(rows, tmp_path)
    planned, _ = Planned.of(case, "offload", options, 1), reference(case)
    with FakeStreams(late=late) as streams:
        check_case(fake_group(streams), case, "offload", options, planned)
    used = {COMPUTE, STORE} if case.without == "prefetch" else {COMPUTE, LOAD, STORE}
    assert used == set(streams.streams) & {COMPUTE, LOAD, STORE}, "copies run in separate streams"
    if not case.without:
        assert set(streams.places) <= {*WAITS, *REDUNDANT}, "a wait that no planted error leaves out"


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wait", [param(wait, name=wait, quick=n % 2 == 0) for n, wait in enumerate(WAITS)])
def test_a_wait_that_is_left_out_of_offload_is_detected(wait: str, late: bool, tmp_path: Path) -> None:
    case, options = Case(model="gcn"), options_for(WAITS[wait], tmp_path)
    planned = Planned.of(case, "offload", options, 1)
    with pytest.raises(RaceError):
        run_steps(Group(), case, "offload", options, planned, wait, late)


def run_steps(
    group: Group, case: Case, strategy: str, options: Given, planned: Planned, wait: str = "", late: bool = False
) -> None:
    """Run a step and an evaluation without a wait."""
    with FakeStreams(wait, late=late) as streams:
        session = Session(case, strategy, fake_group(streams, group), options, planned)
        session.step(0)
        session.evaluation()


def test_estimates_of_pinned_rows_equal_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    case, options = Case(model="gcn"), PINNED
    planned, row_bytes = Planned.of(case, "offload", options, 1), list[int]()

    def recorded(*sizes: Any, **options: Any) -> Any:
        rows = host_rows(*sizes, **options)
        row_bytes.append(rows.num_bytes)
        return rows

    with monkeypatch.context() as patch, FakeStreams() as streams:
        patch.setattr(chunk_runtime, "host_rows", recorded)
        session = Session(case, "offload", fake_group(streams), options, planned)
        for _ in range(2):
            session.step(0)
            session.evaluation()
    assert (
        session.plan.peak_memory().disk
        == sum(map(pinned_bytes, row_bytes)) + session.strategy.chunks.array_file.num_bytes
    )
    assert sum(row_bytes) < sum(map(pinned_bytes, row_bytes)) < 2 * sum(row_bytes)


def check_rank(group: Group, case: Case, strategy: str, options: Given, planned: Planned, late: bool) -> None:
    with FakeStreams(late=late) as streams:
        check_case(fake_group(streams, group), case, strategy, options, planned)
    assert {COMPUTE, LOAD, STORE} <= set(streams.streams)


@pytest.mark.parametrize(
    ("strategy", "late"),
    [
        param(strategy, late, name=f"{strategy}-{late}", quick=late == (strategy == "pipeline"))
        for strategy, late in product(("offload", "pipeline"), (False, True))
    ],
)
def test_ranks_have_no_race(strategy: str, late: bool) -> None:
    """Copies have no race on several ranks either, and gloo gets no tensor of the device."""
    case, options = Case(model="gcn"), Given(**PINNED, partition=part_by("random", Case(model="gcn"), 2))
    planned, _ = Planned.of(case, strategy, options, 2), reference(case)
    on_ranks(2, check_rank, case, strategy, options, planned, late)


def check_planted(group: Group, options: Given, planned: Planned, wait: str) -> None:
    with pytest.raises(RaceError):
        run_steps(group, Case(model="gcn"), "pipeline", options, planned, wait)


def check_chunks_of_tensor(group: Group, case: Case, options: Given, planned: Planned) -> None:
    streams = FakeStreams()
    with replaced(chunk_runtime, "streams_of", lambda _: streams), streams:
        check_case(group, case, "tensor", options, planned)
    assert streams.streams[COMPUTE]


CHUNKED = [
    Case(model="gcn", layers=4),
    Case(model="gcn", layers=4, residual=True),
    Case(model="sage", layers=4, hidden=6),
    Case(model="gat", layers=4),
]


@pytest.mark.parametrize(
    ("case", "size"),
    [
        param(case, size, name=f"{case.id}-P{size}", quick=number % 2 == size - 1 and case.model != "gat")
        for (number, case), size in product(enumerate(CHUNKED), (1, 2))
    ],
)
def test_chunks_of_tensor_have_no_race(case: Case, size: int) -> None:
    """Rows are on the host, aggregates on a device, and layers of the same width reuse memory."""
    options = Given(device_memory=8000, device=str(DEVICE_NAME))
    planned, _ = Planned.of(case, "tensor", options, size), reference(case)
    on_ranks(size, check_chunks_of_tensor, case, options, planned)


COVERED = ("finish in host_reads", "join in stream_reads", "finish in _buffer")
"""Waits before reading. In `pipeline`, the wait before received rows are written covers them."""


@pytest.mark.parametrize(
    "wait",
    [param(wait, name=wait, quick=number % 3 == 0) for number, wait in enumerate(WAITS) if wait not in COVERED],
)
def test_a_wait_that_is_left_out_of_pipeline_is_detected(wait: str) -> None:
    on_ranks(2, check_planted, *pipeline(), wait)


@cache
def pipeline() -> tuple[Given, Planned]:
    """Return options and plan of a pipeline of two ranks, shared by all planted errors."""
    case = Case(model="gcn")
    options = Given(**PINNED, partition=part_by("random", case, 2))
    return options, Planned.of(case, "pipeline", options, 2)
