"""What a choice between computing and fetching is decided by, told by the profile of a machine."""

from __future__ import annotations

from dataclasses import replace

from weft.autotune.estimate_time import Cluster
from weft.cost import Machine
from weft.cost.simulate import WorkSeconds
from weft.nn import Workload
from weft.strategies.single import SinglePlan

MESSAGE_BYTES = 1 << 18
"""Of an exchange by which a byte is priced: more than what a network's buffers swallow at once."""
LEAST = 1e-15
"""Seconds of anything, so that nothing is free."""


def machine_of(work: Workload, cluster: Cluster) -> Machine:
    """The factors of a workload: what its own maps and aggregates take by the tables, with all ranks at work.

    Of the tables alone, not of what runs have taught: the same run decides the same until the machine is measured anew.
    InputError where they do not have what the cluster or the workload needs.
    """
    profile = replace(cluster.profile, calibration=())
    alone, busy = profile.prices_of(cluster.threads)
    busy_slots = min(cluster.ranks_each, cluster.slots)
    trace = SinglePlan(work).trace(training=True)

    def seconds_of(kind: str) -> float:
        calls = [call for one in trace.operations if one.kind == kind for call in one.calls]
        return WorkSeconds.of(calls, alone, busy).at(busy_slots, cluster.slots, cluster.ranks_on_core)

    crossing = 0.0
    if cluster.ranks > 1:
        crossing = profile.network_of(cluster.ranks, cluster.hosts).seconds("halo", MESSAGE_BYTES)
    return Machine(
        seconds_per_flop=max(LEAST, seconds_of("dense") / max(trace.flops, 1)),
        seconds_per_edge=max(LEAST, seconds_of("aggregate") / max(trace.edges, 1)),
        seconds_per_byte=max(LEAST, crossing / MESSAGE_BYTES),
    )
