"""GAT's attention: one pass for the softmax, one pass for weighted sums; backward one pass over the transposed edges.

As in `csrc/attend.h`, forward also saves `plus`, the part of each sum from edges with positive leaky_relu arguments.
The gradients of the targets' logits then follow row by row, without another pass over the edges.
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
    column_blocks,
    kernel_types,
    launch_items,
    launch_segments,
    whole_rows,
)
from weft.kernels.triton.sums import sum_pieces
from weft.utils.dtypes import sum_dtype
from weft.utils.random import key_on

ROWS_OF_STATS = 16
"""Number of rows that a Triton program of `attend_stats` processes. The kernel does not read edges."""


def attend(
    spec: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, needs_logits: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    num_heads = logit_dst.shape[1]
    lse, share = softmax_sums(
        spec.adj, spec.loop, num_heads, logit_src=logit_src, logit_dst=logit_dst, slope=spec.slope
    )
    y, saved = h, list[Tensor]()
    for step in range(spec.steps):
        if needs_logits and step:
            saved.append(y)
        h, y = y, h.new_empty(spec.adj.num_targets, h.shape[1])
        plus = torch.empty_like(y) if needs_logits else None
        _weighted(spec, spec.adj, (logit_dst, logit_src), lse, h, y, plus=plus)
        if plus is not None:
            saved.append(plus)
    return y, (lse, share, *saved) if needs_logits else (lse, *saved)


def attend_backward(
    spec: Attention,
    inputs: AttentionInputs,
    saved: Sequence[Tensor],
    grad_y: Tensor,
    *,
    needs_h: bool,
    needs_logits: bool,
    into: SourceGrads = SourceGrads(),  # noqa: B008
) -> tuple[Tensor | None, LogitGrads | None]:
    """Return the gradients of h and of the logits; see `backend.Backend`.

    The loop goes from the last step to the first. For each step, `attend_stats` computes `grad_y . y` for each target
    and head and adds the gradient of the target's logit; `attend_rows` then runs over the transposed edges and computes
    the gradients of h and of the sources' logits.

    Args:
        spec: Edges, heads and options.
        inputs: Inputs and result of `attend`.
        saved: Tensors that `attend` returned: lse, and if the logits need gradients share, then `plus` of each step and
            its result except for the last step's.
        grad_y: Gradient of the result, [n, f].
        needs_h: True if h needs a gradient.
        needs_logits: True if the logits need a gradient.
        into: Gradients to which those of source tensors are added.
    """
    (_, logit_src, logit_dst, _), (lse, *rows) = inputs, saved
    edges = spec.adj.transpose
    grads = None
    if needs_logits:
        grad_src = torch.zeros_like(logit_src, dtype=lse.dtype) if into.logits is None else into.logits
        grads = LogitGrads(grad_src, torch.zeros_like(logit_dst, dtype=lse.dtype))
    grad_h: Tensor | None = None
    for step in reversed(range(spec.steps)):
        add = step == 0 and into.h is not None
        grad_h = into.h if add else None
        if grad_h is None and (needs_h or step > 0):
            grad_h = grad_y.new_empty(spec.adj.num_sources, grad_y.shape[1])
        if grads is None:
            _weighted(spec, edges, (logit_src, logit_dst), lse, grad_y, grad_h, transposed=True, add=add)
        else:
            share, *between = rows
            x, plus, y = inputs.between(between)[2 * step : 2 * step + 3]
            dot = _stats(spec, grad_y, y, plus, share, grads.target)
            gradients = {"dot": dot, "own_rows": x, "grad_src": grads.source}
            _weighted(spec, edges, (logit_src, logit_dst), lse, grad_y, grad_h, transposed=True, add=add, **gradients)
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
    """Return statistics of the softmax over the in-edges of each target.

    Logits are either sums of a source's and a target's term (logit_src, logit_dst) or given for each edge (logits).

    Args:
        adj: The edges.
        loop: Mask of targets that get a self-loop, bool [n], or None.
        num_heads: Number of heads.
        logit_src: Logits of sources, [s, H].
        logit_dst: Logits of targets, [n, H].
        logits: Logits of edges, [E, H].
        loop_logits: Logits of self-loops, [n, H].
        slope: Negative slope of leaky_relu.

    Returns:
        lse, the logarithm of the softmax's denominator, and the share of the denominator whose leaky_relu arguments are
        positive, [n, H] each.
    """
    like = logit_src if logits is None else logits
    assert like is not None
    classes, columns = adj.degree_classes, column_blocks((0, num_heads), like.device)
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
        "largest_of_piece": partial[0],
        "sum_of_piece": partial[1],
        "share_of_piece": partial[2],
        "H": num_heads,
        **kernel_types(like, logit_dst, lse),
    }
    rows: dict[str, Any] = {"largest": lse, "sums": None, "shares": share, "FINISH": True}
    pieces = {"largest": partial[0], "sums": partial[1], "shares": partial[2], "FINISH": False}
    for segments, lanes in whole_rows(classes):
        launch_segments(softmax_rows, segments, columns, lanes=lanes, **common, **rows, TOTALS=False)
    launch_segments(softmax_rows, classes.pieces, columns, lanes=MAX_LANES, **common, **pieces, TOTALS=False)
    launch_segments(softmax_rows, classes.hubs, columns, lanes=1, **common, **rows, TOTALS=True)
    return lse, share


def dropout_arguments(spec: Attention, rows: CompressedRows) -> dict[str, Any]:
    """Return the arguments with which kernels compute the masks of edge dropout.

    Args:
        spec: Edges, heads and options.
        rows: Compressed matrix whose entries the kernel reads.
    """
    if spec.dropout is None:
        absent = dict.fromkeys(("source_ids", "target_ids", "copies", "key"))
        return {**absent, "first_head": 0, "threshold": 0}
    return {
        "source_ids": spec.dropout.sources.contiguous(),
        "target_ids": spec.dropout.targets.contiguous(),
        "copies": rows.copies,
        "key": key_on(spec.dropout.key, rows.indices.device),
        "first_head": spec.dropout.first_head,
        "threshold": int(spec.dropout.p * 2**32),
    }


def _weighted(
    spec: Attention,
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
    """Compute sums of rows weighted by the attention, and write them to y; see `attend_rows`.

    `logits` are those of the matrix rows and those of their entries. With `plus`, also write the sums over positive
    arguments; with `grad_src`, add the gradients of the sources' logits to it.
    """
    classes, columns, width = rows.degree_classes, column_blocks(tuple(spec.bounds), x.device), x.shape[1]
    num_rows, num_blocks = len(logits[0]), len(columns.blocks)
    splits = plus is not None or grad_src is not None
    dots = None if grad_src is None else lse.new_empty(num_rows, num_blocks)
    partial = lse.new_empty(len(classes.pieces), 2 * width + num_blocks)
    common: dict[str, Any] = {
        "indices": rows.indices,
        "own_logits": logits[0],
        "other_logits": logits[1],
        "lse": lse,
        "dot": dot,
        "loop": None if spec.loop is None else spec.loop.view(torch.uint8),
        "num_loops": 0 if spec.loop is None else len(spec.loop),
        "slope": spec.slope,
        "x": x,
        "own_rows": own_rows,
        "partial": partial,
        "y": y,
        "plus": plus,
        "dots": dots,
        "width": width,
        "TRANSPOSED": transposed,
        "PLUS": splits,
        "ADD": add,
        "H": logits[0].shape[1],
        "keep_scale": spec.scale,
        **dropout_arguments(spec, rows),
        **kernel_types(x, *logits, partial, own_rows, y, dots),
    }
    for segments, lanes in whole_rows(classes):
        launch_segments(attend_rows, segments, columns, lanes=lanes, totals=None, **common, FINISH=True)
    if len(classes.pieces):
        launch_segments(attend_rows, classes.pieces, columns, lanes=MAX_LANES, totals=None, **common, FINISH=False)
        totals = sum_pieces(rows, partial)
        launch_segments(attend_rows, classes.hubs, columns, lanes=1, totals=totals, **common, FINISH=True)
    if dots is not None and grad_src is not None:
        grad_src.add_(_by_head(dots, columns))


def _by_head(dots: Tensor, columns: ColumnBlocks) -> Tensor:
    """Return the sums of the blocks of each head, [s, B] -> [s, H]."""
    if dots.shape[1] == len(columns.heads) - 1:
        return dots
    return torch.stack([part.sum(1) for part in dots.split([*torch.tensor(columns.heads).diff().tolist()], 1)], 1)


def _stats(spec: Attention, grad_y: Tensor, y: Tensor, plus: Tensor, share: Tensor, grad_logit_dst: Tensor) -> Tensor:
    """Return `grad_y . y` by target and head, [n, H]; add the gradient of the targets' logits to grad_logit_dst."""
    num_targets, num_heads = grad_logit_dst.shape
    dot = torch.empty_like(share)
    columns = column_blocks(tuple(spec.bounds), y.device)
    launch_items(
        attend_stats,
        num_targets,
        ROWS_OF_STATS,
        columns.bounds,
        grad_y,
        y,
        plus,
        share,
        spec.slope,
        dot,
        grad_logit_dst,
        num_targets,
        y.shape[1],
        programs=num_heads,
        H=num_heads,
        C=columns.size,
        ALIGN=columns.align,
        **kernel_types(y, grad_y),
    )
    return dot
