"""GAT's attention: the softmax's sums, then two sums of weighted rows; backward one pass of the transposed edges.

As in `csrc/attend.h`: what the targets' logits want follows, row by row, from a second sum of rows that forward keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.degrees import CompressedRows
from weft.kernels.backend import Attention, AttentionInputs, LogitGrads, SourceGrads
from weft.kernels.triton.device.additive_attention import attend_rows, attend_stats, softmax_rows
from weft.kernels.triton.launch_config import (
    MAX_LANES,
    ColumnBlocks,
    columns_of,
    flat,
    over_segments,
    types,
    whole_rows,
)
from weft.kernels.triton.sums import sum_pieces
from weft.utils.dtypes import sum_dtype
from weft.utils.random import key_on

STATS_ROWS = 16  # of a program that has nothing but its own rows


def attend(
    over: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, needs_logits: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    num_heads = logit_dst.shape[1]
    lse, share = softmax_sums(
        over.adj, over.loop, num_heads, logit_src=logit_src, logit_dst=logit_dst, slope=over.slope
    )
    y, kept = h, list[Tensor]()
    for step in range(over.steps):
        if needs_logits and step:
            kept.append(y)
        h, y = y, h.new_empty(over.adj.num_targets, h.shape[1])
        plus = torch.empty_like(y) if needs_logits else None
        _weighted(over, over.adj, (logit_dst, logit_src), lse, h, y, plus=plus)
        if plus is not None:
            kept.append(plus)
    return y, (lse, share, *kept) if needs_logits else (lse, *kept)


def attend_backward(
    over: Attention,
    inputs: AttentionInputs,
    kept: Sequence[Tensor],
    grad_y: Tensor,
    *,
    needs_h: bool,
    needs_logits: bool,
    into: SourceGrads = SourceGrads(),  # noqa: B008
) -> tuple[Tensor | None, LogitGrads | None]:
    """The steps from last to first; kept: of each one the part with positive arguments, and the result but the last."""
    (_, logit_src, logit_dst, _), (lse, *rows) = inputs, kept
    edges = over.adj.transpose
    grads = None
    if needs_logits:
        grad_src = torch.zeros_like(logit_src, dtype=lse.dtype) if into.logits is None else into.logits
        grads = LogitGrads(grad_src, torch.zeros_like(logit_dst, dtype=lse.dtype))
    grad_h: Tensor | None = None
    for step in reversed(range(over.steps)):
        add = step == 0 and into.h is not None
        grad_h = into.h if add else None
        if grad_h is None and (needs_h or step > 0):
            grad_h = grad_y.new_empty(over.adj.num_sources, grad_y.shape[1])
        if grads is None:
            _weighted(over, edges, (logit_src, logit_dst), lse, grad_y, grad_h, transposed=True, add=add)
        else:
            share, *between = rows
            x, plus, y = inputs.between(between)[2 * step : 2 * step + 3]
            dot = _stats(over, grad_y, y, plus, share, grads.target)
            known = {"dot": dot, "own_rows": x, "grad_src": grads.source}
            _weighted(over, edges, (logit_src, logit_dst), lse, grad_y, grad_h, transposed=True, add=add, **known)
        grad_y = grad_y if grad_h is None else grad_h
    return grad_h, grads


def softmax_sums(
    adj: Adjacency,
    loop: Tensor | None,
    num_heads: int,
    *,
    logit_src: Tensor | None = None,
    logit_dst: Tensor | None = None,
    logits: Tensor | None = None,
    loop_logits: Tensor | None = None,
    slope: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The logarithm of the softmax's denominator and the share of it with positive arguments, [n, H] each.

    Of logits of both ends, or of the edges [E, H] and loops [n, H].
    """
    like = logit_src if logits is None else logits
    assert like is not None
    classes, columns = adj.degree_classes, columns_of((0, num_heads), like.device)
    dtype = sum_dtype(like.dtype)
    lse, share = (like.new_empty(adj.num_targets, num_heads, dtype=dtype) for _ in range(2))
    partial = [like.new_empty(len(classes.pieces), num_heads, dtype=dtype) for _ in range(3)]
    common: dict[str, Any] = {
        "indices": adj.indices,
        "logit_src": logit_src,
        "logit_dst": logit_dst,
        "logits": logits,
        "loop": None if loop is None else loop.view(torch.uint8),
        "loop_logits": loop_logits,
        "slope": slope,
        "most_of_piece": partial[0],
        "sum_of_piece": partial[1],
        "share_of_piece": partial[2],
        "H": num_heads,
        **types(like, logit_dst, lse),
    }
    rows: dict[str, Any] = {"largest": lse, "sums": None, "shares": share, "FINISH": True}
    pieces = {"largest": partial[0], "sums": partial[1], "shares": partial[2], "FINISH": False}
    for segments, lanes in whole_rows(classes):
        over_segments(softmax_rows, segments, columns, lanes=lanes, **common, **rows, TOTALS=False)
    over_segments(softmax_rows, classes.pieces, columns, lanes=MAX_LANES, **common, **pieces, TOTALS=False)
    over_segments(softmax_rows, classes.hubs, columns, lanes=1, **common, **rows, TOTALS=True)
    return lse, share


def dropout_arguments(over: Attention, rows: CompressedRows) -> dict[str, Any]:
    """What kernels draw the masks of entries by."""
    if over.dropout is None:
        absent = dict.fromkeys(("source_ids", "target_ids", "copies", "key"))
        return {**absent, "first_head": 0, "threshold": 0}
    return {
        "source_ids": over.dropout.sources.contiguous(),
        "target_ids": over.dropout.targets.contiguous(),
        "copies": rows.copies,
        "key": key_on(over.dropout.key, rows.indices.device),
        "first_head": over.dropout.first_head,
        "threshold": int(over.dropout.p * 2**32),
    }


def _weighted(
    over: Attention,
    rows: CompressedRows,
    logits: tuple[Tensor, Tensor],
    lse: Tensor,
    x: Tensor,
    y: Tensor | None,
    *,
    plus: Tensor | None = None,
    transposed: bool = False,
    add: bool = False,
    dot: Tensor | None = None,
    own_rows: Tensor | None = None,
    grad_src: Tensor | None = None,
) -> None:
    """Fills y, or adds to it, and plus, or adds to grad_src: see `attend_rows`. logits: of rows, of their entries."""
    classes, columns, width = rows.degree_classes, columns_of(tuple(over.bounds), x.device), x.shape[1]
    num_rows, num_blocks = len(logits[0]), len(columns.blocks)
    both = plus is not None or grad_src is not None
    dots = None if grad_src is None else lse.new_empty(num_rows, num_blocks)
    partial = lse.new_empty(len(classes.pieces), 2 * width + num_blocks)
    common: dict[str, Any] = {
        "indices": rows.indices,
        "own_logits": logits[0],
        "other_logits": logits[1],
        "lse": lse,
        "dot": dot,
        "loop": None if over.loop is None else over.loop.view(torch.uint8),
        "num_loops": 0 if over.loop is None else len(over.loop),
        "slope": over.slope,
        "x": x,
        "own_rows": own_rows,
        "partial": partial,
        "y": y,
        "plus": plus,
        "dots": dots,
        "width": width,
        "TRANSPOSED": transposed,
        "PLUS": both,
        "ADD": add,
        "H": logits[0].shape[1],
        "keep_scale": over.scale,
        **dropout_arguments(over, rows),
        **types(x, *logits, partial, own_rows, y, dots),
    }
    for segments, lanes in whole_rows(classes):
        over_segments(attend_rows, segments, columns, lanes=lanes, totals=None, **common, FINISH=True)
    if len(classes.pieces):
        over_segments(attend_rows, classes.pieces, columns, lanes=MAX_LANES, totals=None, **common, FINISH=False)
        totals = sum_pieces(rows, partial)
        over_segments(attend_rows, classes.hubs, columns, lanes=1, totals=totals, **common, FINISH=True)
    if dots is not None and grad_src is not None:
        grad_src.add_(_by_head(dots, columns))


def _by_head(dots: Tensor, columns: ColumnBlocks) -> Tensor:
    """Sums of blocks [s, B] by their heads, [s, H]."""
    if dots.shape[1] == len(columns.heads) - 1:
        return dots
    return torch.stack([part.sum(1) for part in dots.split([*torch.tensor(columns.heads).diff().tolist()], 1)], 1)


def _stats(over: Attention, grad_y: Tensor, y: Tensor, plus: Tensor, share: Tensor, grad_logit_dst: Tensor) -> Tensor:
    """`grad_y . y` by target and head [n, H]; adds the gradient of the targets' logits."""
    num_targets, num_heads = grad_logit_dst.shape
    dot = torch.empty_like(share)
    columns = columns_of(tuple(over.bounds), y.device)
    flat(
        attend_stats,
        num_targets,
        STATS_ROWS,
        columns.bounds,
        grad_y,
        y,
        plus,
        share,
        over.slope,
        dot,
        grad_logit_dst,
        num_targets,
        y.shape[1],
        programs=num_heads,
        H=num_heads,
        C=columns.size,
        ALIGN=columns.align,
        **types(y, grad_y),
    )
    return dot
