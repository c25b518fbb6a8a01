"""The heap of large arrays, in processes that begin with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.runtime import memory
from weft.runtime.memory import PRELOAD, heap_environment
from weft.runtime.process_memory import descendants

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
    found = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(found), ctypes.c_size_t(alignment), ctypes.c_size_t(num_bytes)) == 0
    return found.value

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.delenv(PRELOAD, raising=False)
    found = heap_environment()
    if not found:
        pytest.skip("needs glibc")
    return found


def run(heap: dict[str, str], script: str) -> None:
    """Runs a script in a process with the heap."""
    command = [sys.executable, "-c", BEGIN + script]
    done = subprocess.run(command, env=os.environ | heap, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_array_takes_the_place_of_one_that_was_freed(heap: dict[str, str]) -> None:
    """Whatever small ones were made meanwhile; neighbours that are free are one block, and what is over is kept."""
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
for one in (second + 5 * MB, first, second): libc.free(one)
assert allocated(24 * MB) == first and not first % 4096
assert allocated(8 * MB, 1 << 21) % (1 << 21) == 0  # which is the C library's
""",
    )


@pytest.mark.slow
def test_what_a_plan_takes_it_for(heap: dict[str, str]) -> None:
    """Arrays of whole pages come to lie where a model of it says."""
    run(
        heap,
        """
from weft.runtime.tensor_peak import Heap
dice, told, held = random.Random(0), Heap(), []
base = allocated(MB); libc.free(base)
for turn in range(3000):
    pages = dice.randrange(64, 128)
    held.append((allocated(pages * 4096), told.take(pages * 4096), pages * 4096))
    assert held[-1][0] - base == held[-1][1], turn
    for _ in range(dice.randrange(3) if len(held) < 50 else 2):
        array, place, size = held.pop(dice.randrange(len(held)))
        libc.free(array); told.give_back(place, size)
        if not held: break
""",
    )


@pytest.mark.slow
def test_numbers_stay_whatever_is_allocated(heap: dict[str, str]) -> None:
    run(
        heap,
        """
torch.set_num_threads(1)
def work(seed):
    dice, held = random.Random(seed), []
    for turn in range(200):
        size = dice.choice([1000, 70_000, 300_000, 1_000_000])
        held.append((turn, torch.full((size + dice.randrange(5000),), turn)))
        if len(held) > 20:
            value, tensor = held.pop(dice.randrange(len(held)))
            assert bool((tensor == value).all())
            del tensor
with ThreadPoolExecutor(3) as pool:
    list(pool.map(work, range(3)))
""",
    )


@pytest.mark.slow
def test_a_process_is_forked_while_others_allocate(heap: dict[str, str]) -> None:
    run(
        heap,
        """
for one in [allocated(MB // 2) for _ in range(8000)][::2]: libc.free(one)  # which are all looked at for a larger one
ended = threading.Event()
def work():
    while not ended.is_set():
        libc.free(allocated(MB))
threads = [threading.Thread(target=work) for _ in range(3)]
for one in threads: one.start()
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
def test_what_else_is_asked_of_an_array(heap: dict[str, str]) -> None:
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
def test_memory_goes_back_when_that_is_asked_for(heap: dict[str, str]) -> None:
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
def test_a_process_that_may_have_no_such_range_has_none(heap: dict[str, str]) -> None:
    run(
        heap,
        """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
array = allocated(8 * MB)
libc.free(array)
""",
    )


def test_a_command_starts_itself_anew_for_it(heap: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[str]()
    monkeypatch.setattr(memory.os, "execv", lambda path, _: started.append(path))
    monkeypatch.setattr(memory.signal, "pthread_sigmask", lambda *_: None)
    memory.restart_with_heap()
    assert os.environ[PRELOAD] == heap[PRELOAD]
    assert started == [sys.executable]
    memory.restart_with_heap()
    monkeypatch.setenv(PRELOAD, "")  # as a person may set it
    memory.restart_with_heap()
    assert len(started) == 1


@pytest.mark.slow
def test_ranks_have_it(heap: dict[str, str], tmp_path: Path) -> None:
    """And the process that they are forked from, and the one that is waited for."""
    words = ["train", "digits", "--strategy", "tensor", "--workers", "2", "--epochs", "1000000", "--quiet"]
    with subprocess.Popen([sys.executable, "-m", "weft", *words, "--out", str(tmp_path / "run")]) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.1)
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in descendants(process.pid)]
        process.terminate()
    assert sum("_native" in one for one in maps) >= 2
    assert all(heap[PRELOAD] in one for one in maps)
