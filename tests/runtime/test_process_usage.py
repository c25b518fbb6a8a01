"""The measured memory and disk usage of processes equals the known amounts that they allocate."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.runtime.processes.usage import ProcessUsage, resident_bytes, watch

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")

BARE = "import os, sys, tempfile, time"
WAIT = "time.sleep(0.6)"
MEBIBYTE = 1 << 20


def usage_of(folder: Path, *lines: str, limit: int | None = None) -> ProcessUsage:
    """Return the usage of a process that runs lines of Python."""
    folder.mkdir()
    return watch([sys.executable, "-c", "\n".join([BARE, *lines, WAIT])], folder, limit=limit)


@pytest.mark.slow
def test_shared_pages_count_once(tmp_path: Path) -> None:
    """Private pages count in each process; pages from before a fork, and pages of a file, count once."""
    bare = usage_of(tmp_path / "bare").memory
    assert bare > MEBIBYTE
    alone = usage_of(tmp_path / "alone", "data = b'x' * (64 << 20)").memory
    forked = usage_of(tmp_path / "forked", "data = b'x' * (64 << 20)", "os.fork()").memory
    private = usage_of(tmp_path / "private", "os.fork()", "data = b'x' * (64 << 20)").memory
    create = "import mmap; file = open(os.environ['TMPDIR'] + '/one', 'w+b')"
    mapping = f"{create}; [file.write(b'x' * {MEBIBYTE}) for _ in range(64)]; file.flush()"
    read = "data = mmap.mmap(file.fileno(), 0); sum(data[::4096])"
    mapped = usage_of(tmp_path / "mapped", mapping, "os.fork()", read)
    half = "at = 32 << 20 if os.fork() else 0; data = mmap.mmap(file.fileno(), 32 << 20, offset=at); sum(data[::4096])"
    halves = usage_of(tmp_path / "halves", mapping, half).memory
    amounts = [round((memory - bare) / MEBIBYTE / 64, 1) for memory in (alone, forked, private, mapped.memory, halves)]
    assert amounts == pytest.approx([1, 1, 2, 1, 1], abs=0.15)
    assert mapped.disk / MEBIBYTE == pytest.approx(64, abs=1)


@pytest.mark.slow
def test_pages_that_other_processes_share_count(tmp_path: Path) -> None:
    bare = usage_of(tmp_path / "bare").memory
    (tmp_path / "one").write_bytes(b"x" * (64 << 20))
    read = f"import mmap; file = open('{tmp_path}/one', 'r+b'); data = mmap.mmap(file.fileno(), 0); sum(data[::4096])"
    with (tmp_path / "one").open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        assert sum(data[::4096])
        assert (usage_of(tmp_path / "both", read).memory - bare) / MEBIBYTE == pytest.approx(64, abs=10)


@pytest.mark.slow
def test_short_peaks_are_measured(tmp_path: Path) -> None:
    """Memory that is used for 50 ms is measured, although reading all mappings takes longer."""
    bare = usage_of(tmp_path / "bare", WAIT).memory
    moments = "for _ in range(4): data = b'x' * (64 << 20); time.sleep(0.05); del data; time.sleep(0.15)"
    assert (usage_of(tmp_path / "moments", WAIT, moments).memory - bare) / MEBIBYTE == pytest.approx(64, abs=10)


def test_a_heap_that_grows_while_it_is_read_counts_once() -> None:
    """A heap that Linux 6.18 lists several times, because it grew in the meantime, counts with its last size."""
    heap = [
        SimpleNamespace(addr=f"5600a000-5600{end}000", path="[heap]", rss=size, pss=size, anonymous=size)
        for end, size in (("b", 4 << 10), ("d", 12 << 10))
    ]
    library = SimpleNamespace(addr="7f00a000-7f00c000", path="/lib/libc.so.6", rss=8 << 10, pss=8 << 10, anonymous=0)
    assert resident_bytes([SimpleNamespace(memory_maps=lambda **_: [*heap, library])]) == 20 << 10


def test_files_without_a_name_count(tmp_path: Path) -> None:
    written = usage_of(
        tmp_path / "open", "file = tempfile.TemporaryFile()", "file.write(b'x' * (8 << 20)); file.flush()"
    )
    assert written.disk / MEBIBYTE == pytest.approx(8, abs=0.1)


def test_a_process_above_the_limit_is_killed(tmp_path: Path) -> None:
    allocate = "data = b'x' * (128 << 20)"
    over = usage_of(tmp_path / "over", allocate, limit=100 * MEBIBYTE)
    assert over.exit_code < 0
    assert usage_of(tmp_path / "under", allocate, limit=200 * MEBIBYTE).exit_code == 0


def test_exit_code_and_last_line(tmp_path: Path) -> None:
    usage = usage_of(tmp_path / "failed", "print('no good', file=sys.stderr); sys.exit(3)")
    assert (usage.exit_code, usage.last_line) == (3, "no good")
