"""Reports, tables and charts of runs, made from their records alone."""

from weft.reporting.drawing import Plot
from weft.reporting.page import make_page
from weft.reporting.print_table import print_table
from weft.reporting.records import RunRecords, epoch_columns, rank_columns
from weft.reporting.run_table import (
    calibration_line,
    compare_table,
    partition_table,
    plan_table,
    run_table,
    stage_table,
    sweep_table,
)
from weft.reporting.sections.curves import plot, run_facts

__all__ = [
    "Plot",
    "RunRecords",
    "calibration_line",
    "compare_table",
    "epoch_columns",
    "make_page",
    "partition_table",
    "plan_table",
    "plot",
    "print_table",
    "rank_columns",
    "run_facts",
    "run_table",
    "stage_table",
    "sweep_table",
]
