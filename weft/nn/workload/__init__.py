"""Workload of a run, and what its model computes: operations, sizes and FLOPs, found on meta tensors."""
