"""Measurements of its machine that a run uses: profile, cost factors, and kernel selection."""

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
    """Return this host as the cluster of a run, to estimate its time.

    Args:
        config: The run's configuration.
        profile: The profile of this host. Default: the file that `weft probe` wrote.

    Returns:
        None if the ranks are on several hosts or on GPUs, or if this host has no profile.
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
    """Return the number of threads of each rank of a run, as computed by the process that plans it."""
    if under_torchrun() or config.workers == 1 or "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return cores_per_rank(config.workers)


def known_machine(
    config: Config, work: Workload, resumed: RunFolder | None = None, cluster: Cluster | None = None
) -> Machine | None:
    """Return the cost factors for the plan of a run.

    The first of these sources that applies is used: the factors of the run to resume; the file of --probe; and for a
    strategy that can measure factors (`hybrid`), the profile of the cluster.

    Args:
        config: The run's configuration.
        work: The model and graph.
        resumed: Folder of the run to resume, if one is resumed.
        cluster: Where the ranks run. Default: this host.

    Returns:
        None if the strategy uses nominal factors, or its ranks will measure them.

    Raises:
        InputError: The file of --probe cannot be read.
    """
    if resumed and resumed.probe.exists() and config.probe in ("", Config.read(resumed.config).probe):
        try:
            return Machine.read(resumed.probe)
        except migrate.NewerFile:
            raise
        except InputError:
            print(f"weft: {resumed.probe} is damaged: using the cost factors of a new run", file=sys.stderr)
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
    """Return the cost factors in a file, or factors for a workload computed from a profile in that file.

    Args:
        path: File with factors (probe.json of a run) or with a profile of `weft probe`.
        config: The run's configuration.
        work: The model and graph.

    Raises:
        InputError: The file cannot be read, or it is a profile and the run is on GPUs or several hosts.
    """
    if not holds_profile(path):
        return Machine.read(path)
    cluster = local_cluster(config, Profile.read(path))
    if cluster is None:
        raise InputError(f"--probe {path} is a profile of the CPUs of one host: leave it out for GPUs or several hosts")
    return machine_of(work, cluster)


def kernels_for_run(config: Config, resumed: RunFolder | None = None) -> KernelSelection:
    """Return the kernel selection of a run, restricted to kernels that this machine has.

    The first of these sources that exists is used: the selection of the run to resume, the file of --choices, this
    machine's profile, and the default.

    Args:
        config: The run's configuration.
        resumed: Folder of the run to resume, if one is resumed.

    Raises:
        InputError: The file of --choices contains no kernel selection.
    """
    begun = resumed if resumed and not config.choices and resumed.is_begun else None
    if begun:
        requested = recorded_kernels(begun)
    elif config.choices:
        requested = DEFAULT if config.choices == DEFAULT.origin else read_kernel_selection(Path(config.choices))
    else:
        try:
            requested = load_profile().choices
        except InputError:
            requested = DEFAULT
    if not Optimisations.without(config.disable).onednn:
        requested = requested.without_onednn()
    available = requested if has_onednn() else requested.without_onednn("mkl")
    if config.device == "cuda" and not triton_backend():
        available = available.replaced("sum", "triton", "torch_sparse")
    if available != requested and begun:
        print(
            f"weft: {begun.path} used kernels that this machine lacks: results may differ by rounding", file=sys.stderr
        )
    return available


def recorded_kernels(folder: RunFolder) -> KernelSelection:
    """Return the kernel selection with which a run began.

    If the file is damaged, a message is printed and the default returned.

    Raises:
        NewerFile: A later version of weft wrote the file.
    """
    if not folder.choices.exists():
        return KernelSelection.from_record(migrate.FORMER_CHOICES)
    try:
        return KernelSelection.read(folder.choices)
    except migrate.NewerFile:
        raise
    except InputError:
        print(f"weft: {folder.choices} is damaged: using the default kernels", file=sys.stderr)
        return DEFAULT


def read_kernel_selection(path: Path) -> KernelSelection:
    """Return the kernel selection in a file, which may also be a profile.

    Raises:
        InputError: The file contains no kernel selection.
    """
    return Profile.read(path).choices if holds_profile(path, REMEDY) else KernelSelection.read(path)
