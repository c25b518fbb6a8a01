"""Cost factors, from a machine's profile, by which a strategy decides whether to recompute or to fetch a row."""

from __future__ import annotations

from dataclasses import replace

from weft.autotune.estimate_time import Cluster
from weft.cost import Machine
from weft.cost.simulate import WorkSeconds
from weft.nn import Workload
from weft.strategies.single import SinglePlan

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
