"""Pipeline (G3): vertex-parallel ranks whose chunks send rows that other ranks read as soon as they are computed.

Reading order: row_order (order of a rank's rows, and what chunks send), plan. The chunks run in weft.parallel. The plan
is derived from that of weft.strategies.offload.
"""
