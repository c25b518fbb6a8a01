"""What a person reads after a run, made from its records alone."""

from weft.report.table import compare_table, partition_table, run_table, stage_table, sweep_table
from weft.report.terminal import print_table

__all__ = ["compare_table", "partition_table", "print_table", "run_table", "stage_table", "sweep_table"]
