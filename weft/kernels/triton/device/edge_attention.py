"""Attention whose logits are numbers by edge: the logits, their weights, and the gradients; see `csrc/pairs.h`.

What is by edge goes over edges in their order, [E], each with its source and target; then, by the same kernels, over
the loops of targets, [n], of which `loop` says whether there is one.
"""

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


@triton.jit
def ends_of(sources, targets, loop, num_edges, block, B: tl.constexpr):
    """Of a block of edges [B] numbers, sources and targets, which are in range, and which there are."""
    edge = block * B + tl.arange(0, B)
    valid = edge < num_edges
    live = valid
    if loop is not None:
        live = valid & (tl.load(loop + edge, mask=valid, other=0) != 0)
    return edge, tl.load(sources + edge, mask=valid, other=0), tl.load(targets + edge, mask=valid, other=0), valid, live


@triton.jit
def add_features(z, features, edge_map, num_features, width, edge, live, column, inside, OFFSET: tl.constexpr):
    """z and `features_e edge_map`; edges and columns are broadcast against each other."""
    if features is not None:
        for feature in range(num_features):
            known = tl.load(features + edge.to(OFFSET) * num_features + feature, mask=live, other=0.0)
            z += known.to(z.dtype) * tl.load(edge_map + feature * width + column, mask=inside, other=0.0).to(z.dtype)
    return z


@triton.jit(do_not_specialize=["num_edges"])
def pair_logits(
    sources,
    targets,
    loop,
    num_edges,
    left,
    right,
    attention,
    features,
    edge_map,
    num_features,
    bounds,
    slope: tl.float64,
    logits,
    width,
    H: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """`logits_ej`, the sum over head j's columns of `attention leaky_relu(left_u + right_v + features_e edge_map)`."""
    head = tl.program_id(0) % H
    edge, source, target, valid, live = ends_of(sources, targets, loop, num_edges, tl.program_id(0) // H, B)
    incline = tl.full((), slope, ACC)
    total = tl.zeros([B], ACC)
    start, end = range_of(bounds, head, ALIGN)
    for begin in range(start, end, C):
        column = begin + tl.arange(0, C)[None, :]
        inside = column < end
        mask = live[:, None] & inside
        z = tl.load(left + source.to(OFFSET)[:, None] * width + column, mask=mask, other=0.0).to(ACC)
        z += tl.load(right + target.to(OFFSET)[:, None] * width + column, mask=mask, other=0.0).to(ACC)
        z = add_features(
            z, features, edge_map, num_features, width, edge[:, None], live[:, None], column, inside, OFFSET
        )
        z = leaky_relu(z, incline) * tl.load(attention + column, mask=inside, other=0.0).to(ACC)
        total += tl.sum(tl.where(mask, z, 0.0), 1)
    tl.store(logits + edge.to(OFFSET) * H + head, total.to(logits.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_segments", "num_loops"])
def pair_rows(
    first,
    count,
    row,
    num_segments,
    num_blocks,
    blocks,
    indices,
    edge_ids,
    own_rows,
    other_rows,
    attention,
    features,
    edge_map,
    num_features,
    slope: tl.float64,
    grad_logits,
    loop,
    num_loops,
    loop_features,
    loop_grads,
    totals,
    y,
    width,
    FINISH: tl.constexpr,
    H: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The gradient of the rows of one end of the edges, own_rows, to `y`; unless `FINISH`: its sums over segments.

    edge_ids: of the entries; None: they are edges. totals: sums of hubs, in the place of entries.
    """
    block, segment, exists, target, begin, length = segments_of(first, count, row, num_segments, num_blocks, R)
    head, column, inside = columns_of(blocks, block, C, ALIGN)
    incline = tl.full((), slope, ACC)
    there = exists[:, None] & inside[None, :]
    place = target.to(OFFSET)[:, None] * width + column[None, :]
    of_segment = segment.to(OFFSET)[:, None] * width + column[None, :]
    own = tl.load(own_rows + place, mask=there, other=0.0).to(ACC)
    if totals is None:
        lanes = tl.zeros([R, K, C], ACC)
        for done in range(0, tl.max(length), K):
            at, live = entries_of(begin, length, done, K)
            other = tl.load(indices + at, mask=live, other=0)
            edge = at
            if edge_ids is not None:
                edge = tl.load(edge_ids + at, mask=live, other=0)
            mask = live[:, :, None] & inside[None, None, :]
            of_row = other.to(OFFSET)[:, :, None] * width + column[None, None, :]
            z = own[:, None, :] + tl.load(other_rows + of_row, mask=mask, other=0.0).to(ACC)
            z = add_features(
                z,
                features,
                edge_map,
                num_features,
                width,
                edge[:, :, None],
                live[:, :, None],
                column[None, None, :],
                inside[None, None, :],
                OFFSET,
            )
            grad = tl.load(grad_logits + edge.to(OFFSET) * H + head, mask=live, other=0.0).to(ACC)
            lanes += grad[:, :, None] * tl.where(z > 0, 1.0, incline)
        total = tl.sum(lanes, 1)
    else:
        total = tl.load(totals + of_segment, mask=there, other=0.0)
    if not FINISH:
        tl.store(y + of_segment, total, mask=there)
    else:
        if loop is not None:
            could = exists & (target < num_loops)
            has_loop = could & (tl.load(loop + target, mask=could, other=0) != 0)
            mask = has_loop[:, None] & inside[None, :]
            z = own + tl.load(other_rows + place, mask=mask, other=0.0).to(ACC)
            z = add_features(
                z,
                loop_features,
                edge_map,
                num_features,
                width,
                target[:, None],
                has_loop[:, None],
                column[None, :],
                inside[None, :],
                OFFSET,
            )
            grad = tl.load(loop_grads + target.to(OFFSET) * H + head, mask=has_loop, other=0.0).to(ACC)
            total += grad[:, None] * tl.where(z > 0, 1.0, incline)
        total *= tl.load(attention + column, mask=inside, other=0.0).to(ACC)[None, :]
        tl.store(y + place, total.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_edges", "num_programs"])
def pair_sums(
    sources,
    targets,
    loop,
    num_edges,
    num_programs,
    num_blocks,
    blocks,
    left,
    right,
    features,
    edge_map,
    num_features,
    slope: tl.float64,
    grad_logits,
    parts,
    width,
    FEATURES: tl.constexpr,
    H: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Each program's part of two sums over edges, parts [P, 1 + num_features, width].

    The gradient of attention, and that of edge_map but for the factor attention. A program has every P-th block.
    """
    program = tl.program_id(0) % num_programs
    block = tl.program_id(0) // num_programs % num_blocks
    feature = tl.program_id(0) // num_programs // num_blocks * FEATURES + tl.arange(0, FEATURES)
    head, column, inside = columns_of(blocks, block, C, ALIGN)
    incline = tl.full((), slope, ACC)
    of_attention = tl.zeros([C], ACC)
    of_map = tl.zeros([FEATURES, C], ACC)
    for start in range(program, tl.cdiv(num_edges, B), num_programs):
        edge, source, target, _, live = ends_of(sources, targets, loop, num_edges, start, B)
        mask = live[:, None] & inside[None, :]
        z = tl.load(left + source.to(OFFSET)[:, None] * width + column[None, :], mask=mask, other=0.0).to(ACC)
        z += tl.load(right + target.to(OFFSET)[:, None] * width + column[None, :], mask=mask, other=0.0).to(ACC)
        z = add_features(
            z,
            features,
            edge_map,
            num_features,
            width,
            edge[:, None],
            live[:, None],
            column[None, :],
            inside[None, :],
            OFFSET,
        )
        grad = tl.load(grad_logits + edge.to(OFFSET) * H + head, mask=live, other=0.0).to(ACC)[:, None]
        slopes = grad * tl.where(z > 0, 1.0, incline)
        of_attention += tl.sum(slopes * z, 0)
        if features is not None:
            known_there = live[:, None] & (feature < num_features)[None, :]
            known = tl.load(
                features + edge.to(OFFSET)[:, None] * num_features + feature[None, :], mask=known_there, other=0.0
            )
            of_map += tl.sum(known.to(ACC)[:, :, None] * slopes[:, None, :], 0)
    of_part = parts + program.to(OFFSET) * (1 + num_features) * width
    tl.store(of_part + column, of_attention, mask=inside)
    if features is not None:
        there = (feature < num_features)[:, None] & inside[None, :]
        tl.store(of_part + (1 + feature)[:, None] * width + column[None, :], of_map, mask=there)


@triton.jit(do_not_specialize=["num_edges", "key", "first_head", "threshold"])
def edge_weights(
    sources,
    targets,
    loop,
    num_edges,
    logits,
    lse,
    alpha,
    source_ids,
    target_ids,
    copies,
    key,
    first_head: tl.uint32,
    threshold: tl.uint32,
    H: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """`alpha = exp(logit - lse of the target)`, its negative where dropout drops it (target_ids is not None)."""
    edge, source, target, valid, live = ends_of(sources, targets, loop, num_edges, tl.program_id(0), B)
    word = tl.zeros([B], tl.uint64)
    if target_ids is not None:
        word = edge_words(key, source_ids, target_ids, source, target, copies, edge, live)
    for begin in range(0, H, C):
        head = begin + tl.arange(0, C)[None, :]
        mask = live[:, None] & (head < H)
        place = edge.to(OFFSET)[:, None] * H + head
        logit = tl.load(logits + place, mask=mask, other=0.0).to(ACC)
        own = tl.load(lse + target.to(OFFSET)[:, None] * H + head, mask=mask, other=0.0)
        weight = tl.exp(tl.where(mask, logit - own, float("-inf")))
        if target_ids is not None:
            weight = tl.where(keeps(word[:, None], head, first_head, threshold), weight, -weight)
        tl.store(alpha + place, weight, mask=valid[:, None] & (head < H))


@triton.jit(do_not_specialize=["num_edges"])
def edge_dots(
    sources,
    targets,
    loop,
    num_edges,
    bounds,
    x,
    grad_y,
    alpha,
    grad,
    keep_scale: tl.float64,
    width,
    H: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Adds `grad_y_v . x_u` by edge and head to `grad`, times keep_scale, but where alpha is negative, so dropped."""
    head = tl.program_id(0) % H
    edge, source, target, _, live = ends_of(sources, targets, loop, num_edges, tl.program_id(0) // H, B)
    total = tl.zeros([B], ACC)
    start, end = range_of(bounds, head, ALIGN)
    for begin in range(start, end, C):
        column = begin + tl.arange(0, C)[None, :]
        mask = live[:, None] & (column < end)
        value = tl.load(x + source.to(OFFSET)[:, None] * width + column, mask=mask, other=0.0).to(ACC)
        total += tl.sum(value * tl.load(grad_y + target.to(OFFSET)[:, None] * width + column, mask=mask, other=0.0), 1)
    place = edge.to(OFFSET) * H + head
    dropped = tl.load(alpha + place, mask=live, other=0.0) < 0
    total = tl.where(dropped, 0.0, total * tl.full((), keep_scale, ACC))
    tl.store(grad + place, tl.load(grad + place, mask=live, other=0.0) + total, mask=live)
