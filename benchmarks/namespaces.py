"""Network namespaces named after the process that owns them, so that those of killed processes can be removed."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

NAME = re.compile(r"weft-((\d+)-\d+)-\d+-(switch|r\d+)")  # process id and start time of the owner, a number, the role


class Unavailable(RuntimeError):
    """This machine cannot emulate a cluster; the message says what is missing."""


def clean() -> list[str]:
    """Remove the namespaces whose owners have ended, with the processes in them, and return their names."""
    require()
    owners = {name: NAME.fullmatch(name) for name in namespaces()}
    left = [name for name, owner in owners.items() if owner and living(int(owner[2])) != owner[1]]
    for name in left:
        remove(name)
    return left


def require() -> None:
    missing = [tool for tool in ("ip", "tc", "setpriv") if not shutil.which(tool)]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} not found: install iproute2 and util-linux")
    if os.geteuid():
        raise Unavailable("creating network namespaces needs root")


def do(*words: str) -> str:
    """Run a command and return its output; raise Unavailable if it fails."""
    done = subprocess.run(" ".join(words).split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(words)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


def mine() -> str:
    """Return an unused prefix for the namespaces of another cluster of this process."""
    existing, owner = " ".join(namespaces()), living(os.getpid())
    stems = (f"weft-{owner}-{number}-" for number in itertools.count())
    return next(stem for stem in stems if stem not in existing)


def namespaces() -> list[str]:
    return [line.split()[0] for line in do("ip netns list").splitlines()]


def living(pid: int) -> str | None:
    """Return the id and start time of a process, which are unique together; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{pid}-{fields[19]}"


def remove(namespace: str) -> None:
    kill_all(namespace)
    with contextlib.suppress(Unavailable):  # it was never created, or another process has removed it
        do("ip netns delete", namespace)


def kill_all(namespace: str) -> None:
    """Kill the processes in a namespace, also those that start meanwhile."""
    with contextlib.suppress(Unavailable):
        for _ in range(1000):
            if not (pids := do("ip netns pids", namespace).split()):
                return
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
