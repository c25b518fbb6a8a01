"""The heap of large arrays, in processes that preload it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.runtime.memory import heap as module
from weft.runtime.memory.heap import PRELOAD, heap_environment
from weft.runtime.processes.usage import descendants

BEGIN = """
import ctypes, os, random, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch

MB = 1 << 20
libc = ctypes.CDLL(None)
libc.malloc_usable_size.argtypes = libc.free.argtypes = [ctypes.c_void_p]
libc.realloc.argtypes, libc.realloc.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p

def allocated(num_bytes, alignment=64):
    address = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(alignment), ctypes.c_size_t(num_bytes)) == 0
    return address.value

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.delenv(PRELOAD, raising=False)
    environment = heap_environment()
    if not environment:
        pytest.skip("needs glibc")
    return environment


def run(heap: dict[str, str], script: str) -> None:
    """Run a script in a process with the heap."""
    command = [sys.executable, "-c", BEGIN + script]
    process = subprocess.run(command, env=os.environ | heap, capture_output=True, text=True, check=False, timeout=60)
    assert process.returncode == 0, process.stderr


@pytest.mark.slow
def test_arrays_reuse_freed_memory(heap: dict[str, str]) -> None:
    """Large arrays reuse freed memory despite small ones; free neighbours are merged, and remainders stay free."""
    run(
        heap,
        """
first, second, third, end = (allocated(8 * MB) for _ in range(4))
libc.free(first)
small = [allocated(100) for _ in range(1000)]
assert allocated(8 * MB) == first
libc.free(second); libc.free(third)
assert allocated(16 * MB) == second
libc.free(second)
assert allocated(5 * MB) == second and allocated(11 * MB) == second + 5 * MB
for address in (second + 5 * MB, first, second): libc.free(address)
assert allocated(24 * MB) == first and not first % 4096
assert allocated(8 * MB, 1 << 21) % (1 << 21) == 0  # The C library allocates it.
""",
    )


@pytest.mark.slow
def test_the_model_of_the_heap_predicts_addresses(heap: dict[str, str]) -> None:
    """Arrays of whole pages have the addresses that the Python model of the heap computes."""
    run(
        heap,
        """
from weft.runtime.memory.tensor_peak import Heap
dice, model, live = random.Random(0), Heap(), []
base = allocated(MB); libc.free(base)
for turn in range(3000):
    pages = dice.randrange(64, 128)
    live.append((allocated(pages * 4096), model.take(pages * 4096), pages * 4096))
    assert live[-1][0] - base == live[-1][1], turn
    for _ in range(dice.randrange(3) if len(live) < 50 else 2):
        array, offset, size = live.pop(dice.randrange(len(live)))
        libc.free(array); model.give_back(offset, size)
        if not live: break
""",
    )


@pytest.mark.slow
def test_threads_do_not_overwrite_each_other(heap: dict[str, str]) -> None:
    run(
        heap,
        """
torch.set_num_threads(1)
def work(seed):
    dice, live = random.Random(seed), []
    for turn in range(200):
        size = dice.choice([1000, 70_000, 300_000, 1_000_000])
        live.append((turn, torch.full((size + dice.randrange(5000),), turn)))
        if len(live) > 20:
            value, tensor = live.pop(dice.randrange(len(live)))
            assert bool((tensor == value).all())
            del tensor
with ThreadPoolExecutor(3) as pool:
    list(pool.map(work, range(3)))
""",
    )


@pytest.mark.slow
def test_fork_while_other_threads_allocate(heap: dict[str, str]) -> None:
    run(
        heap,
        """
for array in [allocated(MB // 2) for _ in range(8000)][::2]: libc.free(array)  # A larger array searches all of them.
ended = threading.Event()
def work():
    while not ended.is_set():
        libc.free(allocated(MB))
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
children = []
for _ in range(100):
    child = os.fork()
    if not child:
        libc.free(allocated(MB))
        os._exit(0)
    children.append(child)
ended.set()
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
""",
    )


@pytest.mark.slow
def test_usable_size_and_realloc(heap: dict[str, str]) -> None:
    run(
        heap,
        """
array = allocated(8 * MB)
assert libc.malloc_usable_size(array) == 8 * MB
ctypes.memset(array, 7, 8 * MB)
moved = libc.realloc(array, 9 * MB)
assert ctypes.string_at(moved, 8 * MB) == bytes([7]) * (8 * MB)
assert allocated(8 * MB) == array
less = libc.realloc(array, MB)
libc.free(less); libc.free(moved); libc.free(None)
""",
    )


@pytest.mark.slow
def test_malloc_trim_releases_memory(heap: dict[str, str]) -> None:
    run(
        heap,
        """
tensor = torch.ones(64 * MB, dtype=torch.uint8)
before = resident()
del tensor
assert resident() > before - MB
libc.malloc_trim(0)
assert resident() < before - 63 * MB
assert bool((torch.zeros(64 * MB, dtype=torch.uint8) == 0).all())
""",
    )


@pytest.mark.slow
def test_a_limit_of_address_space_disables_the_heap(heap: dict[str, str]) -> None:
    run(
        heap,
        """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
array = allocated(8 * MB)
libc.free(array)
""",
    )


def test_a_warning_tells_why_there_is_no_heap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, shown in (
        ("a b", "blank or a colon"),
        ("a:b", "blank or a colon"),
        ("ab", "file capabilities"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "_heap.so").touch()
        monkeypatch.delenv(PRELOAD, raising=False)
        native = SimpleNamespace(origin=tmp_path / name / "_native.so")
        monkeypatch.setattr(module, "find_spec", lambda _, native=native: native)
        assert bool(heap_environment()) == (name == "ab")
        module.warn_without_heap()
        assert shown in capsys.readouterr().err
        monkeypatch.setenv(PRELOAD, "")  # A user can disable the heap.
        assert not heap_environment()
        module.warn_without_heap()
        assert not capsys.readouterr().err


@pytest.mark.slow
def test_ranks_use_the_heap(heap: dict[str, str], tmp_path: Path) -> None:
    """The ranks of a run preload the heap, as does the process that they are forked from. The launcher does not."""
    words = ["train", "digits", "--strategy", "tensor", "--workers", "2", "--epochs", "1000000", "--quiet"]
    with subprocess.Popen([sys.executable, "-m", "weft", *words, "--out", str(tmp_path / "run")]) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.1)
        maps = [Path(f"/proc/{each.pid}/maps").read_text() for each in descendants(process.pid)[1:]]
        process.terminate()
    assert sum("_native" in text for text in maps) >= 2
    assert all(heap[PRELOAD] in text for text in maps)


@pytest.mark.slow
def test_large_arrays_are_mapped_without_the_heap(heap: dict[str, str]) -> None:
    """Freed arrays return to the system, also after `keep_freed_memory`; a process with the heap stays as it is."""
    script = """
from weft.runtime.memory.heap import keep_freed_memory, map_large_arrays
keep_freed_memory()
assert map_large_arrays() == {expected}
large, small = torch.ones(16 * MB), torch.ones(MB)
before = resident()
del large
assert (before - resident() > 48 * MB) == {expected}
"""
    run(heap, script.replace("{expected}", "False"))
    run({}, script.replace("{expected}", "True"))
