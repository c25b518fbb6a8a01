"""Collectives between ranks, counted. The only package that imports torch.distributed, the launcher aside."""

from weft.comm.exchange import (
    Layout,
    Route,
    cols_to_rows,
    column_layout,
    even_bounds,
    fetch_halo,
    rows_to_cols,
    sum_gradients,
    sum_over_ranks,
)
from weft.comm.group import Group, join

__all__ = [
    "Group",
    "Layout",
    "Route",
    "cols_to_rows",
    "column_layout",
    "even_bounds",
    "fetch_halo",
    "join",
    "rows_to_cols",
    "sum_gradients",
    "sum_over_ranks",
]
