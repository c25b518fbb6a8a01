"""Temporary files: read and written for nothing while memory holds them, and as measured for the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lib.cases import Case
from tests.lib.profiles import profile
from weft.autotune import Cluster, disk, epoch_time, plan_memory
from weft.autotune.disk import measure_disk
from weft.cost import Disk
from weft.nn import Workload
from weft.strategies.offload.options import OffloadOptions
from weft.strategies.offload.plan import OffloadPlan
from weft.utils.errors import InputError

PRICES = Disk(read=1.0, write=3.0)


def plan(size: int = 1) -> OffloadPlan:
    graph, model = Case(model="gcn").build()
    return OffloadPlan(Workload(model, graph), size, OffloadOptions(chunks=4, device_memory=1 << 20))


def cluster(*, beside: float, size: int = 1, measured: bool = True) -> Cluster:
    """A host whose memory has room for so much of the plan's files beside all else."""
    known = profile()
    known = replace(known, host={**known.host, "disk": PRICES._asdict()}) if measured else known
    found = Cluster(profile=known, ranks=size, hosts=1, threads=1, memory_bytes=0)
    held = plan_memory(plan(size), found)
    return replace(found, memory_bytes=held.host + round(beside * held.disk))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_memory_has_no_room_for_is_waited_for(size: int) -> None:
    trace = plan(size).trace(training=True)
    whole = size * (PRICES.read * trace.to_device.total() + PRICES.write * trace.to_host.total())
    assert whole > 0
    free = epoch_time(plan(size), cluster(beside=1.0, size=size))
    assert free.disk == 0
    for beside, share in ((0.0, 1.0), (0.5, 0.5), (-1.0, 1.0)):
        found = epoch_time(plan(size), cluster(beside=beside, size=size))
        assert found.disk >= share * whole * 0.99
        assert size > 1 or found.disk == pytest.approx(share * whole, rel=1e-3)
        assert found.compute == pytest.approx(free.compute, rel=1e-3)
        assert found.total > found.disk


def test_a_disk_that_was_not_measured() -> None:
    assert epoch_time(plan(), cluster(beside=1.0, measured=False)).disk == 0
    with pytest.raises(InputError, match="the probe has not measured the disk: measure the machine again with"):
        epoch_time(plan(), cluster(beside=0.5, measured=False))


def test_this_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "NUM_BYTES", 1 << 20)
    monkeypatch.setattr(disk, "PIECE_BYTES", 1 << 18)
    assert all(0 < seconds < 1e-3 for seconds in measure_disk())
