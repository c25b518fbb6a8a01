"""Ranks are pinned to equal numbers of cores, unless their affinity was already set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.runtime.processes import cores as module
from weft.runtime.processes.cores import cores, num_cores, pin_to_rank_cores, rank_cores

PIN_SCRIPT = """
import os, threading
from weft.runtime.processes.cores import cores, pin_to_rank_cores, rank_cores

stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
pin_to_rank_cores({part}, {parts})
affinities = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
assert len(affinities) == 2 and affinities[0] == affinities[1], affinities
print(affinities[0] == sorted(rank_cores({part}, {parts})), len(cores()))
"""


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Simulate two sockets of two cores of two threads, which the system numbers round-robin."""
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


@pytest.mark.usefixtures("eight_cores")
def test_threads_of_a_core_belong_to_one_rank() -> None:
    assert cores() == (0, 4, 2, 6, 1, 5, 3, 7)
    assert [rank_cores(rank, 4) for rank in range(4)] == [(0, 4), (2, 6), (1, 5), (3, 7)]


@pytest.mark.usefixtures("eight_cores")
def test_all_cores_are_assigned_once() -> None:
    for ranks in range(1, 9):
        assert sum((rank_cores(rank, ranks) for rank in range(ranks)), ()) == cores()
        assert {len(rank_cores(rank, ranks)) for rank in range(ranks)} <= {8 // ranks, 8 // ranks + 1}


@pytest.mark.parametrize("eight_cores", [[3, 9]], indirect=True)  # The topology lacks core 9.
@pytest.mark.usefixtures("eight_cores")
def test_more_ranks_than_cores_share_them_evenly() -> None:
    assert num_cores() == 2
    first, *_, last = (rank_cores(rank, 4) for rank in range(4))
    assert [rank_cores(rank, 4) for rank in range(4)] == [first, first, last, last]
    assert {*first, *last} == {3, 9}


@pytest.mark.parametrize(("part", "parts"), [(0, 2), (1, 2), (0, 1), (2, 3)])
def test_all_threads_of_a_rank_are_pinned(part: int, parts: int) -> None:
    process = run(PIN_SCRIPT.format(part=part, parts=parts))
    assert process.stdout.split() == ["True", str(len(os.sched_getaffinity(0)))], process.stderr


def test_an_existing_affinity_is_preserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is pinned only if its affinity equals that of its parent process."""
    affinity, pinned = {0: {0, 1}, os.getppid(): {0, 1, 2, 3}}, list[int]()
    monkeypatch.setattr(os, "sched_getaffinity", affinity.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, _: pinned.append(thread))
    pin_to_rank_cores(0, 2)
    assert not pinned
    affinity[os.getppid()] = {0, 1}
    pin_to_rank_cores(0, 2)
    assert os.getpid() in pinned


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
