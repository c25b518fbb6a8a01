"""What `weft plan` says of memory, beside what is seen of a run from outside."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weft.autotune import Cluster, plan_memory
from weft.config.config import Config
from weft.cost import Profile
from weft.runtime.process_memory import watch
from weft.strategies import resident
from weft.strategies.single import SinglePlan
from weft.training.planning.probe_command import watch_tiny
from weft.training.run import prepared_workload

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")

GRAPH, HIDDEN = "rmat:vertices=2k,edges=8k,features=8000,classes=4", 1024
NEAR = 0.1
SHARE = 0.06
"""Of what is seen, that what is left out takes at least."""


@pytest.mark.slow
def test_memory_is_as_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Adam's moments, or without the features, it would not be."""
    config = Config(graph=GRAPH, hidden=HIDDEN)
    run = [sys.executable, "-m", "weft", "train", GRAPH, "--hidden", str(HIDDEN), "--epochs", "2", "--quiet"]
    processes = {"alone": watch_tiny(1), "launcher": 0, "rank": 0}
    profile = Profile(host={"cores": 1, "processes": processes}, prices=[])
    cluster = Cluster(profile=profile, ranks=1, hosts=1, threads=1, memory_bytes=0)
    plan = SinglePlan(prepared_workload(config, None, None))

    peaks = list[int]()  # a peak between two looks is not seen, where the machine is busy

    def ratio() -> float:
        return plan_memory(plan, cluster).host / max(peaks)

    while not peaks or (len(peaks) < 3 and ratio() > 1 + NEAR):
        seen = watch([*run, "--out", str(tmp_path / f"run-{len(peaks)}")], tmp_path)
        assert seen.exit_code == 0, seen.last_line
        peaks.append(seen.memory)
    told = ratio()
    assert told == pytest.approx(1, abs=NEAR)
    with monkeypatch.context() as patch:
        patch.setattr(resident, "PARAMETER_COPIES", 3)
        assert ratio() < told - SHARE
    features = plan.work.graph.x
    assert features is not None
    with monkeypatch.context() as patch:
        patch.setattr(type(plan.work.stats), "num_bytes", plan.work.stats.num_bytes - features.nbytes)
        assert ratio() < told - SHARE
