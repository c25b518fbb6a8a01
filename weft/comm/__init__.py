"""Communication between ranks, with counts of bytes and seconds. No other package imports torch.distributed."""

from weft.comm.backends import local_gpu
from weft.comm.columns import (
    ColsToRows,
    ColumnLayout,
    RowSet,
    RowsToCols,
    cols_to_rows,
    column_layout,
    count_shared,
    even_bounds,
    rows_to_cols,
    sum_gradients,
    sum_over_ranks,
    sum_shared,
)
from weft.comm.exchange_key import Key
from weft.comm.group import Group, Pending
from weft.comm.halo import EdgeSlice, EdgeSlices, Halo, PendingRows, slice_edges
from weft.comm.join import join
from weft.comm.point_to_point import Expected, Messages
from weft.comm.route import Route, make_route, make_sum_route

__all__ = [
    "ColsToRows",
    "ColumnLayout",
    "EdgeSlice",
    "EdgeSlices",
    "Expected",
    "Group",
    "Halo",
    "Key",
    "Messages",
    "Pending",
    "PendingRows",
    "Route",
    "RowSet",
    "RowsToCols",
    "cols_to_rows",
    "column_layout",
    "count_shared",
    "even_bounds",
    "join",
    "local_gpu",
    "make_route",
    "make_sum_route",
    "rows_to_cols",
    "slice_edges",
    "sum_gradients",
    "sum_over_ranks",
    "sum_shared",
]
