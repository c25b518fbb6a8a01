"""What a run will cost, told beforehand."""

from weft.cost.factors import Factors
from weft.cost.trace import Operation, Trace, all_reduce

__all__ = ["Factors", "Operation", "Trace", "all_reduce"]
