"""Tells what a plan will take, by what was measured of a machine.

Reading order: choose and measure (a machine's profile), forecast (a plan's seconds by it), factors (of a strategy's own
choice), extrapolate (of a larger graph).
"""

from weft.planner.choose import measured_choices
from weft.planner.disk import measure_disk
from weft.planner.extrapolate import HALVINGS, RankWork, Samples, extrapolated, works_of
from weft.planner.factors import machine_of
from weft.planner.forecast import (
    CONTEXT_BYTES,
    Cluster,
    besides,
    bytes_held,
    epoch_time,
    graph_bytes,
    held_by_all,
    time_of,
)
from weft.planner.measure import measure_kernels, measure_network

__all__ = [
    "CONTEXT_BYTES",
    "HALVINGS",
    "Cluster",
    "RankWork",
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
