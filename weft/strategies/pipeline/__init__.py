"""Pipeline (G3): vertex-parallel ranks whose chunks send rows that other ranks read as soon as they are computed.

Reading order: row_order (order of a rank's rows, and what chunks send), plan. weft.parallel has what runs, and
weft.strategies.offload the rest of the plan.
"""
