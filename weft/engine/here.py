"""What a run knows of the machine that it is on: its profile, and the factors that choices are decided by."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from weft.core.config import Config
from weft.core.errors import InputError
from weft.core.memory import memory_limit_bytes
from weft.cost import Machine, Profile, holds_profile
from weft.engine.folder import RunFolder
from weft.engine.probing import known_profile
from weft.engine.torchrun import on_one_host, under_torchrun
from weft.nn import Workload
from weft.planner import Cluster, machine_of
from weft.strategies import get_strategy


def cluster_here(config: Config, profile: Profile | None = None) -> Cluster | None:
    """Where a run's ranks are: on this host, of which the profile is its own if none is given.

    None where the ranks are on several hosts, or on GPUs, and where this host has no profile.
    """
    if config.device != "cpu" or not on_one_host():
        return None
    try:
        profile = profile or known_profile()
    except InputError:
        return None
    return Cluster(
        profile=profile,
        ranks=config.workers,
        hosts=1,
        threads=threads_of_rank(config),
        memory_bytes=memory_limit_bytes(),
    )


def threads_of_rank(config: Config) -> int:
    """How many threads each of a run's ranks has, as seen from the process that plans it."""
    if under_torchrun() or config.workers == 1 or "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // config.workers)


def known_machine(
    config: Config, work: Workload, resumed: RunFolder | None = None, cluster: Cluster | None = None
) -> Machine | None:
    """The factors that a run's plan is made by; None: nominal ones, or those that its ranks will measure.

    They are what a run that goes on began with, or those of --probe, or, for a strategy that would measure them, what
    the profile of a cluster, by default of this machine, tells of the workload. InputError for a file of --probe that
    cannot be read.
    """
    if resumed and resumed.probe.exists() and config.probe in ("", Config.read(resumed.config).probe):
        try:
            return Machine.read(resumed.probe)
        except InputError:
            print(f"weft: {resumed.probe} is damaged: factors are found as in a new run", file=sys.stderr)
    elif resumed and not config.probe:
        return None
    if config.probe:
        return machine_in(Path(config.probe), config, work)
    if config.measure or "measure" not in get_strategy(config.strategy).flags:
        return None
    cluster = cluster or cluster_here(config)
    try:
        return machine_of(work, cluster) if cluster else None
    except InputError:  # it was measured with other threads, or without such a network
        return None


def machine_in(path: Path, config: Config, work: Workload) -> Machine:
    """The factors in a file, or those that a profile in it tells of a workload. InputError where it has none."""
    if not holds_profile(path):
        return Machine.read(path)
    cluster = cluster_here(config, Profile.read(path))
    if cluster is None:
        raise InputError(f"--probe {path} is a profile, which tells of processors of one host: leave it out here")
    return machine_of(work, cluster)
