"""What a person reads after a run, made from its records alone."""

from weft.report.table import compare_table, partition_table, run_table, stage_table

__all__ = ["compare_table", "partition_table", "run_table", "stage_table"]
