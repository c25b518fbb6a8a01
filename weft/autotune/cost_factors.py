"""Cost factors, from a machine's profile, by which a strategy decides whether to recompute or to fetch a row."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import chain

import torch

from weft.autotune.estimate_time import Cluster
from weft.autotune.probe import measure_exchange, measure_kernels
from weft.comm import Group
from weft.cost import Machine, Profile
from weft.cost.simulate import WorkSeconds
from weft.nn import Workload
from weft.runtime.kernel_call import KernelCall
from weft.runtime.memory.heap import release_freed_memory
from weft.strategies.single import SinglePlan
from weft.utils.errors import InputError

MESSAGE_BYTES = 1 << 18
"""Size of the exchange that gives the price of a byte: too large for the buffers of the network."""
MIN_SECONDS = 1e-15
"""Lower bound of each factor, so that nothing is free."""


def machine_of(work: Workload, cluster: Cluster) -> Machine:
    """Return the cost factors of a workload's dense layers and aggregates while all ranks compute.

    The factors ignore the calibration by earlier runs, so that a run decides the same until the machine is measured
    again.

    Args:
        work: The model and the graph.
        cluster: Machine and ranks.

    Raises:
        InputError: The profile does not have what the cluster or the workload needs.
    """
    profile = replace(cluster.profile, calibration=())
    alone, busy = profile.prices_of(cluster.threads)
    busy_slots = min(cluster.ranks_each, cluster.slots)
    trace = SinglePlan(work).trace(training=True)

    def seconds_of(kind: str) -> float:
        calls = [call for operation in trace.operations if operation.kind == kind for call in operation.calls]
        return WorkSeconds.of(calls, alone, busy).at(busy_slots, cluster.slots, cluster.ranks_on_core)

    exchange_seconds = 0.0
    if cluster.ranks > 1:
        exchange_seconds = profile.network_of(cluster.ranks, cluster.hosts).seconds("halo", MESSAGE_BYTES)
    return Machine(
        seconds_per_flop=max(MIN_SECONDS, seconds_of("dense") / max(trace.flops, 1)),
        seconds_per_edge=max(MIN_SECONDS, seconds_of("aggregate") / max(trace.edges, 1)),
        seconds_per_byte=max(MIN_SECONDS, exchange_seconds / MESSAGE_BYTES),
    )


def measured_machine(
    work: Workload, group: Group, profile: Profile, *, hosts: int = 1
) -> tuple[Machine, tuple[str, ...]]:
    """Measure what a profile lacks, and return the cost factors of `machine_of`; all ranks of the group call it.

    1. Rank 0 decides, by its profile, what is missing.
    2. All ranks measure that at the same time.
    3. Rank 0 computes the factors and sends them to all ranks.

    Args:
        work: The model and the graph.
        group: At least two ranks.
        profile: Profile of this rank's host; it may be without any prices.
        hosts: Number of hosts, with equally many ranks on each.

    Returns:
        The factors, and what was measured: "kernels" if the profile has no prices of this workload's kernels for the
        rank's number of threads, "network" if it has no exchange between as many ranks on as many hosts.

    Raises:
        InputError: The probe cannot measure one of the workload's kernels.
    """
    operations = SinglePlan(work).trace(training=True).operations
    calls = [*chain.from_iterable(step.calls for step in operations if step.kind in ("dense", "aggregate"))]
    threads = torch.get_num_threads()
    missing = {
        "kernels": not _has_prices(profile, threads, calls),
        "network": all((network.ranks, network.hosts) != (group.size, hosts) for network in profile.networks),
    }
    missing = group.all_gather_object(missing)[0]
    if missing["kernels"]:
        prices = measure_kernels(group, calls)
        sum(map(prices.seconds, calls))  # an InputError is raised here, on all ranks
        # If ranks share cores, they shared them while they measured: the prices are those of a host with enough cores.
        cores = threads * (group.size // hosts)
        profile = replace(profile, host={**profile.host, "cores": cores}, prices=[prices])
    if missing["network"]:
        network = measure_exchange(group, MESSAGE_BYTES, hosts=hosts)
        profile = replace(profile, networks=[network, *profile.networks])
    release_freed_memory()
    factors = {}
    if group.rank == 0:
        cluster = Cluster(profile=profile, ranks=group.size, hosts=hosts, threads=threads, memory_bytes=0)
        factors = asdict(machine_of(work, cluster))
    return Machine(**group.all_gather_object(factors)[0]), tuple(name for name in missing if missing[name])


def _has_prices(profile: Profile, threads: int, calls: list[KernelCall]) -> bool:
    """Return whether a profile has the prices of `calls` on a rank with this number of threads."""
    try:
        for prices in profile.prices_of(threads):
            sum(map(prices.seconds, calls))
    except InputError:
        return False
    return True
