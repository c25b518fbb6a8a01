"""The backend for the CPU: allocates what the C++ kernels fill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.kernels.backend import Attention, AttentionInputs, LogitGrads, PairGrads, Pairs, Scale, SourceGrads
from weft.runtime.alignment import empty_on_lines, on_lines, readable_width
from weft.runtime.native import _native
from weft.utils.dtypes import sum_dtype
from weft.utils.random import MASK64, RandomKey


def spmm(adj: Adjacency, x: Tensor, scale: Scale, weighted: bool, wide: bool = False) -> Tensor:
    y = x.new_empty(adj.num_targets, x.shape[1], dtype=sum_dtype(x.dtype) if wide else x.dtype)
    weight = adj.weight if weighted else None
    threads = torch.get_num_threads()
    _native.spmm(adj.indptr, adj.indices, weight, scale.source, scale.target, scale.loop, *_rows(x), y, False, threads)
    return y


def spmm_transposed(
    adj: Adjacency, grad_y: Tensor, scale: Scale, weighted: bool, into: Tensor | None = None, wide: bool = False
) -> Tensor:
    dtype = sum_dtype(grad_y.dtype) if wide else grad_y.dtype
    grad_x = grad_y.new_empty(adj.num_sources, grad_y.shape[1], dtype=dtype) if into is None else into
    edges, add, threads = adj.transpose, into is not None, torch.get_num_threads()
    weight, scales = edges.weight if weighted else None, (scale.target, scale.source, scale.loop)
    _native.spmm(edges.indptr, edges.indices, weight, *scales, *_rows(grad_y), grad_x, add, threads)
    return grad_x


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """The rows that a sum reads, side by side or beginning at cache lines, and how many columns of them it may read."""
    if not (x.is_contiguous() or on_lines(x)):
        x = empty_on_lines(x, *x.shape).copy_(x)
    return x, readable_width(x)


def spmm_max(adj: Adjacency, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.new_empty(adj.num_targets, x.shape[1])
    position = torch.empty(y.shape, dtype=torch.int32 if x.dtype == torch.float32 else torch.int64)
    _native.spmm_max(adj.indptr, adj.indices, x, y, position, torch.get_num_threads())
    return y, position


def spmm_max_backward(adj: Adjacency, position: Tensor, grad_y: Tensor) -> Tensor:
    grad_x = grad_y.new_empty(adj.num_sources, grad_y.shape[1])
    edges = adj.transpose
    threads = torch.get_num_threads()
    _native.spmm_max_backward(
        adj.indptr, edges.indptr, edges.indices, edges.edge_ids, position, grad_y, grad_x, threads
    )
    return grad_x


def attend(
    over: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, needs_logits: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    adj, threads, drops = over.adj, torch.get_num_threads(), _drops(over)
    bounds = torch.tensor(over.bounds)
    lse = torch.empty_like(logit_dst, dtype=sum_dtype(h.dtype))
    share = torch.empty_like(lse) if needs_logits else None
    y, kept = h, list[Tensor]()
    for step in range(over.steps):
        if needs_logits and step:
            kept.append(y)
        h, y = y, h.new_empty(adj.num_targets, h.shape[1])
        plus = torch.empty_like(y) if needs_logits else None
        _native.attend(
            adj.indptr,
            adj.indices,
            logit_src,
            logit_dst,
            over.loop,
            bounds,
            over.slope,
            h,
            step > 0,
            lse,
            y,
            plus,
            share,
            drops,
            threads,
        )
        if plus is not None:
            kept.append(plus)
    return y, (lse, *kept) if share is None else (lse, share, *kept)


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
    adj, threads, drops = over.adj, torch.get_num_threads(), _drops(over)
    edges, bounds = adj.transpose, torch.tensor(over.bounds)
    (_, logit_src, logit_dst, _), (lse, *rows) = inputs, kept
    stats = lse.new_empty(adj.num_targets, 3, logit_dst.shape[1])
    grads = None
    if needs_logits:
        grad_src = torch.zeros_like(logit_src, dtype=lse.dtype) if into.logits is None else into.logits
        grads = LogitGrads(grad_src, torch.zeros_like(logit_dst, dtype=lse.dtype))
    grad_h: Tensor | None = None
    for step in reversed(range(over.steps)):
        if grads is None:
            x = None
            _native.attend_stats(logit_dst, lse, bounds, over.slope, stats, None, None, None, None, None, threads)
        else:
            share, *between = rows
            x, plus, y = inputs.between(between)[2 * step : 2 * step + 3]
            _native.attend_stats(
                logit_dst, lse, bounds, over.slope, stats, grad_y, y, plus, share, grads.target, threads
            )
        add = step == 0 and into.h is not None
        grad_h = into.h if add else None
        if grad_h is None and (needs_h or step > 0):
            grad_h = grad_y.new_empty(adj.num_sources, grad_y.shape[1])
        _native.attend_backward(
            edges.indptr,
            edges.indices,
            logit_src,
            stats,
            over.loop,
            bounds,
            over.slope,
            x,
            grad_y,
            grad_h,
            None if grads is None else grads.source,
            add,
            drops,
            threads,
        )
        grad_y = grad_y if grad_h is None else grad_h
    return grad_h, grads


def pair_logits(over: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None) -> Tensor:
    adj = over.adj
    logits = left.new_empty(adj.num_edges + (0 if over.loop is None else len(over.loop)), len(over.bounds) - 1)
    arguments = _pair_arguments(over, left, right, attention, edge_map)
    _native.pair_logits(adj.indptr, adj.indices, *arguments, logits, torch.get_num_threads())
    return logits


def pair_backward(
    over: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None, grad_logits: Tensor
) -> PairGrads:
    adj, edges = over.adj, over.adj.transpose
    grads = PairGrads(*(None if x is None else torch.empty_like(x) for x in (left, right, attention, edge_map)))  # type: ignore[arg-type]
    arguments = _pair_arguments(over, left, right, attention, edge_map)
    _native.pair_backward(
        adj.indptr,
        adj.indices,
        edges.indptr,
        edges.indices,
        edges.edge_ids,
        *arguments,
        grad_logits,
        *grads,
        torch.get_num_threads(),
    )
    return grads


def _pair_arguments(
    over: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None
) -> tuple[Tensor | None, Tensor, float, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    features, loops = (None, None) if over.features is None else over.features
    return (
        over.loop,
        torch.tensor(over.bounds),
        over.slope,
        left,
        right,
        attention,
        features,
        None if over.loop is None else loops,
        edge_map,
    )


def attend_edges(over: Attention, h: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    adj, bounds, threads = over.adj, torch.tensor(over.bounds), torch.get_num_threads()
    alpha = torch.empty_like(logits)
    _native.edge_softmax(adj.indptr, over.loop, logits, alpha, threads)
    if (drops := _drops(over)) is not None:
        _native.drop_edges(adj.indptr, adj.indices, over.loop, drops, alpha, threads)
    inputs = []
    for _ in range(over.steps):
        inputs.append(h)
        y = h.new_empty(adj.num_targets, h.shape[1])
        _native.weigh(adj.indptr, adj.indices, None, over.loop, bounds, alpha, h, over.scale, y, threads)
        h = y
    return h, alpha, inputs


def attend_edges_backward(
    over: Attention, alpha: Tensor, inputs: Sequence[Tensor], grad_y: Tensor
) -> tuple[Tensor, Tensor]:
    adj, edges, bounds, threads = over.adj, over.adj.transpose, torch.tensor(over.bounds), torch.get_num_threads()
    grad_logits = torch.zeros_like(alpha)
    for step in reversed(range(over.steps)):
        weighed = bounds, alpha, inputs[step], grad_y, over.scale
        _native.weigh_backward(adj.indptr, adj.indices, over.loop, *weighed, step == 0, grad_logits, threads)
        grad_h = grad_y.new_empty(adj.num_sources, grad_y.shape[1])
        _native.weigh(
            edges.indptr, edges.indices, edges.edge_ids, over.loop, bounds, alpha, grad_y, over.scale, grad_h, threads
        )
        grad_y = grad_h
    return grad_y, grad_logits


def _drops(over: Attention) -> _native.EdgeDropout | None:
    if over.dropout is None:
        return None
    p, key, first_head, sources, targets = over.dropout
    ids = sources.contiguous(), targets.contiguous()
    return _native.EdgeDropout(*ids, int(key) & MASK64, first_head, int(p * 2**32), over.scale)


def keyed_dropout(x: Tensor, rows: Tensor, key: RandomKey, p: float, first_column: int, relu: bool) -> Tensor:
    y = torch.empty_like(x)
    threshold, threads = int(p * 2**32), torch.get_num_threads()
    _native.dropout(x, rows.contiguous(), int(key) & MASK64, first_column, threshold, 1 / (1 - p), relu, y, threads)
    return y


def relu_dropout_backward(y: Tensor, grad_y: Tensor, p: float) -> Tensor:
    grad_x = torch.empty_like(grad_y)
    _native.relu_dropout_backward(y, grad_y, 1 / (1 - p), grad_x, torch.get_num_threads())
    return grad_x
