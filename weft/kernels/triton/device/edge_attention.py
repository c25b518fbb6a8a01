"""Attention with one logit per edge and head: logits, weights, and gradients. See `csrc/pairs.h`.

Kernels with `sources` and `targets` go over the edges in their order, [E]. A second launch of the same kernel goes over
the self-loops of targets, [n], of which `loop` is the mask.
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
def endpoints_of(sources, targets, loop, num_edges, block, B: tl.constexpr):
    """Return the edges of a block.

    Args:
        sources: Source of each edge.
        targets: Target of each edge.
        loop: Mask of self-loops that exist, uint8; None: all edges exist.
        num_edges: Number of edges.
        block: Number of the block.
        B: Edges of a program.

    Returns:
        Numbers, sources and targets of the edges, a mask of numbers in range, and a mask of edges that exist, [B] each.
    """
    edge = block * B + tl.arange(0, B)
    valid = edge < num_edges
    live = valid
    if loop is not None:
        live = valid & (tl.load(loop + edge, mask=valid, other=0) != 0)
    return edge, tl.load(sources + edge, mask=valid, other=0), tl.load(targets + edge, mask=valid, other=0), valid, live


@triton.jit
def add_features(z, features, edge_map, num_features, width, edge, live, column, inside, OFFSET: tl.constexpr):
    """Return `z + features_e edge_map`. Edges and columns are broadcast against each other.

    Args:
        z: Block of sums.
        features: Features of edges, [E, num_features]; None: no features.
        edge_map: Linear transform of features, [num_features, W].
        num_features: Number of features.
        width: Number of columns of all heads.
        edge: Number of each edge.
        live: Mask of edges that exist.
        column: Numbers of the columns.
        inside: Mask of columns that exist.
        OFFSET: Integer type of offsets into tensors.
    """
    if features is not None:
        for feature in range(num_features):
            value = tl.load(features + edge.to(OFFSET) * num_features + feature, mask=live, other=0.0)
            z += value.to(z.dtype) * tl.load(edge_map + feature * width + column, mask=inside, other=0.0).to(z.dtype)
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
    """Compute the logits of edges, by head.

    The logit of head j is the sum over its columns of `attention * leaky_relu(left_u + right_v + features_e edge_map)`.

    Args:
        sources: Source of each edge.
        targets: Target of each edge.
        loop: Mask of self-loops that exist, uint8; None: all edges exist.
        num_edges: Number of edges.
        left: Source rows, [s, W].
        right: Target rows, [n, W].
        attention: Attention vector, [W].
        features: Features of edges, [E, num_features]; None: no features.
        edge_map: Linear transform of features, [num_features, W].
        num_features: Number of features.
        bounds: First column of each head, and the end of the last, int32 [H + 1].
        slope: Negative slope of leaky_relu.
        logits: Result, [E, H].
        width: Number of columns of all heads.
        H: Number of heads.
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        B: Edges of a program.
        C: Columns of a program.
        ALIGN: Power of two that divides all bounds of columns.
    """
    head = tl.program_id(0) % H
    edge, source, target, valid, live = endpoints_of(sources, targets, loop, num_edges, tl.program_id(0) // H, B)
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
    """Compute the gradient of the rows of one endpoint of the edges.

    For each row it is `attention * sum_e grad_logits_e leaky_relu'(z_e)`, where z_e is the argument of leaky_relu.

    Args:
        first: First entry of each segment, [S].
        count: Number of entries of each segment, [S].
        row: Row of each segment, [S].
        num_segments: Number of segments.
        num_blocks: Number of blocks of columns.
        blocks: Head, first column and end of each block of columns, int32 [B, 3].
        indices: Column of each entry (source of each edge).
        edge_ids: Edge id of each entry; None: the number of the entry.
        own_rows: Rows whose gradient is computed.
        other_rows: Rows of the other endpoints.
        attention: Attention vector, [W].
        features: Features of edges, [E, num_features]; None: no features.
        edge_map: Linear transform of features, [num_features, W].
        num_features: Number of features.
        slope: Negative slope of leaky_relu.
        grad_logits: Gradient of the logits, [E, H].
        loop: Mask of rows that have a self-loop, uint8; None: no row.
        num_loops: Number of rows that `loop` covers.
        loop_features: Features of self-loops.
        loop_grads: Gradient of the logits of self-loops.
        totals: Sums of hubs, which replace the sums over entries; None: sum over entries.
        y: Gradient by row, or sums by segment unless FINISH.
        width: Number of columns of all heads.
        FINISH: True to compute final results of rows; False to write intermediate sums of segments.
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
    in_tile = exists[:, None] & inside[None, :]
    element = target.to(OFFSET)[:, None] * width + column[None, :]
    of_segment = segment.to(OFFSET)[:, None] * width + column[None, :]
    end_row = tl.load(own_rows + element, mask=in_tile, other=0.0).to(ACC)
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
            z = end_row[:, None, :] + tl.load(other_rows + of_row, mask=mask, other=0.0).to(ACC)
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
        total = tl.load(totals + of_segment, mask=in_tile, other=0.0)
    if not FINISH:
        tl.store(y + of_segment, total, mask=in_tile)
    else:
        if loop is not None:
            could = exists & (target < num_loops)
            has_loop = could & (tl.load(loop + target, mask=could, other=0) != 0)
            mask = has_loop[:, None] & inside[None, :]
            z = end_row + tl.load(other_rows + element, mask=mask, other=0.0).to(ACC)
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
        tl.store(y + element, total.to(y.dtype.element_ty), mask=in_tile)


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
    """Compute parts of two sums over all edges, for the gradients of attention and of edge_map.

    The second sum lacks the factor attention. A program processes every P-th block of edges, where P is the number of
    programs.

    A program processes every P-th block of edges, where P is the number of programs.

    Args:
        sources: Source of each edge.
        targets: Target of each edge.
        loop: Mask of self-loops that exist, uint8; None: all edges exist.
        num_edges: Number of edges.
        num_programs: Number of programs for each block of columns.
        num_blocks: Number of blocks of columns.
        blocks: Head, first column and end of each block of columns, int32 [B, 3].
        left: Source rows, [s, W].
        right: Target rows, [n, W].
        features: Features of edges, [E, num_features]; None: no features.
        edge_map: Linear transform of features, [num_features, W].
        num_features: Number of features.
        slope: Negative slope of leaky_relu.
        grad_logits: Gradient of the logits, [E, H].
        parts: Each program's part, [P, 1 + num_features, W].
        width: Number of columns of all heads.
        FEATURES: Features of a program.
        H: Number of heads.
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        B: Edges of a program.
        C: Columns of a program.
        ALIGN: Power of two that divides all bounds of columns.
    """
    program = tl.program_id(0) % num_programs
    block = tl.program_id(0) // num_programs % num_blocks
    feature = tl.program_id(0) // num_programs // num_blocks * FEATURES + tl.arange(0, FEATURES)
    head, column, inside = columns_of(blocks, block, C, ALIGN)
    incline = tl.full((), slope, ACC)
    grad_attention = tl.zeros([C], ACC)
    grad_map = tl.zeros([FEATURES, C], ACC)
    for start in range(program, tl.cdiv(num_edges, B), num_programs):
        edge, source, target, _, live = endpoints_of(sources, targets, loop, num_edges, start, B)
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
        grad_attention += tl.sum(slopes * z, 0)
        if features is not None:
            features_exist = live[:, None] & (feature < num_features)[None, :]
            feature_rows = tl.load(
                features + edge.to(OFFSET)[:, None] * num_features + feature[None, :], mask=features_exist, other=0.0
            )
            grad_map += tl.sum(feature_rows.to(ACC)[:, :, None] * slopes[:, None, :], 0)
    of_part = parts + program.to(OFFSET) * (1 + num_features) * width
    tl.store(of_part + column, grad_attention, mask=inside)
    if features is not None:
        in_tile = (feature < num_features)[:, None] & inside[None, :]
        tl.store(of_part + (1 + feature)[:, None] * width + column[None, :], grad_map, mask=in_tile)


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
    """Compute `alpha = exp(logit - lse of the target)`, negated where dropout drops the weight.

    Args:
        sources: Source of each edge.
        targets: Target of each edge.
        loop: Mask of self-loops that exist, uint8; None: all edges exist.
        num_edges: Number of edges.
        logits: Logits, [E, H].
        lse: Logarithm of the softmax's denominator of each target, [n, H].
        alpha: Result, [E, H].
        source_ids: Global vertex id of each source.
        target_ids: Global vertex id of each target; None: no dropout.
        copies: Number of equal edges before each edge in its row; None: no duplicate edges.
        key: Address of the random key of 64 bits.
        first_head: Global number of the first head.
        threshold: Edges whose 32 random bits are below it are dropped.
        H: Number of heads.
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        B: Edges of a program.
        C: Heads that are processed at a time.
    """
    edge, source, target, valid, live = endpoints_of(sources, targets, loop, num_edges, tl.program_id(0), B)
    word = tl.zeros([B], tl.uint64)
    if target_ids is not None:
        word = edge_words(key, source_ids, target_ids, source, target, copies, edge, live)
    for begin in range(0, H, C):
        head = begin + tl.arange(0, C)[None, :]
        mask = live[:, None] & (head < H)
        element = edge.to(OFFSET)[:, None] * H + head
        logit = tl.load(logits + element, mask=mask, other=0.0).to(ACC)
        target_lse = tl.load(lse + target.to(OFFSET)[:, None] * H + head, mask=mask, other=0.0)
        weight = tl.exp(tl.where(mask, logit - target_lse, float("-inf")))
        if target_ids is not None:
            weight = tl.where(keeps(word[:, None], head, first_head, threshold), weight, -weight)
        tl.store(alpha + element, weight, mask=valid[:, None] & (head < H))


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
    """Add `keep_scale * grad_y_v . x_u` by edge and head to `grad`, the gradient of alpha, except for dropped weights.

    Args:
        sources: Source of each edge.
        targets: Target of each edge.
        loop: Mask of self-loops that exist, uint8; None: all edges exist.
        num_edges: Number of edges.
        bounds: First column of each head, and the end of the last, int32 [H + 1].
        x: Source rows.
        grad_y: Gradient of the result.
        alpha: Weights, negative where dropped, [E, H].
        grad: Gradient of alpha, [E, H].
        keep_scale: Factor of weights that are not dropped.
        width: Number of columns of all heads.
        H: Number of heads.
        ACC: Dtype of sums.
        OFFSET: Integer type of offsets into tensors.
        B: Edges of a program.
        C: Columns of a program.
        ALIGN: Power of two that divides all bounds of columns.
    """
    head = tl.program_id(0) % H
    edge, source, target, _, live = endpoints_of(sources, targets, loop, num_edges, tl.program_id(0) // H, B)
    total = tl.zeros([B], ACC)
    start, end = range_of(bounds, head, ALIGN)
    for begin in range(start, end, C):
        column = begin + tl.arange(0, C)[None, :]
        mask = live[:, None] & (column < end)
        value = tl.load(x + source.to(OFFSET)[:, None] * width + column, mask=mask, other=0.0).to(ACC)
        total += tl.sum(value * tl.load(grad_y + target.to(OFFSET)[:, None] * width + column, mask=mask, other=0.0), 1)
    element = edge.to(OFFSET) * H + head
    dropped = tl.load(alpha + element, mask=live, other=0.0) < 0
    total = tl.where(dropped, 0.0, total * tl.full((), keep_scale, ACC))
    tl.store(grad + element, tl.load(grad + element, mask=live, other=0.0) + total, mask=live)
