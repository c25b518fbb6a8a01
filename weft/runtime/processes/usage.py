"""Resident memory and files of the processes of a run, measured from another process (Linux)."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

SAMPLE_SECONDS, QUICK_SAMPLES = 0.005, 10
"""Seconds between two samples, and number of quick samples (anonymous memory only) after each complete one."""


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
            processes = descendants(process.pid)
            others = resident_bytes(processes) - anonymous_bytes(processes)
            disk = max(disk, folder_bytes(scratch) + open_file_bytes(processes))
            for _ in range(QUICK_SAMPLES):
                now = others + anonymous_bytes(processes)
                memory, before = max(memory, min(before, now)), now
                if limit is not None and memory > limit:
                    process.kill()  # processes that it started end with it
                time.sleep(SAMPLE_SECONDS)
        stderr_file.seek(0)
        lines = stderr_file.read().decode(errors="replace").splitlines()
    return ProcessUsage(memory, disk, process.returncode, lines[-1] if lines else "")


def descendants(pid: int) -> list[psutil.Process]:
    """Return a process and all running processes that it started; none if one of them ends in the meantime.

    New processes that still share their parent's memory (vfork), and so have exactly its sizes, are left out.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
        memory = {each.pid: each.memory_info() for each in processes}
        return [each for each in processes if memory[each.pid] != memory.get(each.ppid())]
    return []


def resident_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the resident memory of some processes in bytes; pages that several of them share count once.

    A mapped file counts with the larger of two numbers: the sum of the processes' proportional set sizes (PSS), and the
    largest resident size (RSS) in one process. The sum alone would be too small if processes outside of the list map
    the file too; one process alone, if each process maps another part.
    """
    private, largest, shares = 0, Counter[str](), Counter[str]()
    for process in processes:
        mappings = {}
        with suppress(psutil.Error):
            for mapping in process.memory_maps(grouped=False):
                # Linux repeats a mapping, such as a heap, that grew while it was read. The last one counts.
                mappings[mapping.addr.partition("-")[0]] = mapping
        files = Counter[str]()
        for mapping in mappings.values():
            in_file = mapping.rss - mapping.anonymous
            if mapping.path.startswith("/") and in_file:
                private += mapping.anonymous
                files[mapping.path] += in_file
                shares[mapping.path] += mapping.pss * in_file // mapping.rss
            else:
                private += mapping.pss
        largest |= files
    return private + (largest | shares).total()


def anonymous_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the resident anonymous memory of some processes in bytes; shared pages count for each process."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            memory = process.memory_info()
            total += memory.rss - memory.shared
    return total


def open_file_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the disk space of the unnamed files that some processes have open, which psutil does not list."""
    sizes = {}
    for process in processes:
        for status in _open_files(process.pid):
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
