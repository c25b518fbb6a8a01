"""Collectives between ranks, counted. The only package that imports torch.distributed, the launcher aside."""

from weft.comm.exchange import (
    Layout,
    cols_to_rows,
    column_layout,
    even_bounds,
    rows_to_cols,
    sum_gradients,
    sum_over_ranks,
)
from weft.comm.group import Group, join

__all__ = [
    "Group",
    "Layout",
    "cols_to_rows",
    "column_layout",
    "even_bounds",
    "join",
    "rows_to_cols",
    "sum_gradients",
    "sum_over_ranks",
]
