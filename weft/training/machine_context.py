"""Measurements of the machine that a run uses: profile, cost factors, and kernel selection."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from weft.autotune import Cluster, machine_of
from weft.config.config import PlacementOptions
from weft.config.optimisations import Optimisations
from weft.cost import Machine, Profile, holds_profile
from weft.kernels import triton_backend
from weft.nn import Workload, has_onednn
from weft.runtime.kernel_selection import DEFAULT, REMEDY, KernelSelection
from weft.runtime.memory.limit import memory_limit_bytes
from weft.runtime.processes.cores import cores_per_rank, num_cores
from weft.strategies import get_strategy
from weft.training.artifacts.run_folder import RunFolder
from weft.training.launch.torchrun import on_one_host, under_torchrun
from weft.training.planning.probe_command import load_profile
from weft.utils.errors import InputError
from weft.utils.files import migrate
from weft.utils.log import LOGGER


def local_cluster(options: PlacementOptions) -> Cluster | None:
    """Return this host as the cluster of a run, to estimate its time by the profile that `weft probe` wrote.

    Args:
        options: Where to train.

    Returns:
        None if the ranks are on several hosts or on GPUs, or if this host has no profile.
    """
    if options.device != "cpu" or not on_one_host():
        return None
    try:
        return cluster_of_ranks(options, load_profile())
    except InputError:
        return None


def cluster_of_ranks(options: PlacementOptions, profile: Profile) -> Cluster:
    """Return the cluster of a run on the hosts where its ranks are.

    Args:
        options: Where to train.
        profile: The profile of each host.
    """
    return Cluster(
        profile=profile,
        ranks=options.workers,
        hosts=num_hosts(options.workers),
        threads=threads_of_rank(options),
        memory_bytes=memory_limit_bytes(),
    )


def num_hosts(ranks: int) -> int:
    """Return the number of hosts of a run with `ranks` ranks, in a rank or in the process that starts local ranks."""
    return ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def threads_of_rank(options: PlacementOptions) -> int:
    """Return the number of threads of each rank of a run, as computed by the process that plans it."""
    if under_torchrun() or options.workers == 1 or "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return cores_per_rank(options.workers)


def known_machine(options: PlacementOptions, work: Workload, cluster: Cluster | None = None) -> Machine | None:
    """Return the cost factors for the plan of a run, from a profile of the machine.

    Args:
        options: Where to train. `machine` names the file of a profile.
        work: The model and graph.
        cluster: Where the ranks of `hybrid` run if the options name no profile. Default: this host.

    Returns:
        None if the strategy uses nominal factors.

    Raises:
        InputError: The file of --machine cannot be read, or it lacks what the run needs and the run has no --measure.
    """
    if options.machine:
        if options.device != "cpu":
            raise InputError("--machine names a profile of CPUs: leave it out, or give --device cpu")
        cluster = cluster_of_ranks(options, load_profile(options.machine))
    elif "measure" in get_strategy(options.strategy).flags:
        cluster = cluster or local_cluster(options)
    else:
        cluster = None
    try:
        return machine_of(work, cluster) if cluster else None
    except InputError:
        if options.machine and not options.measure:
            raise
        return None  # the profile lacks this number of threads, or such a network


def profile_to_complete(options: PlacementOptions) -> Profile:
    """Return the profile for a run's decisions, possibly incomplete; the ranks measure the missing entries.

    Args:
        options: Where to train.

    Returns:
        The profile of this host. On GPUs, and on hosts without a profile, one without prices. Only the result on rank 0
        is used.
    """
    try:
        if options.device == "cpu":
            return load_profile(options.machine)
    except InputError:
        pass
    return Profile(host={"cores": num_cores()}, prices=[])


def kernels_for_run(options: PlacementOptions, resumed: RunFolder | None = None) -> KernelSelection:
    """Return the kernel selection of a run, restricted to kernels that this machine has.

    The first of these sources that exists is used: the selection of the run to resume, the file of --choices, this
    machine's profile, and the default.

    Args:
        options: Where to train.
        resumed: Folder of the run to resume, if one is resumed.

    Raises:
        InputError: The file of --choices contains no kernel selection.
    """
    begun = resumed if resumed and not options.choices and resumed.is_begun else None
    if begun:
        requested = recorded_kernels(begun)
    elif options.choices:
        requested = DEFAULT if options.choices == DEFAULT.origin else read_kernel_selection(Path(options.choices))
    else:
        try:
            requested = load_profile().choices
        except InputError:
            requested = DEFAULT
    if not Optimisations.without(options.disable).onednn:
        requested = requested.without_onednn()
    available = requested if has_onednn() else requested.without_onednn("mkl")
    if options.device == "cuda" and not triton_backend():
        available = available.replaced("sum", "triton", "torch_sparse")
    if available != requested and begun:
        LOGGER.info(f"{begun.path} used kernels that this machine lacks: results may differ by rounding")
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
        LOGGER.info(f"{folder.choices} is damaged: using the default kernels")
        return DEFAULT


def read_kernel_selection(path: Path) -> KernelSelection:
    """Return the kernel selection in a file, which may also be a profile.

    Raises:
        InputError: The file contains no kernel selection.
    """
    return Profile.read(path).choices if holds_profile(path, REMEDY) else KernelSelection.read(path)
