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
    own,
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
    """`y_r = row_scale_r * sum_e weight_e neighbour_scale_u x_u + loop_scale_r own_r`, by head, without what is None.

    weight [E, H] by edge id, where `DROPPED` what is negative counts as 0 and the rest is multiplied by keep_scale;
    loop_scale [num_loops, H] likewise. indices None: u is the entry itself. Unless `FINISH`: sums alone, by segment.
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
    there = exists[:, None] & inside[None, :]
    if FINISH:
        place = target.to(OFFSET)[:, None] * width + column[None, :]
        if row_scale is not None:
            total *= tl.load(row_scale + target, mask=exists, other=0.0).to(ACC)[:, None]
        if loop_scale is not None:
            has_loop = exists & (target < num_loops)
            factor = tl.load(loop_scale + target.to(OFFSET) * HEADS + head, mask=has_loop, other=0.0).to(ACC)
            if DROPPED:
                factor = tl.where(factor < 0, 0.0, factor * keep)
            total += tl.load(own + place, mask=has_loop[:, None] & inside[None, :], other=0.0).to(ACC) * factor[:, None]
        if ADD:
            total += tl.load(y + place, mask=there, other=0.0).to(ACC)
    else:
        place = segment.to(OFFSET)[:, None] * width + column[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=there)


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
    places,
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
    """The maximum and the place in its row where it is first met, by column; NaN wins. A row without entries has 0.

    TOTALS: entries are pieces of a hub, x their maxima and `places` the places of these. Unless `FINISH`: by segment.
    """
    block, segment, exists, target, begin, length = segments_of(first, count, row, num_segments, num_blocks, R)
    _, column, inside = columns_of(blocks, block, C, ALIGN)
    nowhere = 2147483647
    most = tl.full([R, K, C], float("-inf"), ACC)
    found = tl.full([R, K, C], nowhere, tl.int32)
    skipped = tl.zeros([R], tl.int32)
    if not TOTALS:
        skipped = (begin - tl.load(indptr + target, mask=exists, other=0)).to(tl.int32)
    for done in range(0, tl.max(length), K):
        at, live = entries_of(begin, length, done, K)
        source = at
        if not TOTALS:
            source = tl.load(indices + at, mask=live, other=0)
        mask = live[:, :, None] & inside[None, None, :]
        of_row = source.to(OFFSET)[:, :, None] * width + column[None, None, :]
        value = tl.load(x + of_row, mask=mask, other=0.0).to(ACC)
        if TOTALS:
            here = tl.load(places + of_row, mask=mask, other=0)
        else:
            here = (skipped[:, None] + done + tl.arange(0, K)[None, :])[:, :, None]
        wins = mask & ((value > most) | (found == nowhere) | ((value != value) & (most == most)))
        most = tl.where(wins, value, most)
        found = tl.where(wins, here, found)
    unordered = most != most
    any_unordered = tl.max(unordered.to(tl.int32), 1) > 0
    largest = tl.max(tl.where(unordered, float("-inf"), most), 1)
    best = tl.where(any_unordered[:, None, :], unordered, most == largest[:, None, :])
    winner = tl.min(tl.where(best, found, nowhere), 1)
    largest = tl.where(any_unordered, float("nan"), largest)
    empty = winner == nowhere
    out = target if FINISH else segment
    place = out.to(OFFSET)[:, None] * width + column[None, :]
    there = exists[:, None] & inside[None, :]
    tl.store(y + place, tl.where(empty, 0.0, largest).to(y.dtype.element_ty), mask=there)
    tl.store(position + place, tl.where(empty, 0, winner).to(position.dtype.element_ty), mask=there)


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
    """By the transpose: `grad_x_u`, the sum of `grad_y_v` by column where the maximum of v came by an edge from u.

    indptr: of the forward rows. Unless `FINISH`: by segment.
    """
    block, segment, exists, source, begin, length = segments_of(first, count, row, num_segments, num_blocks, R)
    _, column, inside = columns_of(blocks, block, C, ALIGN)
    lanes = tl.zeros([R, K, C], ACC)
    for done in range(0, tl.max(length), K):
        at, live = entries_of(begin, length, done, K)
        target = tl.load(indices + at, mask=live, other=0)
        here = tl.load(edge_ids + at, mask=live, other=0) - tl.load(indptr + target, mask=live, other=0)
        mask = live[:, :, None] & inside[None, None, :]
        of_row = target.to(OFFSET)[:, :, None] * width + column[None, None, :]
        won = tl.load(position + of_row, mask=mask, other=-1) == here[:, :, None]
        lanes += tl.load(grad_y + of_row, mask=mask & won, other=0.0).to(ACC)
    out = source if FINISH else segment
    place = out.to(OFFSET)[:, None] * width + column[None, :]
    there = exists[:, None] & inside[None, :]
    tl.store(grad_x + place, tl.sum(lanes, 1).to(grad_x.dtype.element_ty), mask=there)
