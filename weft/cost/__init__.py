"""What a run will cost, told beforehand."""

from weft.cost.trace import Operation, Trace, all_reduce

__all__ = ["Operation", "Trace", "all_reduce"]
