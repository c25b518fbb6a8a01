"""The workload of a run, and what its model does: operations, sizes and FLOPs, computed without data."""
