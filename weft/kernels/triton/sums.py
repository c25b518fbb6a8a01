"""Sums and maxima over in-edges, and their adjoints over the transposed edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.degrees import CompressedRows
from weft.kernels.backend import Scale
from weft.kernels.triton.device.sums import max_backward_rows, max_rows, sum_rows
from weft.kernels.triton.launch_config import MAX_LANES, column_blocks, kernel_types, launch_segments, whole_rows
from weft.utils.dtypes import sum_dtype


def spmm(adj: Adjacency, x: Tensor, scale: Scale, weighted: bool, in_sum_dtype: bool = False) -> Tensor:
    y = x.new_empty(adj.num_targets, x.shape[1], dtype=sum_dtype(x.dtype) if in_sum_dtype else x.dtype)
    weight = adj.weight if weighted else None
    return sum_into(adj, x.contiguous(), y, weight, before=scale.source, after=scale.target, loop=scale.loop)


def spmm_transposed(
    adj: Adjacency, grad_y: Tensor, scale: Scale, weighted: bool, into: Tensor | None = None, in_sum_dtype: bool = False
) -> Tensor:
    dtype = sum_dtype(grad_y.dtype) if in_sum_dtype else grad_y.dtype
    grad_x = grad_y.new_empty(adj.num_sources, grad_y.shape[1], dtype=dtype) if into is None else into
    edges, grad_y, add = adj.transpose, grad_y.contiguous(), into is not None
    weight = edges.weight if weighted else None
    return sum_into(edges, grad_y, grad_x, weight, before=scale.target, after=scale.source, loop=scale.loop, add=add)


def sum_into(
    rows: CompressedRows,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    *,
    bounds: Sequence[int] = (),
    edge_ids: Tensor | None = None,
    before: Tensor | None = None,
    after: Tensor | None = None,
    loop: Tensor | None = None,
    keep_scale: float = 1.0,
    add: bool = False,
    x_by_entry: bool = False,
) -> Tensor:
    """Compute weighted sums of rows over the entries of each matrix row, by head, and write them to y; see `sum_rows`.

    Args:
        rows: Compressed matrix, whose entries are edges.
        x: Rows to sum, [s, F].
        y: Result, [n, F].
        weight: Weight of each entry, [E], or by edge id and head, [E, H]; None: 1.
        bounds: Column range of each head; empty: one head.
        edge_ids: Edge id of each entry; None: the number of the entry.
        before: Factor of each row of x, [s].
        after: Factor of each sum, [n].
        loop: Weight of each row's self-loop, [n] or [n, H].
        keep_scale: Factor of weights that are not negative, if it is not 1; negative weights then count as 0 (dropout).
        add: True to add the sums to y.
        x_by_entry: True if x has a row for each entry instead of each source.

    Returns:
        y.
    """
    heads = max(len(bounds) - 1, 1)
    columns = column_blocks(tuple(bounds) or (0, x.shape[1]), x.device)
    classes = rows.degree_classes
    partial = x.new_empty(len(classes.pieces), x.shape[1], dtype=sum_dtype(x.dtype))
    gathered: dict[str, Any] = {
        "indices": None if x_by_entry else rows.indices,
        "edge_ids": edge_ids,
        "weight": weight,
        "neighbour_scale": before,
        "x": x,
    }
    common: dict[str, Any] = {
        "x_width": x.shape[1],
        "width": x.shape[1],
        "row_scale": after,
        "loop_scale": loop,
        "num_loops": 0 if loop is None else len(loop),
        "loop_rows": x,
        "keep_scale": keep_scale,
        "HEADS": heads,
        "DROPPED": keep_scale != 1,
        **kernel_types(x, y, weight, partial),
    }
    for segments, lanes in whole_rows(classes):
        launch_segments(sum_rows, segments, columns, lanes=lanes, **gathered, y=y, **common, FINISH=True, ADD=add)
    launch_segments(
        sum_rows, classes.pieces, columns, lanes=MAX_LANES, **gathered, y=partial, **common, FINISH=False, ADD=False
    )
    gathered = dict.fromkeys(gathered) | {"x": partial}
    launch_segments(sum_rows, classes.hubs, columns, lanes=1, **gathered, y=y, **common, FINISH=True, ADD=add)
    return y


def sum_pieces(rows: CompressedRows, partial: Tensor) -> Tensor:
    """Return the sums over the pieces of each hub, in the order of the pieces, [hubs, F].

    Args:
        rows: Compressed matrix.
        partial: Sum of each piece, [pieces, F].
    """
    hubs = rows.degree_classes.hubs
    y = partial.new_empty(len(hubs), partial.shape[1])
    columns = column_blocks((0, partial.shape[1]), partial.device)
    launch_segments(
        sum_rows,
        hubs,
        columns,
        lanes=1,
        **dict.fromkeys(("indices", "edge_ids", "weight", "neighbour_scale", "row_scale", "loop_scale", "loop_rows")),
        x=partial,
        x_width=partial.shape[1],
        y=y,
        width=partial.shape[1],
        num_loops=0,
        keep_scale=1.0,
        HEADS=1,
        DROPPED=False,
        FINISH=False,
        ADD=False,
        **kernel_types(partial),
    )
    return y


def spmm_max(adj: Adjacency, x: Tensor) -> tuple[Tensor, Tensor]:
    y, classes = x.new_empty(adj.num_targets, x.shape[1]), adj.degree_classes
    position = torch.empty(y.shape, dtype=torch.int32, device=x.device)
    columns = column_blocks((0, x.shape[1]), x.device)
    best = x.new_empty(len(classes.pieces), x.shape[1], dtype=sum_dtype(x.dtype))
    positions_of_pieces = torch.empty(best.shape, dtype=torch.int32, device=x.device)
    common: dict[str, Any] = {
        "indptr": adj.indptr,
        "indices": adj.indices,
        "width": x.shape[1],
        **kernel_types(x, y, best),
    }
    of_rows, of_pieces = {"y": y, "position": position}, {"y": best, "position": positions_of_pieces}
    for segments, lanes in whole_rows(classes):
        launch_segments(
            max_rows,
            segments,
            columns,
            lanes=lanes,
            x=x,
            positions_of_pieces=None,
            **of_rows,
            **common,
            FINISH=True,
            TOTALS=False,
        )
    launch_segments(
        max_rows,
        classes.pieces,
        columns,
        lanes=MAX_LANES,
        x=x,
        positions_of_pieces=None,
        **of_pieces,
        **common,
        FINISH=False,
        TOTALS=False,
    )
    launch_segments(
        max_rows,
        classes.hubs,
        columns,
        lanes=1,
        x=best,
        positions_of_pieces=positions_of_pieces,
        **of_rows,
        **common,
        FINISH=True,
        TOTALS=True,
    )
    return y, position


def spmm_max_backward(adj: Adjacency, position: Tensor, grad_y: Tensor) -> Tensor:
    edges = adj.transpose
    grad_x, classes = grad_y.new_empty(adj.num_sources, grad_y.shape[1]), edges.degree_classes
    columns = column_blocks((0, grad_y.shape[1]), grad_y.device)
    partial = grad_y.new_empty(len(classes.pieces), grad_y.shape[1], dtype=sum_dtype(grad_y.dtype))
    common: dict[str, Any] = {
        "indptr": adj.indptr,
        "indices": edges.indices,
        "edge_ids": adj.transposed_edge_ids,
        "position": position,
        "grad_y": grad_y,
        "width": grad_y.shape[1],
        **kernel_types(grad_y, grad_x, partial),
    }
    for segments, lanes in whole_rows(classes):
        launch_segments(max_backward_rows, segments, columns, lanes=lanes, grad_x=grad_x, **common, FINISH=True)
    launch_segments(max_backward_rows, classes.pieces, columns, lanes=MAX_LANES, grad_x=partial, **common, FINISH=False)
    put_hubs(edges, partial, grad_x)
    return grad_x


def put_hubs(rows: CompressedRows, partial: Tensor, y: Tensor) -> None:
    """Write the sums of hubs to their rows of y.

    Args:
        rows: Compressed matrix.
        partial: Sum of each piece of a hub, [pieces, F].
        y: Result, [n, F].
    """
    if len(partial):
        y[rows.degree_classes.hubs.row.long()] = sum_pieces(rows, partial).to(y.dtype)
