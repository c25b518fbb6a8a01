"""What a run will cost, told beforehand."""

from weft.cost.machine import NOMINAL_RATES, Machine, Rates
from weft.cost.trace import Operation, Trace, all_reduce

__all__ = ["NOMINAL_RATES", "Machine", "Operation", "Rates", "Trace", "all_reduce"]
