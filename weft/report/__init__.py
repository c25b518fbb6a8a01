"""What a person reads after a run, made from its records alone."""

from weft.report.page import make_page
from weft.report.records import Records, epoch_columns, rank_columns
from weft.report.table import (
    compare_table,
    learned_line,
    partition_table,
    plan_table,
    run_table,
    stage_table,
    sweep_table,
)
from weft.report.terminal import print_table
from weft.report.training import plot, run_facts

__all__ = [
    "Records",
    "compare_table",
    "epoch_columns",
    "learned_line",
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
