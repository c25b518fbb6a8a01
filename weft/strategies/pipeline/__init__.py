"""Pipelines (G3): vertex-parallel ranks whose chunks send what other ranks read as soon as it is made.

Reading order: order (a rank's rows, and what crosses), plan; weft.parallel has what runs, offload the rest of the plan.
"""
