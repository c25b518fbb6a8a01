"""Tells what a plan will take, by what was measured of a machine.

Reading order: measure (a machine's profile), forecast (a plan's seconds by it), factors (of a strategy's own choice).
"""

from weft.planner.factors import machine_of
from weft.planner.forecast import Cluster, bytes_held, step_time
from weft.planner.measure import measure_kernels, measure_network

__all__ = ["Cluster", "bytes_held", "machine_of", "measure_kernels", "measure_network", "step_time"]
