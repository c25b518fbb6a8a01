"""Sums and maxima over the entries of rows."""

import triton
import triton.language as tl

from weft.kernels.triton.device.common import columns_of, entries_of, segments_of


@triton.jit(do_not_specialize=["num_segments", "num_loops"])
def sum_rows(
    first,
    count,
    row,
    num_segments,
    num_blocks,
    blocks,
    indices,
    edge_ids,
    weight,
    neighbour_scale,
    x,
    x_width,
    y,
    width,
    row_scale,
    loop_scale,
    num_loops,
    loop_rows,
    keep_scale: tl.float64,
    HEADS: tl.constexpr,
    DROPPED: tl.constexpr,
    FINISH: tl.constexpr,
    ADD: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Compute `y_r = row_scale_r * sum_e weight_e neighbour_scale_u x_u + loop_scale_r loop_rows_r`, by head.

    The sum is over the entries e of row r, and u is the column of e. A factor that is None is left out.

    Args:
        first: First entry of each segment, [S].
        count: Number of entries of each segment, [S].
        row: Row of each segment, [S].
        num_segments: Number of segments.
        num_blocks: Number of blocks of columns.
        blocks: Head, first column and end of each block of columns, int32 [B, 3].
        indices: Column of each entry (source of each edge); None: the number of the entry.
        edge_ids: Edge id of each entry; None: the number of the entry.
        weight: Weight by edge id and head, [E, H].
        neighbour_scale: Factor of each row of x.
        x: Rows to sum.
        x_width: Number of columns of x.
        y: Result by row, or by segment unless FINISH.
        width: Number of columns of all heads.
        row_scale: Factor of each sum.
        loop_scale: Weight of each self-loop by head, [num_loops, H].
        num_loops: Number of rows that may have a self-loop.
        loop_rows: Rows that self-loops add.
        keep_scale: Factor of weights that are not negative, if DROPPED.
        HEADS: Number of heads of the weights.
        DROPPED: True if negative weights and loop weights were dropped: they count as 0, the others are multiplied by
            keep_scale.
        FINISH: True to compute final results of rows; False to write intermediate sums of segments.
        ADD: True to add to y.
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        R: Segments of a program.
        K: Entries of a segment that are processed side by side.
        C: Columns of a program.
        ALIGN: Power of two that divides all bounds of columns.
    """
    block, segment, exists, target, begin, length = segments_of(first, count, row, num_segments, num_blocks, R)
    head, column, inside = columns_of(blocks, block, C, ALIGN)
    keep = tl.full((), keep_scale, ACC)
    lanes = tl.zeros([R, K, C], ACC)
    for done in range(0, tl.max(length), K):
        at, live = entries_of(begin, length, done, K)
        source = at
        if indices is not None:
            source = tl.load(indices + at, mask=live, other=0)
        of_row = source.to(OFFSET)[:, :, None] * x_width + column[None, None, :]
        value = tl.load(x + of_row, mask=live[:, :, None] & inside[None, None, :], other=0.0).to(ACC)
        if weight is not None:
            edge = at
            if edge_ids is not None:
                edge = tl.load(edge_ids + at, mask=live, other=0)
            factor = tl.load(weight + edge.to(OFFSET) * HEADS + head, mask=live, other=0.0).to(ACC)
            if DROPPED:
                factor = tl.where(factor < 0, 0.0, factor * keep)
            value *= factor[:, :, None]
        if neighbour_scale is not None:
            value *= tl.load(neighbour_scale + source, mask=live, other=0.0).to(ACC)[:, :, None]
        lanes += value
    total = tl.sum(lanes, 1)
    in_tile = exists[:, None] & inside[None, :]
    if FINISH:
        element = target.to(OFFSET)[:, None] * width + column[None, :]
        if row_scale is not None:
            total *= tl.load(row_scale + target, mask=exists, other=0.0).to(ACC)[:, None]
        if loop_scale is not None:
            has_loop = exists & (target < num_loops)
            factor = tl.load(loop_scale + target.to(OFFSET) * HEADS + head, mask=has_loop, other=0.0).to(ACC)
            if DROPPED:
                factor = tl.where(factor < 0, 0.0, factor * keep)
            total += (
                tl.load(loop_rows + element, mask=has_loop[:, None] & inside[None, :], other=0.0).to(ACC)
                * factor[:, None]
            )
        if ADD:
            total += tl.load(y + element, mask=in_tile, other=0.0).to(ACC)
    else:
        element = segment.to(OFFSET)[:, None] * width + column[None, :]
    tl.store(y + element, total.to(y.dtype.element_ty), mask=in_tile)


@triton.jit(do_not_specialize=["num_segments"])
def max_rows(
    first,
    count,
    row,
    num_segments,
    num_blocks,
    blocks,
    indptr,
    indices,
    x,
    positions_of_pieces,
    y,
    position,
    width,
    FINISH: tl.constexpr,
    TOTALS: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Compute the maximum of each column over the entries of a row, and its first position in the row.

    NaN counts as the maximum. A row without entries gets 0.

    Args:
        first: First entry of each segment, [S].
        count: Number of entries of each segment, [S].
        row: Row of each segment, [S].
        num_segments: Number of segments.
        num_blocks: Number of blocks of columns.
        blocks: Head, first column and end of each block of columns, int32 [B, 3].
        indptr: First entry of each row.
        indices: Column of each entry (source of each edge).
        x: Source rows; with TOTALS, the maxima of pieces.
        positions_of_pieces: With TOTALS, the positions of the maxima of pieces.
        y: Maxima, by row, or by segment unless FINISH.
        position: Their positions.
        width: Number of columns.
        FINISH: True if segments are whole rows.
        TOTALS: True if entries are the pieces of hubs.
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        R: Segments of a program.
        K: Entries of a segment that are processed side by side.
        C: Columns of a program.
        ALIGN: Power of two that divides all bounds of columns.
    """
    block, segment, exists, target, begin, length = segments_of(first, count, row, num_segments, num_blocks, R)
    _, column, inside = columns_of(blocks, block, C, ALIGN)
    no_position = 2147483647
    largest_by_lane = tl.full([R, K, C], float("-inf"), ACC)
    position_by_lane = tl.full([R, K, C], no_position, tl.int32)
    entries_before = tl.zeros([R], tl.int32)
    if not TOTALS:
        entries_before = (begin - tl.load(indptr + target, mask=exists, other=0)).to(tl.int32)
    for done in range(0, tl.max(length), K):
        at, live = entries_of(begin, length, done, K)
        source = at
        if not TOTALS:
            source = tl.load(indices + at, mask=live, other=0)
        mask = live[:, :, None] & inside[None, None, :]
        of_row = source.to(OFFSET)[:, :, None] * width + column[None, None, :]
        value = tl.load(x + of_row, mask=mask, other=0.0).to(ACC)
        if TOTALS:
            entry_position = tl.load(positions_of_pieces + of_row, mask=mask, other=0)
        else:
            entry_position = (entries_before[:, None] + done + tl.arange(0, K)[None, :])[:, :, None]
        wins = mask & (
            (value > largest_by_lane)
            | (position_by_lane == no_position)
            | ((value != value) & (largest_by_lane == largest_by_lane))
        )
        largest_by_lane = tl.where(wins, value, largest_by_lane)
        position_by_lane = tl.where(wins, entry_position, position_by_lane)
    # Combine the lanes: NaN wins, then the largest value; among equal ones, the lowest position.
    unordered = largest_by_lane != largest_by_lane
    any_unordered = tl.max(unordered.to(tl.int32), 1) > 0
    largest = tl.max(tl.where(unordered, float("-inf"), largest_by_lane), 1)
    best = tl.where(any_unordered[:, None, :], unordered, largest_by_lane == largest[:, None, :])
    winner = tl.min(tl.where(best, position_by_lane, no_position), 1)
    largest = tl.where(any_unordered, float("nan"), largest)
    empty = winner == no_position
    out = target if FINISH else segment
    element = out.to(OFFSET)[:, None] * width + column[None, :]
    in_tile = exists[:, None] & inside[None, :]
    tl.store(y + element, tl.where(empty, 0.0, largest).to(y.dtype.element_ty), mask=in_tile)
    tl.store(position + element, tl.where(empty, 0, winner).to(position.dtype.element_ty), mask=in_tile)


@triton.jit(do_not_specialize=["num_segments"])
def max_backward_rows(
    first,
    count,
    row,
    num_segments,
    num_blocks,
    blocks,
    indptr,
    indices,
    edge_ids,
    position,
    grad_y,
    grad_x,
    width,
    FINISH: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Compute the gradient of the sources of maxima.

    `grad_x_u` is the sum of `grad_y_v` over the edges (u, v) that gave the maximum of v.

    The kernel reads the transposed edges.

    Args:
        first: First entry of each segment, [S].
        count: Number of entries of each segment, [S].
        row: Row of each segment, [S].
        num_segments: Number of segments.
        num_blocks: Number of blocks of columns.
        blocks: Head, first column and end of each block of columns, int32 [B, 3].
        indptr: First entry of each row of the forward edges.
        indices: Target of each transposed edge.
        edge_ids: Forward edge of each transposed edge.
        position: Positions of the maxima.
        grad_y: Gradient of the maxima.
        grad_x: Gradient of sources, by row, or by segment unless FINISH.
        width: Number of columns.
        FINISH: True if segments are whole rows.
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        R: Segments of a program.
        K: Entries of a segment that are processed side by side.
        C: Columns of a program.
        ALIGN: Power of two that divides all bounds of columns.
    """
    block, segment, exists, source, begin, length = segments_of(first, count, row, num_segments, num_blocks, R)
    _, column, inside = columns_of(blocks, block, C, ALIGN)
    lanes = tl.zeros([R, K, C], ACC)
    for done in range(0, tl.max(length), K):
        at, live = entries_of(begin, length, done, K)
        target = tl.load(indices + at, mask=live, other=0)
        entry_position = tl.load(edge_ids + at, mask=live, other=0) - tl.load(indptr + target, mask=live, other=0)
        mask = live[:, :, None] & inside[None, None, :]
        of_row = target.to(OFFSET)[:, :, None] * width + column[None, None, :]
        is_maximum = tl.load(position + of_row, mask=mask, other=-1) == entry_position[:, :, None]
        lanes += tl.load(grad_y + of_row, mask=mask & is_maximum, other=0.0).to(ACC)
    out = source if FINISH else segment
    element = out.to(OFFSET)[:, None] * width + column[None, :]
    in_tile = exists[:, None] & inside[None, :]
    tl.store(grad_x + element, tl.sum(lanes, 1).to(grad_x.dtype.element_ty), mask=in_tile)
