"""What the processes of a run take, as seen from outside (Linux): memory that is resident, and files."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import stat
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SECONDS, GLANCES = 0.005, 10
"""Between two looks, and how many see only how much more processes have of their own, which takes no time."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KCMP, KCMP_VM = {"x86_64": 312, "aarch64": 272}.get(platform.machine(), -1), 1
"""The system call that compares what two processes have, and that this is their memory (linux/kcmp.h)."""
MAPPING = re.compile(r"([0-9a-f]+)-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)")
"""The line of /proc/PID/smaps with which a mapping begins: where that is, and its file, if it has one."""


class ProcessUsage(NamedTuple):
    """The most that a command was seen to take, twice in a row, since processes are looked at one after the other."""

    memory: int
    """Bytes resident, of it and all that it started."""
    disk: int
    """Bytes of temporary files."""
    code: int
    """With which it ended."""
    said: str
    """Its last line on stderr."""


def watch(command: Sequence[str], scratch: Path, *, limit: int | None = None) -> ProcessUsage:
    """Runs a command to its end, its temporary files in an empty folder.

    limit: of memory, beyond which it is killed with all that it started; its code is negative then.
    """
    environment = os.environ | {"TMPDIR": str(scratch)}
    memory = before = disk = 0
    with (
        (scratch / "stderr").open("w+b") as said,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=environment) as process,
    ):
        while process.poll() is None:
            pids = descendants(process.pid)
            others = resident_bytes(pids) - anonymous_bytes(pids)
            disk = max(disk, folder_bytes(scratch) + open_file_bytes(pids))
            for _ in range(GLANCES):
                now = others + anonymous_bytes(pids)
                memory, before = max(memory, min(before, now)), now
                if limit is not None and memory > limit:
                    process.kill()  # what it started ends with it
                time.sleep(SECONDS)
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    return ProcessUsage(memory, disk, process.returncode, lines[-1] if lines else "")


def descendants(pid: int) -> list[int]:
    """A process and all that it has started and that run, but for those that are yet in their parent's memory."""
    children = defaultdict[int, list[int]](list)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(folder.name))
    found = [pid]
    for one in found:
        found += [child for child in children[one] if ctypes.CDLL(None).syscall(KCMP, one, child, KCMP_VM, 0, 0) != 0]
    return found


def resident_bytes(pids: Sequence[int]) -> int:
    """The memory that some processes have resident, pages that several of them share counted once.

    Of a file that several map, their shares of it, since each may have another part; but as much as the one that has
    most of it, since those that processes elsewhere map as well count whole.
    """
    private, most, shares = 0, Counter[str](), Counter[str]()
    for pid in pids:
        with suppress(OSError):
            anonymous, mapped, shared = resident_part(Path(f"/proc/{pid}/smaps").read_text())
            private += anonymous
            most |= mapped
            shares += shared
    return private + (most | shares).total()


def anonymous_bytes(pids: Sequence[int]) -> int:
    """The memory of no file that some processes have resident, pages that several of them share counted for each."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            total += (int(resident) - int(shared)) * PAGE_BYTES
    return total


def resident_part(smaps: str) -> tuple[int, Counter[str], Counter[str]]:
    """A process's part of memory that is of no file, and of each file what it has resident, and its share of that."""
    private, files, shares = 0.0, Counter[str](), Counter[str]()
    for name, sizes in _mappings(smaps).values():
        rss, anonymous = sizes["Rss"], sizes["Anonymous"]
        share = sizes["Pss"] / max(rss, 1)
        if name.startswith("/"):
            private += anonymous * (share if anonymous == rss else 1)
            files[name] += rss - anonymous
            shares[name] += round(share * (rss - anonymous))
        else:
            private += rss * share
    return round(private), files, shares


def _mappings(smaps: str) -> dict[str, tuple[str, dict[str, int]]]:
    """By where they begin, the file of each mapping and its bytes of each kind.

    Linux writes a few at a time, and one that has grown meanwhile, such as a heap, again: the last one counts.
    """
    found: dict[str, tuple[str, dict[str, int]]] = {}
    sizes: dict[str, int] = {}
    for line in smaps.splitlines():
        key, _, value = line.partition(":")
        if begins := MAPPING.match(line):
            sizes = {}
            found[begins[1]] = begins[2], sizes
        elif value.endswith(" kB"):
            sizes[key] = int(value.split()[0]) << 10
    return found


def open_file_bytes(pids: Sequence[int]) -> int:
    """The room on disk of the files without a name that some processes have open."""
    found = {}
    for pid in pids:
        for one in _open_files(pid):
            if stat.S_ISREG(one.st_mode) and one.st_nlink == 0:
                found[one.st_dev, one.st_ino] = one.st_blocks * 512
    return sum(found.values())


def _open_files(pid: int) -> Iterator[os.stat_result]:
    with suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield handle.stat()


def folder_bytes(folder: Path) -> int:
    """The room on disk of the files in a folder."""
    total = 0
    for path, _, names in os.walk(folder):  # which leaves out folders that are gone meanwhile
        for name in names:
            with suppress(OSError):
                total += Path(path, name).lstat().st_blocks * 512
    return total
