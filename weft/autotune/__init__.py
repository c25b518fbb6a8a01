"""Tells what a plan will take, by what was measured of a machine.

Reading order: choose and measure (a machine's profile), forecast (a plan's seconds by it), factors (of a strategy's own
choice), extrapolate (of a larger graph).
"""

from weft.autotune.cost_factors import machine_of
from weft.autotune.disk import measure_disk
from weft.autotune.estimate_time import (
    CONTEXT_BYTES,
    Cluster,
    besides,
    bytes_held,
    epoch_time,
    graph_bytes,
    held_by_all,
    time_of,
)
from weft.autotune.extrapolate import HALVINGS, RankEstimate, Samples, extrapolated, works_of
from weft.autotune.kernel_choice import measured_choices
from weft.autotune.probe import measure_kernels, measure_network

__all__ = [
    "CONTEXT_BYTES",
    "HALVINGS",
    "Cluster",
    "RankEstimate",
    "Samples",
    "besides",
    "bytes_held",
    "epoch_time",
    "extrapolated",
    "graph_bytes",
    "held_by_all",
    "machine_of",
    "measure_disk",
    "measure_kernels",
    "measure_network",
    "measured_choices",
    "time_of",
    "works_of",
]
