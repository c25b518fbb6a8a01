"""`weft probe`: measures this machine, and under torchrun the network between hosts, once for all plans."""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from weft.autotune import measure_disk, measure_kernels, measure_network, measured_choices
from weft.comm import Group, join
from weft.cost import Processes, Profile
from weft.runtime.cores import num_cores
from weft.runtime.forkserver import temporary_folder
from weft.runtime.kernel_selection import DEFAULT, use
from weft.runtime.memory import keep_pages, memory_limit_bytes
from weft.runtime.meter import Meter
from weft.runtime.native import _native
from weft.runtime.process_memory import watch
from weft.training.launch.processes import Meeting, launch
from weft.training.progress import waiting
from weft.utils.errors import InputError, Stopped

TIMEOUT_SECONDS = 600.0
TINY, LAUNCHED = "rmat:vertices=64,edges=256,features=4,classes=2", (2, 4)
"""The graph, and the numbers of ranks, of runs by which the memory of processes is told."""
EPOCHS = "300"
"""Of these runs, so that their ranks are seen at work more than once."""
FOUND = "found.json"


def default_path() -> Path:
    """Where the profile of this machine is kept: weft/machine.json in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "weft" / "machine.json"


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Keeps other processes from writing a profile's file, as far as its file system has locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def keep(profile: Profile, path: Path) -> None:
    """Writes a profile that was measured."""
    with only_writer(path):
        profile.save(path)


def teach(path: Path, digest: str, ratios: Mapping[str, float]) -> None:
    """Adds to a profile's file what a run has taught, see `Profile.learned`, unless it is another one by now.

    digest: of the profile by which the run was told. InputError and OSError where the file cannot be read or written.
    """
    with only_writer(path):
        profile = Profile.read(path)
        if profile.digest == digest:
            profile.taught(ratios).save(path)


def probe_machine(workers: Sequence[int] = (), *, quiet: bool = False) -> Profile:
    """The profile of this host, with so many local ranks at work; by default 1, 2, 4, ... up to its cores, at least 4.

    What each has takes two minutes or three, in which nothing else should be at work.
    """
    cores = num_cores()
    workers = workers or [1 << power for power in range(max(cores, 4).bit_length()) if 1 << power <= max(cores, 4)]
    with waiting("measuring processes and disk", quiet=quiet):
        found = Profile(host=host_facts() | process_facts() | {"disk": measure_disk()._asdict()}, prices=[])
    for ranks, threads in sorted({pair for count in workers for pair in at_work(count, cores)}):
        with waiting(f"measuring {ranks} ranks of {threads} threads", quiet=quiet):
            found = measured(found, ranks, threads, kernels=ranks * threads <= cores)
    return found


def process_facts() -> dict[str, Any]:
    """What a profile says of the memory of processes (Linux; nothing elsewhere): as seen on a graph without size."""
    seen = {workers: watch_tiny(workers) for workers in (1, *LAUNCHED)} if Path("/proc/self/smaps").exists() else {}
    if not seen or not all(seen.values()):
        return {}
    few, many = LAUNCHED
    rank = (seen[many] - seen[few]) // (many - few)
    return {"processes": Processes(alone=seen[1], launcher=seen[few] - few * rank, rank=rank)._asdict()}


def watch_tiny(workers: int) -> int:
    """The most memory of a run of so many local ranks that have next to no rows; 0 where it fails."""
    with tempfile.TemporaryDirectory(prefix="weft-", dir=temporary_folder()) as folder:
        run = [sys.executable, "-m", "weft", "train", TINY, "--quiet", "--out", f"{folder}/run"]
        run += ["--epochs", EPOCHS, "--eval-every", EPOCHS]
        several = ["--workers", str(workers), "--strategy", "communicated"]
        seen = watch([*run, *(several if workers > 1 else [])], Path(folder))
    return 0 if seen.code else seen.memory


def at_work(ranks: int, cores: int) -> list[tuple[int, int]]:
    """How many ranks of how many threads are measured for a run on so many: all of them, and one alone."""
    threads = max(1, cores // ranks)
    return [(1, threads), (min(ranks, cores), threads), (ranks, threads)]


def measured(known: Profile, ranks: int, threads: int, *, kernels: bool) -> Profile:
    """What is known, and what so many local ranks measure. Stopped where a signal ends them."""
    with tempfile.TemporaryDirectory(prefix="weft-", dir=temporary_folder()) as folder:
        known.save(Path(folder) / FOUND)
        if stopped_by := launch(measuring_rank, (threads, kernels), workers=ranks, folder=Path(folder)):
            raise Stopped(f"stopped by {signal.Signals(stopped_by).name}; nothing was written", stopped_by)
        return Profile.read(Path(folder) / FOUND)


def measuring_rank(threads: int, kernels: bool, meeting: Meeting) -> None:
    """What each process of `measured` does."""
    torch.set_num_threads(threads)
    keep_pages()
    meter = Meter()
    meter.show_in(meeting.status, int(os.environ["RANK"]))
    group = join(timeout_seconds=TIMEOUT_SECONDS, meter=meter, init_method=meeting.init_method)
    found = with_measured(Profile.read(meeting.folder / FOUND), group, kernels=kernels)
    group.close()
    if group.rank == 0:
        found.save(meeting.folder / FOUND)


def with_measured(found: Profile, group: Group, *, kernels: bool) -> Profile:
    """What is known, and what the ranks of a group measure: prices of what a rank alone has chosen before."""
    if kernels and group.size == 1:
        has_sums = found.choices.kinds["sum"] != DEFAULT.kinds["sum"]
        device = "cuda" if torch.cuda.is_available() and not has_sums else ""
        found = replace(found, choices=measured_choices(found.choices, device=device))
    use(found.choices)
    if kernels:
        found = replace(found, prices=[*found.prices, measure_kernels(group)])
    if group.size > 1:
        found = replace(found, networks=[*found.networks, measure_network(group, found)])
    return found


def probe_network(path: Path) -> Profile:
    """Under torchrun: the profile at a path on each host, with the network between the ranks that are there."""
    profile = replace(Profile.read(path), learned=())
    group = join(timeout_seconds=TIMEOUT_SECONDS, meter=Meter())
    if group.size == 1:
        raise InputError("one rank has no network: start weft probe by torchrun with several, or without torchrun")
    hosts = group.size // int(os.environ["LOCAL_WORLD_SIZE"])
    use(profile.choices)
    found = measure_network(group, profile, hosts=hosts)
    group.close()
    others = [one for one in profile.networks if (one.ranks, one.hosts) != (found.ranks, found.hosts)]
    return replace(profile, networks=[*others, found])


def known_profile(path: str | Path = "") -> Profile:
    """The profile at a path, or this machine's. InputError where there is none, or it is of other hardware."""
    where = Path(path) if path else default_path()
    if not where.exists():
        raise InputError(f"{where}: no profile of this machine is there: weft probe makes it, once")
    profile = Profile.read(where)
    here = hardware()
    for name, value in here.items() if not path else ():
        if profile.host.get(name) != value:
            known = profile.host.get(name)
            raise InputError(
                f"{where} is of {name.replace('_', ' ')} {known}, not {value} as here: measure this machine by weft "
                "probe, or give --machine to plan for the other"
            )
    return profile


def hardware() -> dict[str, Any]:
    """What a profile holds for."""
    return {
        "processor": processor(),
        "cores": num_cores(),
        "instruction_set": _native.current_isa(),
    }


def host_facts() -> dict[str, Any]:
    """What a profile says of where it was measured."""
    return hardware() | {
        "host": platform.node(),
        "memory_bytes": memory_limit_bytes(),
        "torch": torch.__version__,
        "weft": version("weft"),
        "date": time.strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """Its name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
