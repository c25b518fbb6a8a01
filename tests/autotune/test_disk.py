"""Estimated disk time of temporary files: none for files that fit in free memory, as measured for the rest."""

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


def cluster(*, free_share: float, size: int = 1, measured: bool = True) -> Cluster:
    """Return a host whose free memory, next to everything else, fits the given share of the plan's files."""
    machine = profile()
    machine = replace(machine, host={**machine.host, "disk": PRICES._asdict()}) if measured else machine
    without_memory = Cluster(profile=machine, ranks=size, hosts=1, threads=1, memory_bytes=0)
    memory = plan_memory(plan(size), without_memory)
    return replace(without_memory, memory_bytes=memory.host + round(free_share * memory.disk))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_files_beyond_free_memory_cost_disk_time(size: int) -> None:
    trace = plan(size).trace(training=True)
    whole = size * (PRICES.read * trace.to_device.total() + PRICES.write * trace.to_host.total())
    assert whole > 0
    without_disk = epoch_time(plan(size), cluster(free_share=1.0, size=size))
    assert without_disk.disk == 0
    for free_share, disk_share in ((0.0, 1.0), (0.5, 0.5), (-1.0, 1.0)):
        estimate = epoch_time(plan(size), cluster(free_share=free_share, size=size))
        assert estimate.disk >= disk_share * whole * 0.99
        assert size > 1 or estimate.disk == pytest.approx(disk_share * whole, rel=1e-3)
        assert estimate.compute == pytest.approx(without_disk.compute, rel=1e-3)
        assert estimate.total > estimate.disk


def test_an_unmeasured_disk_is_an_error() -> None:
    assert epoch_time(plan(), cluster(free_share=1.0, measured=False)).disk == 0
    with pytest.raises(InputError, match="the probe has not measured the disk: measure the machine again with"):
        epoch_time(plan(), cluster(free_share=0.5, measured=False))


def test_measure_the_disk_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "NUM_BYTES", 1 << 20)
    monkeypatch.setattr(disk, "PIECE_BYTES", 1 << 18)
    assert all(0 < seconds < 1e-3 for seconds in measure_disk())
