"""What a run knows of the machine that it is on: its profile, and the factors and implementations that follow."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from weft.autotune import Cluster, machine_of
from weft.config.config import Config
from weft.config.optimisations import Optimisations
from weft.cost import Machine, Profile, holds_profile
from weft.kernels import triton_backend
from weft.nn import Workload, has_onednn
from weft.runtime.cores import cores_per_rank
from weft.runtime.kernel_selection import DEFAULT, REMEDY, KernelSelection
from weft.runtime.memory import memory_limit_bytes
from weft.strategies import get_strategy
from weft.training.artifacts.run_folder import RunFolder
from weft.training.launch.torchrun import on_one_host, under_torchrun
from weft.training.planning.probe_command import load_profile
from weft.utils import migrate
from weft.utils.errors import InputError


def local_cluster(config: Config, profile: Profile | None = None) -> Cluster | None:
    """Where a run's ranks are: on this host, of which the profile is its own if none is given.

    None where the ranks are on several hosts, or on GPUs, and where this host has no profile.
    """
    if config.device != "cpu" or not on_one_host():
        return None
    try:
        profile = profile or load_profile()
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
    return cores_per_rank(config.workers)


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
        except migrate.NewerFile:
            raise
        except InputError:
            print(f"weft: {resumed.probe} is damaged: factors are found as in a new run", file=sys.stderr)
    elif resumed and not config.probe:
        return None
    if config.probe:
        return machine_in(Path(config.probe), config, work)
    if config.measure or "measure" not in get_strategy(config.strategy).flags:
        return None
    cluster = cluster or local_cluster(config)
    try:
        return machine_of(work, cluster) if cluster else None
    except InputError:  # it was measured with other threads, or without such a network
        return None


def machine_in(path: Path, config: Config, work: Workload) -> Machine:
    """The factors in a file, or those that a profile in it tells of a workload. InputError where it has none."""
    if not holds_profile(path):
        return Machine.read(path)
    cluster = local_cluster(config, Profile.read(path))
    if cluster is None:
        raise InputError(f"--probe {path} is a profile, which tells of processors of one host: leave it out here")
    return machine_of(work, cluster)


def kernels_for_run(config: Config, resumed: RunFolder | None = None) -> KernelSelection:
    """Which implementations a run is to use, of those that are there.

    They are what a run that goes on began with, or those of --choices, or else of this machine's profile, where there
    is one. InputError for a file of --choices that has none.
    """
    goes_on = resumed if resumed and not config.choices and resumed.is_begun else None
    if goes_on:
        asked = recorded_kernels(goes_on)
    elif config.choices:
        asked = DEFAULT if config.choices == DEFAULT.origin else read_kernel_selection(Path(config.choices))
    else:
        try:
            asked = load_profile().choices
        except InputError:
            asked = DEFAULT
    if not Optimisations.without(config.disable).onednn:
        asked = asked.without_onednn()
    found = asked if has_onednn() else asked.without_onednn("mkl")
    if config.device == "cuda" and not triton_backend():
        found = found.replaced("sum", "triton", "torch_sparse")
    if found != asked and goes_on:
        print(f"weft: {goes_on.path} has used kernels that are not here: sums are rounded otherwise", file=sys.stderr)
    return found


def recorded_kernels(folder: RunFolder) -> KernelSelection:
    """Return the implementations that a run which goes on began with; NewerFile for those of a later weft."""
    if not folder.choices.exists():
        return KernelSelection.from_record(migrate.FORMER_CHOICES)
    try:
        return KernelSelection.read(folder.choices)
    except migrate.NewerFile:
        raise
    except InputError:
        print(f"weft: {folder.choices} is damaged: the default implementations are used", file=sys.stderr)
        return DEFAULT


def read_kernel_selection(path: Path) -> KernelSelection:
    """Those in a file, or in the profile that it is. InputError where it has none."""
    return Profile.read(path).choices if holds_profile(path, REMEDY) else KernelSelection.read(path)
