"""What is seen of processes from outside, of processes that take what is known."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from weft.runtime.process_memory import ProcessUsage, resident_part, watch

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")

BARE = "import os, sys, tempfile, time"
WAIT = "time.sleep(0.6)"
MEBIBYTE = 1 << 20


def seen(folder: Path, *lines: str, limit: int | None = None) -> ProcessUsage:
    """What a process does."""
    folder.mkdir()
    return watch([sys.executable, "-c", "\n".join([BARE, *lines, WAIT])], folder, limit=limit)


@pytest.mark.slow
def test_pages_that_processes_share_count_once(tmp_path: Path) -> None:
    """Own ones in each, those from before a fork once, those of a file once, whoever reads which part of it."""
    bare = seen(tmp_path / "bare").memory
    assert bare > MEBIBYTE
    alone = seen(tmp_path / "alone", "held = b'x' * (64 << 20)").memory
    forked = seen(tmp_path / "forked", "held = b'x' * (64 << 20)", "os.fork()").memory
    own = seen(tmp_path / "own", "os.fork()", "held = b'x' * (64 << 20)").memory
    made = "import mmap; one = open(os.environ['TMPDIR'] + '/one', 'w+b')"
    mapping = f"{made}; [one.write(b'x' * {MEBIBYTE}) for _ in range(64)]; one.flush()"
    read = "held = mmap.mmap(one.fileno(), 0); sum(held[::4096])"
    mapped = seen(tmp_path / "mapped", mapping, "os.fork()", read)
    half = "at = 32 << 20 if os.fork() else 0; held = mmap.mmap(one.fileno(), 32 << 20, offset=at); sum(held[::4096])"
    halves = seen(tmp_path / "halves", mapping, half).memory
    found = [round((one - bare) / MEBIBYTE / 64, 1) for one in (alone, forked, own, mapped.memory, halves)]
    assert found == pytest.approx([1, 1, 2, 1, 1], abs=0.15)
    assert mapped.disk / MEBIBYTE == pytest.approx(64, abs=1)


@pytest.mark.slow
def test_pages_that_others_have_too_count(tmp_path: Path) -> None:
    bare = seen(tmp_path / "bare").memory
    (tmp_path / "one").write_bytes(b"x" * (64 << 20))
    read = f"import mmap; one = open('{tmp_path}/one', 'r+b'); held = mmap.mmap(one.fileno(), 0); sum(held[::4096])"
    with (tmp_path / "one").open("r+b") as file, mmap.mmap(file.fileno(), 0) as held:
        assert sum(held[::4096])
        assert (seen(tmp_path / "both", read).memory - bare) / MEBIBYTE == pytest.approx(64, abs=10)


@pytest.mark.slow
def test_what_is_there_for_a_moment_is_seen(tmp_path: Path) -> None:
    """A twentieth of a second: looks at all that a process has, one after the other, may miss it."""
    bare = seen(tmp_path / "bare", WAIT).memory
    moments = "for _ in range(4): held = b'x' * (64 << 20); time.sleep(0.05); del held; time.sleep(0.15)"
    assert (seen(tmp_path / "moments", WAIT, moments).memory - bare) / MEBIBYTE == pytest.approx(64, abs=10)


def test_a_heap_that_grows_while_it_is_read_counts_once() -> None:
    """As Linux 6.18 was seen to write one: again from its beginning, for as often as it had grown."""
    grows = [f"5600a000-5600{end}000 rw-p 00000000 00:00 0  [heap]\n{sizes(kib)}" for end, kib in (("b", 4), ("d", 12))]
    library = f"7f00a000-7f00c000 r-xp 00000000 08:01 7  /lib/libc.so.6\n{sizes(8, anonymous=0)}"
    of_library = {"/lib/libc.so.6": 8 << 10}
    assert resident_part("".join([*grows, library])) == (12 << 10, of_library, of_library)


def sizes(kib: int, anonymous: int | None = None) -> str:
    """What smaps says of a mapping that is all resident, and of one process alone."""
    known = {"Size": kib, "Rss": kib, "Pss": kib, "Anonymous": kib if anonymous is None else anonymous}
    return "".join(f"{name}: {number:12} kB\n" for name, number in known.items()) + "VmFlags: rd wr mr\n"


def test_files_without_a_name_count(tmp_path: Path) -> None:
    written = seen(tmp_path / "open", "one = tempfile.TemporaryFile()", "one.write(b'x' * (8 << 20)); one.flush()")
    assert written.disk / MEBIBYTE == pytest.approx(8, abs=0.1)


def test_a_limit_ends_what_takes_more(tmp_path: Path) -> None:
    takes = "held = b'x' * (128 << 20)"
    over = seen(tmp_path / "over", takes, limit=100 * MEBIBYTE)
    assert over.exit_code < 0
    assert seen(tmp_path / "under", takes, limit=200 * MEBIBYTE).exit_code == 0


def test_how_it_ended(tmp_path: Path) -> None:
    found = seen(tmp_path / "failed", "print('no good', file=sys.stderr); sys.exit(3)")
    assert (found.exit_code, found.last_line) == (3, "no good")
