"""What a process may take: the machine's memory, or a limit below it; and who is told beforehand."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from weft.core import memory
from weft.core.errors import InputError
from weft.core.memory import memory_limit_bytes, require_memory


@pytest.fixture
def machine_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """Memory of the machine, without limits of the process or a container."""
    monkeypatch.setattr(memory, "CGROUP_LIMIT", tmp_path / "memory.max")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return memory_limit_bytes()


def test_a_container_has_less(machine_bytes: int) -> None:
    for stated, expected in ((f"{machine_bytes // 2}\n", machine_bytes // 2), ("max\n", machine_bytes)):
        memory.CGROUP_LIMIT.write_text(stated)
        assert memory_limit_bytes() == expected
    memory.CGROUP_LIMIT.write_text(str(2 * machine_bytes))
    assert memory_limit_bytes() == machine_bytes


def test_a_process_may_take_less(machine_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (machine_bytes // 3, resource.RLIM_INFINITY))
    assert memory_limit_bytes() == machine_bytes // 3


def test_what_does_not_fit_is_refused(machine_bytes: int) -> None:
    require_memory(machine_bytes, "x", "give less")
    with pytest.raises(InputError, match=r"^x would take .* of memory, and there are .*: give less$"):
        require_memory(machine_bytes + 1, "x", "give less")
