"""`weft probe`: measure this machine, and under torchrun the network between hosts, for all later estimates."""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from weft.autotune import measure_disk, measure_kernels, measure_network, select_fastest_kernels
from weft.comm import Group, join
from weft.cost import Processes, Profile
from weft.runtime.kernel_selection import DEFAULT, select_kernels
from weft.runtime.memory.heap import keep_freed_memory
from weft.runtime.memory.limit import memory_limit_bytes
from weft.runtime.meter import Meter
from weft.runtime.native import _native
from weft.runtime.processes.cores import num_cores
from weft.runtime.processes.temporary_folder import temporary_folder
from weft.training.launch.processes import Meeting, launch
from weft.training.launch.torchrun import under_torchrun
from weft.training.progress import waiting
from weft.utils.errors import InputError, Stopped
from weft.utils.log import LOGGER
from weft.utils.user_folders import home_folder

TIMEOUT_SECONDS = 600.0
LOCK_SECONDS = 2.0
"""Longest time to wait for another process that writes a profile, which takes milliseconds."""
TINY_GRAPH, LAUNCHED_RANKS = "rmat:vertices=64,edges=256,features=4,classes=2", (2, 4)
"""Graph, and numbers of ranks, of the runs that measure the memory of processes."""
TINY_EPOCHS = "300"
"""Number of epochs of these runs, enough to measure all ranks several times while they train."""
QUICK_RANKS = 4
"""Largest number of ranks that the quick probe measures."""
PROFILE_FILE = "found.json"
"""File in a temporary folder by which ranks return the profile to the process that launched them."""


def default_path() -> Path:
    """Return the path of this machine's profile: weft/machine.json in the user's cache folder.

    Raises:
        InputError: This user has no home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    return Path(cache) / "weft" / "machine.json"


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Lock a profile's file against other processes that write it, if the file system supports locks.

    Goes on without the lock after LOCK_SECONDS, because another user may lock a folder that this user shares.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        _lock(folder)
        yield
    finally:
        os.close(folder)


def _lock(file: int) -> None:
    """Lock a file, or return without the lock after LOCK_SECONDS, or at once if the file system has no locks."""
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(LOCK_SECONDS / 50)
        except OSError:
            return


def save_profile(profile: Profile, path: Path) -> None:
    """Save a measured profile.

    Args:
        profile: The profile.
        path: File to write.
    """
    with only_writer(path):
        profile.save(path)


def update_calibration(path: Path, digest: str, ratios: Mapping[str, float]) -> None:
    """Calibrate the profile in a file by a finished run; see `Profile.calibration`.

    Does nothing if the machine was measured again since the run was estimated.

    Args:
        path: File of the profile.
        digest: Checksum of the profile that the run was estimated with.
        ratios: Ratio of measured to uncalibrated estimated seconds, by kind.

    Raises:
        InputError: The file cannot be read.
        OSError: The file cannot be written.
    """
    with only_writer(path):
        profile = Profile.read(path)
        if profile.digest == digest:
            profile.with_calibration(ratios).save(path)


def probe_machine(workers: Sequence[int] = (), *, quick: bool = False, quiet: bool = False) -> Profile:
    """Measure this host and return its profile. Each number of ranks takes one or two minutes.

    No other program should run meanwhile.

    Args:
        workers: Numbers of local ranks to measure. Default: 1, 2, 4, ... up to the number of cores, and at least 4.
        quick: Take half a minute in all: measure at most QUICK_RANKS ranks, at fewer sizes.
        quiet: Print no progress.
    """
    cores = num_cores()
    if quick:
        with waiting("measuring the disk", quiet=quiet):
            profile = Profile(host=host_facts() | {"disk": measure_disk()._asdict(), "quick": True}, prices=[])
        ranks = min(cores, QUICK_RANKS)
        with waiting(f"measuring {ranks} ranks of {cores // ranks} threads", quiet=quiet):
            return measure_on_ranks(profile, ranks, cores // ranks, kernels=True)
    workers = workers or [1 << power for power in range(max(cores, 4).bit_length()) if 1 << power <= max(cores, 4)]
    with waiting("measuring processes and disk", quiet=quiet):
        profile = Profile(host=host_facts() | process_facts() | {"disk": measure_disk()._asdict()}, prices=[])
    for ranks, threads in sorted({pair for count in workers for pair in measured_pairs(count, cores)}):
        with waiting(f"measuring {ranks} ranks of {threads} threads", quiet=quiet):
            profile = measure_on_ranks(profile, ranks, threads, kernels=ranks * threads <= cores)
    return profile


def process_facts() -> dict[str, Any]:
    """Measure the memory of processes by runs on a tiny graph. Empty if that is impossible (not on Linux).

    With memory(ranks) = launcher + ranks * rank, two runs with different numbers of ranks give both values.
    """
    if not Path("/proc/self/smaps").exists():
        return {}
    memory = {workers: watch_tiny(workers) for workers in (1, *LAUNCHED_RANKS)}
    if not all(memory.values()):
        return {}
    few, many = LAUNCHED_RANKS
    rank = (memory[many] - memory[few]) // (many - few)
    return {"processes": Processes(alone=memory[1], launcher=memory[few] - few * rank, rank=rank)._asdict()}


def watch_tiny(workers: int) -> int:
    """Return the peak memory in bytes of a run of local ranks on a tiny graph; 0 if the run fails."""
    from weft.runtime.processes.usage import watch  # it imports psutil, which other commands do not need

    with temporary_folder() as folder:
        run = [sys.executable, "-m", "weft", "train", TINY_GRAPH, "--quiet", "--out", f"{folder}/run"]
        run += ["--epochs", TINY_EPOCHS, "--eval-every", TINY_EPOCHS]
        several = ["--workers", str(workers), "--strategy", "communicated"]
        seen = watch([*run, *(several if workers > 1 else [])], folder)
    return 0 if seen.exit_code else seen.memory


def measured_pairs(ranks: int, cores: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks and threads per rank to measure for a run: one rank alone, a full host, all ranks.

    Args:
        ranks: Number of ranks of the run.
        cores: Number of cores of the host.
    """
    threads = max(1, cores // ranks)
    return [(1, threads), (min(ranks, cores), threads), (ranks, threads)]


def measure_on_ranks(profile: Profile, ranks: int, threads: int, *, kernels: bool) -> Profile:
    """Return a profile with the measurements of local ranks added.

    Args:
        profile: The profile so far.
        ranks: Number of ranks to launch.
        threads: Number of threads of each rank.
        kernels: Also measure kernels; else only the network.

    Raises:
        Stopped: A signal stopped the ranks.
    """
    with temporary_folder() as folder:
        profile.save(folder / PROFILE_FILE)
        if stopped_by := launch(rank_main, (threads, kernels), workers=ranks, folder=folder):
            raise Stopped(f"stopped by {signal.Signals(stopped_by).name}; nothing was written", stopped_by)
        return Profile.read(folder / PROFILE_FILE)


def rank_main(threads: int, kernels: bool, meeting: Meeting) -> None:
    """Run one rank of `measure_on_ranks`; rank 0 writes the profile to the folder of the launch.

    Args:
        threads: Number of threads of the rank.
        kernels: Also measure kernels.
        meeting: Where the ranks of this launch meet.
    """
    torch.set_num_threads(threads)
    keep_freed_memory()
    meter = Meter()
    meter.write_status_to(meeting.status, int(os.environ["RANK"]))
    group = join(timeout_seconds=TIMEOUT_SECONDS, meter=meter, init_method=meeting.init_method)
    profile = with_measurements(Profile.read(meeting.folder / PROFILE_FILE), group, kernels=kernels)
    group.close()
    if group.rank == 0:
        profile.save(meeting.folder / PROFILE_FILE)


def with_measurements(profile: Profile, group: Group, *, kernels: bool) -> Profile:
    """Return a profile with the measurements of a group of ranks added; all ranks call it.

    A rank alone first selects the fastest implementation of each kernel; prices are those of the selected ones. The
    quick probe keeps the default ones.

    Args:
        profile: The profile so far.
        group: The ranks.
        kernels: Also measure kernels; else only the network.
    """
    quick = profile.is_quick
    if kernels and group.size == 1 and not quick:
        has_sums = profile.choices.kinds["sum"] != DEFAULT.kinds["sum"]
        device = "cuda" if torch.cuda.is_available() and not has_sums else ""
        profile = replace(profile, choices=select_fastest_kernels(profile.choices, device=device))
    select_kernels(profile.choices)
    if kernels:
        profile = replace(profile, prices=[*profile.prices, measure_kernels(group, quick=quick)])
    if group.size > 1:
        profile = replace(profile, networks=[*profile.networks, measure_network(group, profile, quick=quick)])
    return profile


def probe_network(path: Path) -> Profile:
    """Measure the network between the ranks of torchrun, and return the profile of this host with it.

    Args:
        path: File of the host's profile, the same path on every host.

    Raises:
        InputError: torchrun has started only one rank.
    """
    profile = replace(Profile.read(path), calibration=())
    group = join(timeout_seconds=TIMEOUT_SECONDS, meter=Meter())
    if group.size == 1:
        raise InputError(
            "one rank has no network to measure: start weft probe with several ranks of torchrun, or without torchrun"
        )
    hosts = group.size // int(os.environ["LOCAL_WORLD_SIZE"])
    select_kernels(profile.choices)
    measured = measure_network(group, profile, hosts=hosts)
    group.close()
    others = [
        network for network in profile.networks if (network.ranks, network.hosts) != (measured.ranks, measured.hosts)
    ]
    return replace(profile, networks=[*others, measured])


def load_profile(path: str | Path = "") -> Profile:
    """Load a profile.

    Args:
        path: File of the profile. Empty: the profile of this machine.

    Raises:
        InputError: The file does not exist, or (without `path`) was measured on other hardware.
    """
    file = Path(path) if path else default_path()
    if path and not file.exists():
        raise InputError(f"--machine {file}: no such file: give a profile that weft probe wrote")
    if not file.exists():
        raise InputError(
            f"{file} does not exist: run weft probe once, while the machine is idle, or estimate only memory by weft "
            "plan --memory"
        )
    profile = Profile.read(file)
    for name, value in hardware().items() if not path else ():
        if profile.host.get(name) != value:
            measured = profile.host.get(name)
            raise InputError(
                f"{file} was measured on another machine ({name.replace('_', ' ')} is {measured} there and {value} "
                f"here): run weft probe on this one, or give --machine {file} to plan for the other"
            )
    return profile


def required_profile(path: str | Path = "") -> Profile:
    """Load a profile; if this machine has none yet, measure it by the quick probe and save it.

    Args:
        path: File of the profile. Empty: the profile of this machine.

    Raises:
        InputError: The file cannot be read, was measured on other hardware, or the quick probe failed.
    """
    if not path and not under_torchrun() and not default_path().exists():
        LOGGER.info(
            "this machine has no profile yet: measuring it quickly, for about half a minute. For better estimates, run "
            "weft probe once, while the machine is idle"
        )
        # In a process of its own, as weft probe: this one may have loaded a graph, or be a notebook.
        command = [sys.executable, "-m", "weft", "probe", "--quick"]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            reason = (ended.stderr.splitlines() or [f"exit code {ended.returncode}"])[-1]
            raise InputError(f"the quick probe failed: {reason}")
    return load_profile(path)


def hardware() -> dict[str, Any]:
    """Return the properties of this machine that must equal those of its profile."""
    return {
        "processor": processor(),
        "cores": num_cores(),
        "instruction_set": _native.current_isa(),
    }


def host_facts() -> dict[str, Any]:
    """Return the description of this machine for a profile: hardware, memory, versions and date."""
    return hardware() | {
        "host": platform.node(),
        "memory_bytes": memory_limit_bytes(),
        "torch": torch.__version__,
        "weft": version("weft"),
        "date": time.strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """Return the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
