"""Attention whose logits are a term of the source plus a term of the target. Formulas: `csrc/attend.h`."""

import triton
import triton.language as tl

from weft.kernels.triton.device.common import (
    columns_of,
    edge_words,
    entries_of,
    keeps,
    leaky_relu,
    range_of,
    segments_of,
)


@triton.jit(do_not_specialize=["num_segments"])
def softmax_rows(
    first,
    count,
    row,
    num_segments,
    num_blocks,
    blocks,
    indices,
    logit_src,
    logit_dst,
    logits,
    loop,
    loop_logits,
    slope: tl.float64,
    largest,
    sums,
    shares,
    largest_of_piece,
    sum_of_piece,
    share_of_piece,
    FINISH: tl.constexpr,
    TOTALS: tl.constexpr,
    H: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Compute the statistics of the softmax over the entries of each row, by head (a column is a head).

    Each lane keeps the largest logit so far, and the sum of `exp(logit - largest)`, which it rescales when a larger
    logit arrives. At the end, the lanes are rescaled to the largest logit of the row and added.

    Args:
        first: First entry of each segment, [S].
        count: Number of entries of each segment, [S].
        row: Row of each segment, [S].
        num_segments: Number of segments.
        num_blocks: Number of blocks of columns.
        blocks: Head, first column and end of each block of columns, int32 [B, 3].
        indices: Source of each entry.
        logit_src: Logits of sources, [s, H].
        logit_dst: Logits of targets, [n, H].
        logits: Logits of entries, [E, H]; None: leaky_relu(logit_src + logit_dst).
        loop: Mask of rows that have a self-loop, uint8; None: no row.
        loop_logits: Logits of self-loops, [n, H]; None: computed as those of entries.
        slope: Negative slope of leaky_relu.
        largest: Result: lse, the logarithm of the softmax's denominator, by row; the largest logit by segment unless
            FINISH.
        sums: Result unless FINISH: sum of exp(logit - largest) by segment.
        shares: Result: share of the denominator with positive arguments of leaky_relu by row; their sum by segment
            unless FINISH.
        largest_of_piece: With TOTALS: largest logit of each piece.
        sum_of_piece: With TOTALS: sum of each piece.
        share_of_piece: With TOTALS: sum with positive arguments of each piece.
        FINISH: True to compute final results of rows; False to write intermediate sums of segments.
        TOTALS: True if entries are the pieces of hubs.
        H: Number of heads.
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        R: Segments of a program.
        K: Entries of a segment that are processed side by side.
        C: Columns of a program.
        ALIGN: Power of two that divides all bounds of columns.
    """
    block, segment, exists, target, begin, length = segments_of(first, count, row, num_segments, num_blocks, R)
    _, head, inside = columns_of(blocks, block, C, ALIGN)
    incline = tl.full((), slope, ACC)
    below = float("-inf")
    of_target = target.to(OFFSET)[:, None] * H + head[None, :]
    in_tile = exists[:, None] & inside[None, :]
    target_logit = tl.zeros([R, C], ACC)
    if logit_dst is not None:
        target_logit = tl.load(logit_dst + of_target, mask=in_tile, other=0.0).to(ACC)
    largest_by_lane = tl.full([R, K, C], below, ACC)
    total = tl.zeros([R, K, C], ACC)
    share = tl.zeros([R, K, C], ACC)
    for done in range(0, tl.max(length), K):
        at, live = entries_of(begin, length, done, K)
        mask = live[:, :, None] & inside[None, None, :]
        of_entry = at.to(OFFSET)[:, :, None] * H + head[None, None, :]
        if TOTALS:
            logit = tl.load(largest_of_piece + of_entry, mask=mask, other=below)
            positive = mask
        elif logits is not None:
            logit = tl.load(logits + of_entry, mask=mask, other=below).to(ACC)
            positive = mask
        else:
            source = tl.load(indices + at, mask=live, other=0)
            of_source = source.to(OFFSET)[:, :, None] * H + head[None, None, :]
            argument = tl.load(logit_src + of_source, mask=mask, other=below).to(ACC) + target_logit[:, None, :]
            logit = leaky_relu(argument, incline)
            positive = argument > 0
        now = tl.maximum(largest_by_lane, logit)
        shift = tl.where(now == below, 0.0, now)
        factor = tl.exp(largest_by_lane - shift)
        power = tl.exp(logit - shift)
        if TOTALS:
            total = total * factor + power * tl.load(sum_of_piece + of_entry, mask=mask, other=0.0)
            share = share * factor + power * tl.load(share_of_piece + of_entry, mask=mask, other=0.0)
        else:
            total = total * factor + power
            share = share * factor + tl.where(positive, power, 0.0)
        largest_by_lane = now
    row_largest = tl.max(largest_by_lane, 1)
    loop_logit = target_logit
    loop_positive = in_tile
    if FINISH and loop is not None:
        has_loop = (tl.load(loop + target, mask=exists, other=0) != 0)[:, None] & in_tile
        if loop_logits is not None:
            loop_logit = tl.load(loop_logits + of_target, mask=has_loop, other=below).to(ACC)
        else:
            argument = tl.load(logit_src + of_target, mask=has_loop, other=below).to(ACC) + target_logit
            loop_logit = leaky_relu(argument, incline)
            loop_positive = argument > 0
        row_largest = tl.maximum(row_largest, loop_logit)
    shift = tl.where(row_largest == below, 0.0, row_largest)
    factor = tl.exp(largest_by_lane - shift[:, None, :])
    all_sum = tl.sum(total * factor, 1)
    all_share = tl.sum(share * factor, 1)
    if FINISH and loop is not None:
        power = tl.exp(loop_logit - shift)
        all_sum += power
        all_share += tl.where(loop_positive, power, 0.0)
    if FINISH:
        nothing = all_sum == 0
        tl.store(
            largest + of_target, tl.where(nothing, 0.0, shift + tl.log(tl.where(nothing, 1.0, all_sum))), mask=in_tile
        )
        tl.store(shares + of_target, all_share / tl.where(nothing, 1.0, all_sum), mask=in_tile)
    else:
        element = segment.to(OFFSET)[:, None] * H + head[None, :]
        tl.store(largest + element, row_largest, mask=in_tile)
        tl.store(sums + element, all_sum, mask=in_tile)
        tl.store(shares + element, all_share, mask=in_tile)


@triton.jit(do_not_specialize=["num_segments", "num_loops", "key", "first_head", "threshold"])
def attend_rows(
    first,
    count,
    row,
    num_segments,
    num_blocks,
    blocks,
    indices,
    own_logits,
    other_logits,
    lse,
    dot,
    loop,
    num_loops,
    slope: tl.float64,
    x,
    own_rows,
    partial,
    totals,
    y,
    plus,
    dots,
    width,
    source_ids,
    target_ids,
    copies,
    key,
    first_head: tl.uint32,
    threshold: tl.uint32,
    keep_scale: tl.float64,
    TRANSPOSED: tl.constexpr,
    PLUS: tl.constexpr,
    FINISH: tl.constexpr,
    ADD: tl.constexpr,
    H: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Compute sums of the rows of x weighted by the attention alpha, for targets, or if TRANSPOSED for sources.

    Forward, x is h and the sum is the result y. Transposed, x is grad_y and the sum is the gradient of h. With e = (u,
    v), `alpha_e = exp(leaky_relu(logit_u + logit_v) - lse_v)`, under dropout if target_ids is given.

    With PLUS, the kernel also computes the same sum over the edges with positive arguments of leaky_relu. Forward, it
    is written to `plus`. Transposed, both sums give the gradient of the logits of sources: with s the slope, it is
    `own_row . (s * sum + (1 - s) * positive sum)` minus the sum of `alpha_e leaky_relu'(e) dot_v`.

    Args:
        first: First entry of each segment, [S].
        count: Number of entries of each segment, [S].
        row: Row of each segment, [S].
        num_segments: Number of segments.
        num_blocks: Number of blocks of columns.
        blocks: Head, first column and end of each block of columns, int32 [B, 3].
        indices: Column of each entry (source of each edge).
        own_logits: Logits of the rows.
        other_logits: Logits of the entries.
        lse: Logarithm of the softmax's denominator of each target, [n, H].
        dot: `grad_y . y` of each target, [n, H]; used if PLUS and TRANSPOSED.
        loop: Mask of rows that have a self-loop, uint8; None: no row.
        num_loops: Number of rows that `loop` covers.
        slope: Negative slope of leaky_relu.
        x: Rows to sum.
        own_rows: Rows of h of the sources; used if PLUS and TRANSPOSED.
        partial: Result unless FINISH: sums, positive sums and dots by segment, [S, 2 width + B].
        totals: Sums of hubs in the form of `partial`, which replace the sums over entries; None: sum over entries.
        y: Result, [rows, width]; None: not needed.
        plus: Result if PLUS and not TRANSPOSED: sums over positive arguments.
        dots: Result if PLUS and TRANSPOSED: gradient of the logits of sources by block of columns, [s, B].
        width: Number of columns of all heads.
        source_ids: Global vertex id of each source.
        target_ids: Global vertex id of each target; None: no dropout.
        copies: Number of equal edges before each edge in its row; None: no duplicate edges.
        key: Address of the random key of 64 bits.
        first_head: Global number of the first head.
        threshold: Edges whose 32 random bits are below it are dropped.
        keep_scale: Factor of weights that are not dropped.
        TRANSPOSED: True if rows are sources and entries targets.
        PLUS: True to compute the sums over positive arguments too.
        FINISH: True to compute final results of rows; False to write intermediate sums of segments.
        ADD: True to add to y.
        H: Number of heads.
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        R: Segments of a program.
        K: Entries of a segment that are processed side by side.
        C: Columns of a program.
        ALIGN: Power of two that divides all bounds of columns.
    """
    block, segment, exists, target, begin, length = segments_of(first, count, row, num_segments, num_blocks, R)
    head, column, inside = columns_of(blocks, block, C, ALIGN)
    incline = tl.full((), slope, ACC)
    keep = tl.full((), keep_scale, ACC)
    of_target = target.to(OFFSET) * H + head
    row_logit = tl.load(own_logits + of_target, mask=exists, other=0.0).to(ACC)
    in_tile = exists[:, None] & inside[None, :]
    stride = 2 * width + num_blocks
    of_segment = segment.to(OFFSET) * stride
    if totals is None:
        own_lse = tl.zeros([R], ACC)
        if not TRANSPOSED:
            own_lse = tl.load(lse + of_target, mask=exists, other=0.0)
        lanes = tl.zeros([R, K, C], ACC)
        plus_lanes = tl.zeros([R, K, C], ACC)
        rest_lanes = tl.zeros([R, K], ACC)
        for done in range(0, tl.max(length), K):
            at, live = entries_of(begin, length, done, K)
            other = tl.load(indices + at, mask=live, other=0)
            of_other = other.to(OFFSET) * H + head
            argument = row_logit[:, None] + tl.load(other_logits + of_other, mask=live, other=0.0).to(ACC)
            other_lse = tl.load(lse + of_other, mask=live, other=0.0) if TRANSPOSED else own_lse[:, None]
            weight = tl.exp(tl.where(live, leaky_relu(argument, incline) - other_lse, float("-inf")))
            if TRANSPOSED and PLUS:  # before dropout: the softmax normalizes all weights
                other_dot = tl.load(dot + of_other, mask=live, other=0.0)
                rest_lanes += weight * other_dot * tl.where(argument > 0, 1.0, incline)
            if target_ids is not None:
                if TRANSPOSED:
                    word = edge_words(key, source_ids, target_ids, target[:, None], other, copies, at, live)
                else:
                    word = edge_words(key, source_ids, target_ids, other, target[:, None], copies, at, live)
                weight = tl.where(keeps(word, head, first_head, threshold), weight * keep, 0.0)
            of_row = other.to(OFFSET)[:, :, None] * width + column[None, None, :]
            value = tl.load(x + of_row, mask=live[:, :, None] & inside[None, None, :], other=0.0).to(ACC)
            lanes += value * weight[:, :, None]
            if PLUS:
                plus_lanes += value * tl.where(argument > 0, weight, 0.0)[:, :, None]
        result = tl.sum(lanes, 1)
        positive = tl.sum(plus_lanes, 1)
        rest = tl.sum(rest_lanes, 1)
    else:
        of_columns = of_segment[:, None] + column[None, :]
        result = tl.load(totals + of_columns, mask=in_tile, other=0.0)
        positive = tl.load(totals + of_columns + width, mask=in_tile, other=0.0)
        rest = tl.load(totals + of_segment + 2 * width + block, mask=exists, other=0.0)
    if not FINISH:
        of_columns = of_segment[:, None] + column[None, :]
        tl.store(partial + of_columns, result, mask=in_tile)
        tl.store(partial + of_columns + width, positive, mask=in_tile)
        tl.store(partial + of_segment + 2 * width + block, rest, mask=exists)
    else:
        element = target.to(OFFSET)[:, None] * width + column[None, :]
        if loop is not None:
            could = exists & (target < num_loops)
            has_loop = could & (tl.load(loop + target, mask=could, other=0) != 0)
            argument = row_logit + tl.load(other_logits + of_target, mask=has_loop, other=0.0).to(ACC)
            other_lse = tl.load(lse + of_target, mask=has_loop, other=0.0)
            weight = tl.exp(tl.where(has_loop, leaky_relu(argument, incline) - other_lse, float("-inf")))
            if TRANSPOSED and PLUS:
                other_dot = tl.load(dot + of_target, mask=has_loop, other=0.0)
                rest += weight * other_dot * tl.where(argument > 0, 1.0, incline)
            if target_ids is not None:
                word = edge_words(key, source_ids, target_ids, target, target, None, begin, has_loop)
                weight = tl.where(keeps(word, head, first_head, threshold), weight * keep, 0.0)
            value = tl.load(x + element, mask=has_loop[:, None] & inside[None, :], other=0.0).to(ACC)
            result += value * weight[:, None]
            if PLUS:
                positive += value * tl.where(argument > 0, weight, 0.0)[:, None]
        if PLUS and TRANSPOSED:
            own_row = tl.load(own_rows + element, mask=in_tile, other=0.0).to(ACC)
            mixed = tl.sum(own_row * (result * incline + positive * (1 - incline)), 1)
            begins = column_begins(blocks, block, head)
            tl.store(dots + target.to(OFFSET) * num_blocks + block, mixed - rest * begins, mask=exists)
        if PLUS and not TRANSPOSED:
            tl.store(plus + element, positive.to(plus.dtype.element_ty), mask=in_tile)
        if y is not None:
            if ADD:
                result += tl.load(y + element, mask=in_tile, other=0.0).to(ACC)
            tl.store(y + element, result.to(y.dtype.element_ty), mask=in_tile)


@triton.jit
def column_begins(blocks, block, head):
    """Return 1 for the first block of a head, else 0. The first block alone counts terms that do not depend on columns.

    Args:
        blocks: Head, first column and end of each block of columns, int32 [B, 3].
        block: Number of the block.
        head: Head of the block.
    """
    before = tl.load(blocks + (block - 1) * 3, mask=block > 0, other=-1)
    return (before != head).to(tl.int32)


@triton.jit(do_not_specialize=["num_targets"])
def attend_stats(
    bounds,
    grad_y,
    y,
    plus,
    share,
    slope: tl.float64,
    dot,
    grad_logit_dst,
    num_targets,
    width,
    H: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Compute `dot = grad_y . y` by target and head, and add the gradient of the targets' logits.

    The gradient is `(1 - slope) * (grad_y . plus - share * dot)`, where plus is the part of y from positive arguments
    of leaky_relu, and share is the share of the softmax's denominator with positive arguments.

    Args:
        bounds: First column of each head, and the end of the last, int32 [H + 1].
        grad_y: Gradient of the result.
        y: Result.
        plus: Part of the result from edges with positive arguments of leaky_relu.
        share: Share of the softmax's denominator with positive arguments, [n, H].
        slope: Negative slope of leaky_relu.
        dot: Result, [n, H].
        grad_logit_dst: Gradient of the targets' logits, [n, H], to which is added.
        num_targets: Number of targets.
        width: Number of columns of all heads.
        H: Number of heads.
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        B: Targets of a program.
        C: Columns of a program.
        ALIGN: Power of two that divides all bounds of columns.
    """
    head = tl.program_id(0) % H
    target = tl.program_id(0) // H * B + tl.arange(0, B)
    exists = target < num_targets
    start, end = range_of(bounds, head, ALIGN)
    everywhere = tl.zeros([B], ACC)
    positive = tl.zeros([B], ACC)
    for begin in range(start, end, C):
        column = begin + tl.arange(0, C)
        element = target.to(OFFSET)[:, None] * width + column[None, :]
        mask = exists[:, None] & (column < end)[None, :]
        grad = tl.load(grad_y + element, mask=mask, other=0.0).to(ACC)
        everywhere += tl.sum(grad * tl.load(y + element, mask=mask, other=0.0).to(ACC), 1)
        positive += tl.sum(grad * tl.load(plus + element, mask=mask, other=0.0).to(ACC), 1)
    at = target.to(OFFSET) * H + head
    tl.store(dot + at, everywhere, mask=exists)
    incline = tl.full((), slope, ACC)
    grad_logit = (1 - incline) * (positive - everywhere * tl.load(share + at, mask=exists, other=0.0))
    grad_logit += tl.load(grad_logit_dst + at, mask=exists, other=0.0).to(ACC)
    tl.store(grad_logit_dst + at, grad_logit.to(grad_logit_dst.dtype.element_ty), mask=exists)
