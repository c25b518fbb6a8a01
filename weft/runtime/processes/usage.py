"""Resident memory and files of the processes of a run, measured from another process (Linux)."""

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

SAMPLE_SECONDS, QUICK_SAMPLES = 0.005, 10
"""Seconds between two samples, and number of quick samples (anonymous memory only) after each complete one."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KCMP, KCMP_VM = {"x86_64": 312, "aarch64": 272}.get(platform.machine(), -1), 1
"""Number of the system call kcmp, and of its operation that compares two address spaces (linux/kcmp.h)."""
MAPPING = re.compile(r"([0-9a-f]+)-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)")
"""First line of a mapping in /proc/PID/smaps: its address, and its file, if it has one."""


class ProcessUsage(NamedTuple):
    """Peak use of a command, and how it ended.

    Since processes are measured one after the other, a peak counts only if two consecutive samples reach it.
    """

    memory: int
    """Resident bytes of the command and all processes that it started."""
    disk: int
    """Bytes of temporary files."""
    exit_code: int
    """Exit code; negative if a signal ended the command."""
    last_line: str
    """Last line on standard error."""


def watch(command: Sequence[str], scratch: Path, *, limit: int | None = None) -> ProcessUsage:
    """Run a command to its end, and return its peak use.

    Args:
        command: The command and its arguments.
        scratch: Empty folder for its temporary files.
        limit: Bytes of memory beyond which the command, with all that it started, is killed; None: no limit.
    """
    environment = os.environ | {"TMPDIR": str(scratch)}
    memory = before = disk = 0
    with (
        (scratch / "stderr").open("w+b") as stderr_file,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr_file, env=environment) as process,
    ):
        while process.poll() is None:
            pids = descendants(process.pid)
            others = resident_bytes(pids) - anonymous_bytes(pids)
            disk = max(disk, folder_bytes(scratch) + open_file_bytes(pids))
            for _ in range(QUICK_SAMPLES):
                now = others + anonymous_bytes(pids)
                memory, before = max(memory, min(before, now)), now
                if limit is not None and memory > limit:
                    process.kill()  # processes that it started end with it
                time.sleep(SAMPLE_SECONDS)
        stderr_file.seek(0)
        lines = stderr_file.read().decode(errors="replace").splitlines()
    return ProcessUsage(memory, disk, process.returncode, lines[-1] if lines else "")


def descendants(pid: int) -> list[int]:
    """Return a process and all running processes that it started.

    New processes that still share their parent's memory are left out.
    """
    children = defaultdict[int, list[int]](list)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(folder.name))
    pids = [pid]
    for parent in pids:
        pids += [
            child for child in children[parent] if ctypes.CDLL(None).syscall(KCMP, parent, child, KCMP_VM, 0, 0) != 0
        ]
    return pids


def resident_bytes(pids: Sequence[int]) -> int:
    """Return the resident memory of some processes in bytes; pages that several of them share count once.

    A mapped file counts with the larger of two numbers: the sum of the processes' proportional set sizes (PSS), and the
    largest resident size (RSS) in one process. The sum alone would be too small if processes outside of the list map
    the file too; one process alone, if each process maps another part.
    """
    private, largest, shares = 0, Counter[str](), Counter[str]()
    for pid in pids:
        with suppress(OSError):
            anonymous, mapped, shared = resident_part(Path(f"/proc/{pid}/smaps").read_text())
            private += anonymous
            largest |= mapped
            shares += shared
    return private + (largest | shares).total()


def anonymous_bytes(pids: Sequence[int]) -> int:
    """Return the resident anonymous memory of some processes in bytes; shared pages count for each process."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            total += (int(resident) - int(shared)) * PAGE_BYTES
    return total


def resident_part(smaps: str) -> tuple[int, Counter[str], Counter[str]]:
    """Return a process's resident anonymous memory; and by file, its resident bytes and its proportional share."""
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
    """Return file and sizes of each mapping, by address.

    Linux writes smaps in portions, and repeats a mapping that grew in the meantime, such as a heap. The last one
    counts.
    """
    mappings: dict[str, tuple[str, dict[str, int]]] = {}
    sizes: dict[str, int] = {}
    for line in smaps.splitlines():
        key, _, value = line.partition(":")
        if begins := MAPPING.match(line):
            sizes = {}
            mappings[begins[1]] = begins[2], sizes
        elif value.endswith(" kB"):
            sizes[key] = int(value.split()[0]) << 10
    return mappings


def open_file_bytes(pids: Sequence[int]) -> int:
    """Return the disk space of the unnamed files that some processes have open."""
    sizes = {}
    for pid in pids:
        for status in _open_files(pid):
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _open_files(pid: int) -> Iterator[os.stat_result]:
    with suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield handle.stat()


def folder_bytes(folder: Path) -> int:
    """Return the disk space of the files in a folder."""
    total = 0
    for path, _, names in os.walk(folder):  # skips folders that were removed in the meantime
        for name in names:
            with suppress(OSError):
                total += Path(path, name).lstat().st_blocks * 512
    return total
