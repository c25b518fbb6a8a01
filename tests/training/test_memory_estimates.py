"""Memory that `weft plan` estimates, compared with the peak memory of a run's process."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from weft.autotune import Cluster, plan_memory
from weft.config.config import Config
from weft.cost import Profile
from weft.runtime.processes.usage import watch
from weft.strategies import resident
from weft.strategies.single import SinglePlan
from weft.training import rank
from weft.training.planning.probe_command import watch_tiny
from weft.training.run import prepared_workload
from weft.utils.errors import InputError
from weft.utils.units import parse_bytes

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")

GRAPH, HIDDEN = "rmat:vertices=2k,edges=8k,features=8000,classes=4", 1024
TOLERANCE = 0.1
MIN_SHARE = 0.06
"""Smallest share of the measured memory that features or moments of Adam take."""


@pytest.mark.parametrize("strategy", ["single", "offload"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_beyond_memory_is_refused(strategy: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names a strategy that needs less, and disappears with as much memory as it asks for."""
    if strategy == "single" and workers > 1:
        strategy = "communicated"
    config = Config(graph="digits", strategy=strategy, workers=workers)
    work, needed = prepared_workload(config, None, None), 1_000_000
    monkeypatch.setattr(rank, "memory_limit_bytes", lambda: needed)
    with pytest.raises(InputError, match=f"^digits: strategy {strategy} needs .* available: give .*--dtype") as error:
        rank.make_plan(config, work)
    assert ("--strategy offload" in str(error.value)) == (strategy != "offload")
    needed = math.ceil(1.05 * parse_bytes(str(error.value).split(" needs ")[1].split(" of memory")[0], "memory"))
    rank.make_plan(config, work)


@pytest.mark.parametrize("strategy", ["communicated", "tensor"])
def test_a_prediction_needs_no_memory_for_training_steps(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(graph="digits", strategy=strategy, workers=2, layers=6, hidden=64)
    work = prepared_workload(config, None, None)
    needed = sum(rank.make_plan(config, work).peak_memory(number).device for number in range(2))
    monkeypatch.setattr(rank, "memory_limit_bytes", lambda: needed * 9 // 10)
    with pytest.raises(InputError, match="of memory"):
        rank.make_plan(config, work)
    rank.make_plan(config, work, predicts=True)


def test_small_runs_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide model of the same graph is checked, since its rows take more than the graph."""
    config, wide = Config(graph="digits"), Config(graph="digits", hidden=1 << 10)
    work = prepared_workload(config, None, None)
    monkeypatch.setattr(rank, "memory_limit_bytes", lambda: 11 * work.rough_bytes)
    monkeypatch.setattr(SinglePlan, "peak_memory", None)
    rank.make_plan(config, work)
    with pytest.raises(TypeError):  # calls None
        rank.make_plan(wide, prepared_workload(wide, None, None))


def test_a_run_near_the_limit_maps_its_arrays(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without weft's heap, freed arrays would take memory that the run needs."""
    config, calls = Config(graph="digits"), []
    work = prepared_workload(config, None, None)
    monkeypatch.setattr(rank, "map_large_arrays", lambda: calls.append(1) or True)
    for limit, expected in ((1 << 30, 0), (15_000_000, 1)):
        monkeypatch.setattr(rank, "memory_limit_bytes", lambda limit=limit: limit)
        monkeypatch.setattr(rank, "FRAGMENTED_SHARE", 0.1)
        rank.make_plan(config, work)
        assert len(calls) == expected
    assert "needs most of the memory" in capfd.readouterr().err


@pytest.mark.slow
def test_the_memory_estimate_is_accurate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is accurate, and would be too small without the moments of Adam or without the features."""
    config = Config(graph=GRAPH, hidden=HIDDEN)
    run = [sys.executable, "-m", "weft", "train", GRAPH, "--hidden", str(HIDDEN), "--epochs", "2", "--quiet"]
    processes = {"alone": watch_tiny(1), "launcher": 0, "rank": 0}
    profile = Profile(host={"cores": 1, "processes": processes}, prices=[])
    cluster = Cluster(profile=profile, ranks=1, hosts=1, threads=1, memory_bytes=0)
    plan = SinglePlan(prepared_workload(config, None, None))

    peaks = list[int]()  # on a busy machine, a peak between two samples is missed

    def ratio() -> float:
        return plan_memory(plan, cluster).host / max(peaks)

    while not peaks or (len(peaks) < 3 and ratio() > 1 + TOLERANCE):
        process = watch([*run, "--out", str(tmp_path / f"run-{len(peaks)}")], tmp_path)
        assert process.exit_code == 0, process.last_line
        peaks.append(process.memory)
    estimated = ratio()
    assert estimated == pytest.approx(1, abs=TOLERANCE)
    with monkeypatch.context() as patch:
        patch.setattr(resident, "PARAMETER_COPIES", 3)
        assert ratio() < estimated - MIN_SHARE
    features = plan.work.graph.x
    assert features is not None
    with monkeypatch.context() as patch:
        patch.setattr(type(plan.work.stats), "num_bytes", plan.work.stats.num_bytes - features.nbytes)
        assert ratio() < estimated - MIN_SHARE
