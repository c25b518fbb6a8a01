"""Network namespaces whose names tell the process they belong to, so that what a killed one left is known as such."""

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

NAME = re.compile(r"weft-((\d+)-\d+)-\d+-(switch|r\d+)")  # a namespace: the owner's pid and start, a number, its part


class Unavailable(RuntimeError):
    """This machine cannot emulate a cluster; says what is missing."""


def clean() -> list[str]:
    """Ends and removes what owners left that do not live any more; the names of the namespaces."""
    require()
    owners = {name: NAME.fullmatch(name) for name in namespaces()}
    left = [name for name, owner in owners.items() if owner and living(int(owner[2])) != owner[1]]
    for name in left:
        remove(name)
    return left


def require() -> None:
    missing = [tool for tool in ("ip", "tc", "setpriv") if not shutil.which(tool)]
    if missing:
        raise Unavailable(f"no {' and no '.join(missing)}: install iproute2 and util-linux")
    if os.geteuid():
        raise Unavailable("not root, who alone may make network namespaces")


def do(*words: str) -> str:
    """What a command writes; Unavailable if it fails."""
    done = subprocess.run(" ".join(words).split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(words)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


def mine() -> str:
    """How the names of the namespaces of one more cluster of this process begin."""
    existing, owner = " ".join(namespaces()), living(os.getpid())
    stems = (f"weft-{owner}-{number}-" for number in itertools.count())
    return next(stem for stem in stems if stem not in existing)


def namespaces() -> list[str]:
    return [line.split()[0] for line in do("ip netns list").splitlines()]


def living(pid: int) -> str | None:
    """A process's id and start, which no other process ever has; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{pid}-{fields[19]}"


def remove(namespace: str) -> None:
    kill_all(namespace)
    with contextlib.suppress(Unavailable):  # never made, or another start was faster
        do("ip netns delete", namespace)


def kill_all(namespace: str) -> None:
    """Kills the processes in a namespace of ours, also those that start meanwhile."""
    with contextlib.suppress(Unavailable):
        for _ in range(1000):
            if not (pids := do("ip netns pids", namespace).split()):
                return
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
