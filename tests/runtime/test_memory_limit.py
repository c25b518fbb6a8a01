"""The memory limit of a process is that of the machine, container or process; arrays that exceed it are refused."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from weft.runtime.memory import limit as module
from weft.runtime.memory.limit import check_fits_memory, memory_limit_bytes
from weft.utils.errors import InputError

PROCESS_CGROUPS = {"v2": "0::/user/job", "v1": "5:cpu,cpuacct:/user/job\n4:memory:/user/job\n0::/"}
LIMITS = {"v2": Path("memory.max"), "v1": Path("memory/memory.limit_in_bytes")}


@pytest.fixture
def machine_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """Remove limits of the process and its container, and return the memory of the machine."""
    monkeypatch.setattr(module, "CGROUPS", tmp_path)
    monkeypatch.setattr(module, "PROCESS_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return memory_limit_bytes()


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("group", ["", "user", "user/job"])
def test_the_limit_of_a_container(machine_bytes: int, tmp_path: Path, version: str, group: str) -> None:
    """The limit is found in the cgroup of the process, in a parent, and in the root, where a container sees its own."""
    limit = tmp_path / LIMITS[version].parent / group / LIMITS[version].name
    limit.parent.mkdir(parents=True, exist_ok=True)
    limit.write_text(f"{machine_bytes // 2}\n")
    assert memory_limit_bytes() == machine_bytes
    module.PROCESS_CGROUPS.write_text(PROCESS_CGROUPS[version])
    assert memory_limit_bytes() == machine_bytes // 2
    for stated in ("max", str(2 * machine_bytes)):
        limit.write_text(f"{stated}\n")
        assert memory_limit_bytes() == machine_bytes


def test_the_limit_of_a_process(machine_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (machine_bytes // 3, resource.RLIM_INFINITY))
    assert memory_limit_bytes() == machine_bytes // 3


def test_arrays_that_do_not_fit_are_refused(machine_bytes: int) -> None:
    check_fits_memory(machine_bytes, "x", "give less")
    with pytest.raises(InputError, match=r"^x would need .* of memory, but only .* are available: give less$"):
        check_fits_memory(machine_bytes + 1, "x", "give less")
