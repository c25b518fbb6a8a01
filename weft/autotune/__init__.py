"""Measurement of a machine, and estimates of a plan's time and memory from the measured profile.

Reading order: kernel_choice, probe and disk (measure the machine's profile), estimate_time (time and memory of a plan),
cost_factors (rates by which a strategy decides what to cache), extrapolate (estimates for a larger graph).
"""

from weft.autotune.cost_factors import machine_of, measured_machine
from weft.autotune.disk import measure_disk
from weft.autotune.estimate_time import (
    CONTEXT_BYTES,
    Cluster,
    cluster_memory,
    epoch_time,
    graph_bytes,
    plan_memory,
    steps_time,
    untraced_calls,
)
from weft.autotune.extrapolate import HALVINGS, RankEstimate, Samples, estimate_ranks, extrapolated
from weft.autotune.kernel_choice import select_fastest_kernels
from weft.autotune.probe import measure_kernels, measure_network

__all__ = [
    "CONTEXT_BYTES",
    "HALVINGS",
    "Cluster",
    "RankEstimate",
    "Samples",
    "cluster_memory",
    "epoch_time",
    "estimate_ranks",
    "extrapolated",
    "graph_bytes",
    "machine_of",
    "measure_disk",
    "measure_kernels",
    "measure_network",
    "measured_machine",
    "plan_memory",
    "select_fastest_kernels",
    "steps_time",
    "untraced_calls",
]
