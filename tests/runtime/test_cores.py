"""A rank keeps to its share of the cores, which is even, unless somebody has given it some already."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.runtime import cores as module
from weft.runtime.cores import cores, num_cores, pin_to_rank_cores, rank_cores

KEEPING = """
import os, threading
from weft.runtime.cores import cores, pin_to_rank_cores, rank_cores

stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
pin_to_rank_cores({part}, {parts})
seen = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
assert len(seen) == 2 and seen[0] == seen[1], seen
print(seen[0] == sorted(rank_cores({part}, {parts})), len(cores()))
"""


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """A machine of two sockets of two cores of two threads, whose numbers the system gives out in turn."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 2}\n")
        (folder / "core_id").write_text(f"{core // 2 % 2}\n")
    monkeypatch.setattr(module, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(getattr(request, "param", range(8))))
    cores.cache_clear()
    yield
    cores.cache_clear()


@pytest.mark.usefixtures("eight")
def test_neighbours_share_the_most() -> None:
    assert cores() == (0, 4, 2, 6, 1, 5, 3, 7)
    assert [rank_cores(rank, 4) for rank in range(4)] == [(0, 4), (2, 6), (1, 5), (3, 7)]


@pytest.mark.usefixtures("eight")
def test_all_cores_are_given_out_once() -> None:
    for ranks in range(1, 9):
        assert sum((rank_cores(rank, ranks) for rank in range(ranks)), ()) == cores()
        assert {len(rank_cores(rank, ranks)) for rank in range(ranks)} <= {8 // ranks, 8 // ranks + 1}


@pytest.mark.parametrize("eight", [[3, 9]], indirect=True)  # of which the second is not in the topology
@pytest.mark.usefixtures("eight")
def test_more_ranks_than_cores_share_them_evenly() -> None:
    assert num_cores() == 2
    first, *_, last = (rank_cores(rank, 4) for rank in range(4))
    assert [rank_cores(rank, 4) for rank in range(4)] == [first, first, last, last]
    assert {*first, *last} == {3, 9}


@pytest.mark.parametrize(("part", "parts"), [(0, 2), (1, 2), (0, 1), (2, 3)])
def test_all_threads_keep_to_the_share(part: int, parts: int) -> None:
    done = run(KEEPING.format(part=part, parts=parts))
    assert done.stdout.split() == ["True", str(len(os.sched_getaffinity(0)))], done.stderr


def test_cores_that_somebody_has_given_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process are not those of the one that started it; where they are, its threads are told."""
    given, told = {0: {0, 1}, os.getppid(): {0, 1, 2, 3}}, list[int]()
    monkeypatch.setattr(os, "sched_getaffinity", given.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, _: told.append(thread))
    pin_to_rank_cores(0, 2)
    assert not told
    given[os.getppid()] = {0, 1}
    pin_to_rank_cores(0, 2)
    assert os.getpid() in told


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
