"""Attention whose logits are sums of a number of the source and one of the target, by head; see `csrc/attend.h`."""

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
    most_of_piece,
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
    """`lse`, the logarithm of the sum of exp(logit) by row and head, and the share whose argument is positive.

    The columns are heads. Logits are `logits` [E, H], or None: of both ends. `FINISH`: lse goes to `largest`, the share
    to `shares`; else the largest logit, and the sums relative to it, by segment. TOTALS: entries are pieces.
    """
    block, segment, exists, target, begin, length = segments_of(first, count, row, num_segments, num_blocks, R)
    _, head, inside = columns_of(blocks, block, C, ALIGN)
    incline = tl.full((), slope, ACC)
    below = float("-inf")
    of_target = target.to(OFFSET)[:, None] * H + head[None, :]
    there = exists[:, None] & inside[None, :]
    own = tl.zeros([R, C], ACC)
    if logit_dst is not None:
        own = tl.load(logit_dst + of_target, mask=there, other=0.0).to(ACC)
    most = tl.full([R, K, C], below, ACC)
    total = tl.zeros([R, K, C], ACC)
    share = tl.zeros([R, K, C], ACC)
    for done in range(0, tl.max(length), K):
        at, live = entries_of(begin, length, done, K)
        mask = live[:, :, None] & inside[None, None, :]
        of_entry = at.to(OFFSET)[:, :, None] * H + head[None, None, :]
        if TOTALS:
            logit = tl.load(most_of_piece + of_entry, mask=mask, other=below)
            positive = mask
        elif logits is not None:
            logit = tl.load(logits + of_entry, mask=mask, other=below).to(ACC)
            positive = mask
        else:
            source = tl.load(indices + at, mask=live, other=0)
            of_source = source.to(OFFSET)[:, :, None] * H + head[None, None, :]
            argument = tl.load(logit_src + of_source, mask=mask, other=below).to(ACC) + own[:, None, :]
            logit = leaky_relu(argument, incline)
            positive = argument > 0
        now = tl.maximum(most, logit)
        shift = tl.where(now == below, 0.0, now)
        factor = tl.exp(most - shift)
        power = tl.exp(logit - shift)
        if TOTALS:
            total = total * factor + power * tl.load(sum_of_piece + of_entry, mask=mask, other=0.0)
            share = share * factor + power * tl.load(share_of_piece + of_entry, mask=mask, other=0.0)
        else:
            total = total * factor + power
            share = share * factor + tl.where(positive, power, 0.0)
        most = now
    top = tl.max(most, 1)
    own_logit = own
    own_positive = there
    if FINISH and loop is not None:
        has_loop = (tl.load(loop + target, mask=exists, other=0) != 0)[:, None] & there
        if loop_logits is not None:
            own_logit = tl.load(loop_logits + of_target, mask=has_loop, other=below).to(ACC)
        else:
            argument = tl.load(logit_src + of_target, mask=has_loop, other=below).to(ACC) + own
            own_logit = leaky_relu(argument, incline)
            own_positive = argument > 0
        top = tl.maximum(top, own_logit)
    shift = tl.where(top == below, 0.0, top)
    factor = tl.exp(most - shift[:, None, :])
    all_sum = tl.sum(total * factor, 1)
    all_share = tl.sum(share * factor, 1)
    if FINISH and loop is not None:
        power = tl.exp(own_logit - shift)
        all_sum += power
        all_share += tl.where(own_positive, power, 0.0)
    if FINISH:
        nothing = all_sum == 0
        tl.store(
            largest + of_target, tl.where(nothing, 0.0, shift + tl.log(tl.where(nothing, 1.0, all_sum))), mask=there
        )
        tl.store(shares + of_target, all_share / tl.where(nothing, 1.0, all_sum), mask=there)
    else:
        place = segment.to(OFFSET)[:, None] * H + head[None, :]
        tl.store(largest + place, top, mask=there)
        tl.store(sums + place, all_sum, mask=there)
        tl.store(shares + place, all_share, mask=there)


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
    """Sums of rows x weighted by attention's alpha, those of targets, or, `TRANSPOSED`, of sources: the gradient of h.

    alpha_e = exp(leaky_relu(own + other) - lse of the target), under dropout if target_ids is not None. `PLUS`: also
    the same sum where leaky_relu's argument is positive: forward written to `plus`; transposed, with `dot` [n, H] and
    the sources' own rows, it gives the gradient of the logits of sources, [s, B] by block, in `dots`. Unless `FINISH`:
    the sums go to `partial` [segments, 2 width + B]. totals: such sums of hubs, in the place of entries.
    """
    block, segment, exists, target, begin, length = segments_of(first, count, row, num_segments, num_blocks, R)
    head, column, inside = columns_of(blocks, block, C, ALIGN)
    incline = tl.full((), slope, ACC)
    keep = tl.full((), keep_scale, ACC)
    of_target = target.to(OFFSET) * H + head
    own = tl.load(own_logits + of_target, mask=exists, other=0.0).to(ACC)
    there = exists[:, None] & inside[None, :]
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
            argument = own[:, None] + tl.load(other_logits + of_other, mask=live, other=0.0).to(ACC)
            the_lse = tl.load(lse + of_other, mask=live, other=0.0) if TRANSPOSED else own_lse[:, None]
            weight = tl.exp(tl.where(live, leaky_relu(argument, incline) - the_lse, float("-inf")))
            if TRANSPOSED and PLUS:
                known = tl.load(dot + of_other, mask=live, other=0.0)
                rest_lanes += weight * known * tl.where(argument > 0, 1.0, incline)
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
        result = tl.load(totals + of_columns, mask=there, other=0.0)
        positive = tl.load(totals + of_columns + width, mask=there, other=0.0)
        rest = tl.load(totals + of_segment + 2 * width + block, mask=exists, other=0.0)
    if not FINISH:
        of_columns = of_segment[:, None] + column[None, :]
        tl.store(partial + of_columns, result, mask=there)
        tl.store(partial + of_columns + width, positive, mask=there)
        tl.store(partial + of_segment + 2 * width + block, rest, mask=exists)
    else:
        place = target.to(OFFSET)[:, None] * width + column[None, :]
        if loop is not None:
            could = exists & (target < num_loops)
            has_loop = could & (tl.load(loop + target, mask=could, other=0) != 0)
            argument = own + tl.load(other_logits + of_target, mask=has_loop, other=0.0).to(ACC)
            the_lse = tl.load(lse + of_target, mask=has_loop, other=0.0)
            weight = tl.exp(tl.where(has_loop, leaky_relu(argument, incline) - the_lse, float("-inf")))
            if TRANSPOSED and PLUS:
                known = tl.load(dot + of_target, mask=has_loop, other=0.0)
                rest += weight * known * tl.where(argument > 0, 1.0, incline)
            if target_ids is not None:
                word = edge_words(key, source_ids, target_ids, target, target, None, begin, has_loop)
                weight = tl.where(keeps(word, head, first_head, threshold), weight * keep, 0.0)
            value = tl.load(x + place, mask=has_loop[:, None] & inside[None, :], other=0.0).to(ACC)
            result += value * weight[:, None]
            if PLUS:
                positive += value * tl.where(argument > 0, weight, 0.0)[:, None]
        if PLUS and TRANSPOSED:
            mine = tl.load(own_rows + place, mask=there, other=0.0).to(ACC)
            mixed = tl.sum(mine * (result * incline + positive * (1 - incline)), 1)
            begins = column_begins(blocks, block, head)
            tl.store(dots + target.to(OFFSET) * num_blocks + block, mixed - rest * begins, mask=exists)
        if PLUS and not TRANSPOSED:
            tl.store(plus + place, positive.to(plus.dtype.element_ty), mask=there)
        if y is not None:
            if ADD:
                result += tl.load(y + place, mask=there, other=0.0).to(ACC)
            tl.store(y + place, result.to(y.dtype.element_ty), mask=there)


@triton.jit
def column_begins(blocks, block, head):
    """1 in the first block of a head, which alone counts what does not depend on the columns; else 0."""
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
    """By target and head `dot = grad_y . y`; adds the gradient of the target's logit to grad_logit_dst [n, H]."""
    head = tl.program_id(0) % H
    target = tl.program_id(0) // H * B + tl.arange(0, B)
    exists = target < num_targets
    start, end = range_of(bounds, head, ALIGN)
    everywhere = tl.zeros([B], ACC)
    positive = tl.zeros([B], ACC)
    for begin in range(start, end, C):
        column = begin + tl.arange(0, C)
        place = target.to(OFFSET)[:, None] * width + column[None, :]
        mask = exists[:, None] & (column < end)[None, :]
        grad = tl.load(grad_y + place, mask=mask, other=0.0).to(ACC)
        everywhere += tl.sum(grad * tl.load(y + place, mask=mask, other=0.0).to(ACC), 1)
        positive += tl.sum(grad * tl.load(plus + place, mask=mask, other=0.0).to(ACC), 1)
    at = target.to(OFFSET) * H + head
    tl.store(dot + at, everywhere, mask=exists)
    incline = tl.full((), slope, ACC)
    grad_logit = (1 - incline) * (positive - everywhere * tl.load(share + at, mask=exists, other=0.0))
    grad_logit += tl.load(grad_logit_dst + at, mask=exists, other=0.0).to(ACC)
    tl.store(grad_logit_dst + at, grad_logit.to(grad_logit_dst.dtype.element_ty), mask=exists)
