"""What copies rows on a faked device: the numbers of single, no race, and one for every wait that is taken out."""

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
"""Slots of some chunks are used again."""
CASES = [
    Case(model="gcn"),
    Case(model="gat", norm="batch"),
    Case(model="sage", decoupled=True),
    Case(model="gcn", without="prefetch"),
    Case(model="sage", without="reuse"),  # pinned, its first aggregate reads the graph's features
]
WAITS = {
    "on load in bring": "pinned",  # before what compute makes of slots is there
    "finish in bring": "pinned",  # before a slot is used again
    "join in load_ahead": "pinned",  # before compute reads what is loaded
    "lend in to_device": "pinned",
    "lend in read": "pinned",
    "on store in write": "pinned",  # before what is made is stored
    "lend in write": "pinned",
    "finish in host_reads": "pinned",  # before the host reads what was stored
    "finish in host_writes": "pinned",
    "join in stream_reads": "pinned",  # before what was stored is loaded
    "finish in to_host": "pinned",
    "finish in _buffer": "files",  # before staging memory is filled again
}
"""Each wait and loan of the two strategies, and where rows are to be so that it is the only one in its place."""
REDUNDANT = {"join in stream_writes"}
"""Held by the test of its own."""


def given_for(rows: str, folder: Path) -> Given:
    return Given(**PINNED, scratch=folder) if rows == "files" else PINNED


def fake_group(streams: FakeStreams, group: Group | None = None) -> Group:
    """A rank on the faked device, which talks to others by gloo."""
    group = group or Group()
    group.device, group.streams, group.staged = DEVICE_NAME, streams, True
    return group


def races() -> list[Any]:
    """Return every case, place of rows and speed of copies; a quarter is quick."""
    return [
        param(case, rows, late, name=f"{case.id}-{rows}-{late}", quick=(number + 2 * (rows == "files") + late) % 4 == 0)
        for number, case in enumerate(CASES)
        for rows, late in product(("pinned", "files"), (False, True))
    ]


@pytest.mark.parametrize(("case", "rows", "late"), races())
def test_offload_has_no_race(case: Case, rows: str, late: bool, tmp_path: Path) -> None:
    given = given_for(rows, tmp_path)
    planned, _ = Planned.of(case, "offload", given, 1), reference(case)
    with FakeStreams(late=late) as streams:
        check_case(fake_group(streams), case, "offload", given, planned)
    used = {COMPUTE, STORE} if case.without == "prefetch" else {COMPUTE, LOAD, STORE}
    assert used == set(streams.streams) & {COMPUTE, LOAD, STORE}, "copies are in streams of their own"
    if not case.without:
        assert set(streams.places) <= {*WAITS, *REDUNDANT}, "a wait that no planted error takes out"


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", WAITS)
def test_a_wait_that_is_taken_out_of_offload_is_found(place: str, late: bool, tmp_path: Path) -> None:
    case, given = Case(model="gcn"), given_for(WAITS[place], tmp_path)
    planned = Planned.of(case, "offload", given, 1)
    with pytest.raises(RaceError):
        run_steps(Group(), case, "offload", given, planned, place, late)


def run_steps(
    group: Group, case: Case, strategy: str, given: Given, planned: Planned, place: str = "", late: bool = False
) -> None:
    """A step and an evaluation, without a wait."""
    with FakeStreams(place, late=late) as streams:
        session = Session(case, strategy, fake_group(streams, group), given, planned)
        session.step(0)
        session.evaluation()


def test_estimates_of_pinned_rows_equal_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    case, given = Case(model="gcn"), PINNED
    planned, made = Planned.of(case, "offload", given, 1), list[int]()

    def noted(*sizes: Any, **options: Any) -> Any:
        rows = host_rows(*sizes, **options)
        made.append(rows.num_bytes)
        return rows

    with monkeypatch.context() as patch, FakeStreams() as streams:
        patch.setattr(chunk_runtime, "host_rows", noted)
        session = Session(case, "offload", fake_group(streams), given, planned)
        for _ in range(2):
            session.step(0)
            session.evaluation()
    assert session.plan.peak_memory().disk == sum(map(pinned_bytes, made)) + session.strategy.chunks.array_file.num_bytes
    assert sum(made) < sum(map(pinned_bytes, made)) < 2 * sum(made)


def check_rank(group: Group, case: Case, strategy: str, given: Given, planned: Planned, late: bool) -> None:
    with FakeStreams(late=late) as streams:
        check_case(fake_group(streams, group), case, strategy, given, planned)
    assert {COMPUTE, LOAD, STORE} <= set(streams.streams)


@pytest.mark.parametrize(
    ("strategy", "late"),
    [
        param(strategy, late, name=f"{strategy}-{late}", quick=late == (strategy == "pipeline"))
        for strategy, late in product(("offload", "pipeline"), (False, True))
    ],
)
def test_ranks_have_no_race(strategy: str, late: bool) -> None:
    """Nor does anything of the device reach gloo."""
    case, given = Case(model="gcn"), Given(**PINNED, partition=part_by("random", Case(model="gcn"), 2))
    planned, _ = Planned.of(case, strategy, given, 2), reference(case)
    on_ranks(2, check_rank, case, strategy, given, planned, late)


def check_planted(group: Group, given: Given, planned: Planned, place: str) -> None:
    with pytest.raises(RaceError):
        run_steps(group, Case(model="gcn"), "pipeline", given, planned, place)


def check_chunks_of_tensor(group: Group, case: Case, given: Given, planned: Planned) -> None:
    streams = FakeStreams()
    with replaced(chunk_runtime, "streams_of", lambda _: streams), streams:
        check_case(group, case, "tensor", given, planned)
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
    """Where rows are the host's, and aggregates a device's; layers of one width use memory again."""
    given = Given(device_memory=8000, device=str(DEVICE_NAME))
    planned, _ = Planned.of(case, "tensor", given, size), reference(case)
    on_ranks(size, check_chunks_of_tensor, case, given, planned)


COVERED = ("finish in host_reads", "join in stream_reads", "finish in _buffer")
"""Waits before reading, behind which of a pipeline's rows is always one before writing the others that have come."""


@pytest.mark.parametrize("place", [place for place in WAITS if place not in COVERED])
def test_a_wait_that_is_taken_out_of_pipeline_is_found(place: str) -> None:
    on_ranks(2, check_planted, *pipeline(), place)


@cache
def pipeline() -> tuple[Given, Planned]:
    """Return options and plan of a pipeline of two ranks, which all planted errors have."""
    case = Case(model="gcn")
    given = Given(**PINNED, partition=part_by("random", case, 2))
    return given, Planned.of(case, "pipeline", given, 2)
