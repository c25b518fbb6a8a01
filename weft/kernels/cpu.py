"""The backend for CPUs: allocates results and calls the C++ kernels. See `backend.Backend` for the operations.

It also runs on meta tensors, which have a shape and no data: it allocates the same tensors and computes nothing, so
that the memory of a step can be estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.kernels.backend import Attention, AttentionInputs, LogitGrads, PairGrads, Pairs, Scale, SourceGrads
from weft.runtime.memory.alignment import empty_aligned, is_aligned, readable_width
from weft.runtime.native import _native
from weft.utils.dtypes import sum_dtype
from weft.utils.random import MASK64, RandomKey


class _NoKernels:
    """Kernels for meta tensors: each returns None and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


_NO_KERNELS = _NoKernels()


def _kernels(x: Tensor) -> Any:
    """Return the C++ kernels, or those that do nothing if x has no data."""
    return _NO_KERNELS if x.is_meta else _native


def spmm(adj: Adjacency, x: Tensor, scale: Scale, weighted: bool, in_sum_dtype: bool = False) -> Tensor:
    y = x.new_empty(adj.num_targets, x.shape[1], dtype=sum_dtype(x.dtype) if in_sum_dtype else x.dtype)
    weight = adj.weight if weighted else None
    threads = torch.get_num_threads()
    _kernels(x).spmm(
        adj.indptr, adj.indices, weight, scale.source, scale.target, scale.loop, *_rows(x), y, False, threads
    )
    return y


def spmm_transposed(
    adj: Adjacency, grad_y: Tensor, scale: Scale, weighted: bool, into: Tensor | None = None, in_sum_dtype: bool = False
) -> Tensor:
    dtype = sum_dtype(grad_y.dtype) if in_sum_dtype else grad_y.dtype
    grad_x = grad_y.new_empty(adj.num_sources, grad_y.shape[1], dtype=dtype) if into is None else into
    edges, add, threads = adj.transpose, into is not None, torch.get_num_threads()
    weight, scales = edges.weight if weighted else None, (scale.target, scale.source, scale.loop)
    _kernels(grad_y).spmm(edges.indptr, edges.indices, weight, *scales, *_rows(grad_y), grad_x, add, threads)
    return grad_x


def spmm_scatter(adj: Adjacency, rows: Tensor, scale: Scale, weighted: bool, into: Tensor) -> None:
    """Add the target rows of edges to their sources, as `SumBackend.spmm_transposed`, without computing a transpose.

    Args:
        adj: The edges.
        rows: Rows of the targets, [n, F].
        scale: Constant factors; `loop` is ignored.
        weighted: True to multiply by the edge weights.
        into: Tensor [s, F] in the type of sums to which the rows are added.
    """
    factors = adj.weight if weighted else None, scale.target, scale.source
    threads = torch.get_num_threads()
    _kernels(rows).spmm_scatter(adj.indptr, adj.indices, *factors, _rows(rows)[0], into, threads)


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """Return the rows for a sum, contiguous or aligned, and the number of columns that the kernel may read."""
    if not (x.is_contiguous() or is_aligned(x)):
        x = empty_aligned(x, *x.shape).copy_(x)
    return x, readable_width(x)


def spmm_max(adj: Adjacency, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.new_empty(adj.num_targets, x.shape[1])
    position = torch.empty_like(y, dtype=torch.int32 if x.dtype == torch.float32 else torch.int64)
    _kernels(x).spmm_max(adj.indptr, adj.indices, x, y, position, torch.get_num_threads())
    return y, position


def spmm_max_backward(adj: Adjacency, position: Tensor, grad_y: Tensor) -> Tensor:
    grad_x = grad_y.new_empty(adj.num_sources, grad_y.shape[1])
    edges = adj.transpose
    threads = torch.get_num_threads()
    _kernels(grad_y).spmm_max_backward(
        adj.indptr, edges.indptr, edges.indices, adj.transposed_edge_ids, position, grad_y, grad_x, threads
    )
    return grad_x


def attend(
    spec: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor, *, needs_logits: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    adj, threads, drops = spec.adj, torch.get_num_threads(), _drops(spec)
    bounds = torch.tensor(spec.bounds)
    lse = torch.empty_like(logit_dst, dtype=sum_dtype(h.dtype))
    share = torch.empty_like(lse) if needs_logits else None
    y, saved = h, list[Tensor]()
    for step in range(spec.steps):
        if needs_logits and step:
            saved.append(y)
        h, y = y, h.new_empty(adj.num_targets, h.shape[1])
        plus = torch.empty_like(y) if needs_logits else None
        _kernels(h).attend(
            adj.indptr,
            adj.indices,
            logit_src,
            logit_dst,
            spec.loop,
            bounds,
            spec.slope,
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
            saved.append(plus)
    return y, (lse, *saved) if share is None else (lse, share, *saved)


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

    `saved` is lse, the logarithm of each softmax's denominator; and, if the logits need gradients, `share`, the share
    of the denominator whose leaky_relu arguments are positive, then for each step `plus`, the part of its result from
    edges with positive arguments, and its result except for the last step's. The loop goes from the last step to the
    first. For each step:

    1. `attend_stats` computes, for each target and head, the softmax's denominator and `grad_y . y`, and adds the
       gradient of the target's logit.
    2. `attend_backward` runs over the transposed edges and computes the gradients of h and of the sources' logits.

    Args:
        spec: Edges, heads and options.
        inputs: Inputs and result of `attend`.
        saved: Tensors that `attend` returned.
        grad_y: Gradient of the result, [n, f].
        needs_h: True if h needs a gradient.
        needs_logits: True if the logits need a gradient.
        into: Gradients to which those of source tensors are added.
    """
    adj, threads, drops, kernels = spec.adj, torch.get_num_threads(), _drops(spec), _kernels(grad_y)
    edges, bounds = adj.transpose, torch.tensor(spec.bounds)
    (_, logit_src, logit_dst, _), (lse, *rows) = inputs, saved
    stats = lse.new_empty(adj.num_targets, 3, logit_dst.shape[1])
    grads = None
    if needs_logits:
        grad_src = torch.zeros_like(logit_src, dtype=lse.dtype) if into.logits is None else into.logits
        grads = LogitGrads(grad_src, torch.zeros_like(logit_dst, dtype=lse.dtype))
    grad_h: Tensor | None = None
    for step in reversed(range(spec.steps)):
        if grads is None:
            x = None
            kernels.attend_stats(logit_dst, lse, bounds, spec.slope, stats, None, None, None, None, None, threads)
        else:
            share, *between = rows
            x, plus, y = inputs.between(between)[2 * step : 2 * step + 3]
            kernels.attend_stats(
                logit_dst, lse, bounds, spec.slope, stats, grad_y, y, plus, share, grads.target, threads
            )
        add = step == 0 and into.h is not None
        grad_h = into.h if add else None
        if grad_h is None and (needs_h or step > 0):
            grad_h = grad_y.new_empty(adj.num_sources, grad_y.shape[1])
        kernels.attend_backward(
            edges.indptr,
            edges.indices,
            logit_src,
            stats,
            spec.loop,
            bounds,
            spec.slope,
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


def pair_logits(spec: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None) -> Tensor:
    adj = spec.adj
    logits = left.new_empty(adj.num_edges + (0 if spec.loop is None else len(spec.loop)), len(spec.bounds) - 1)
    arguments = _pair_arguments(spec, left, right, attention, edge_map)
    _kernels(left).pair_logits(adj.indptr, adj.indices, *arguments, logits, torch.get_num_threads())
    return logits


def pair_backward(
    spec: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None, grad_logits: Tensor
) -> PairGrads:
    adj, edges = spec.adj, spec.adj.transpose
    grads = PairGrads(*(None if x is None else torch.empty_like(x) for x in (left, right, attention, edge_map)))  # type: ignore[arg-type]
    arguments = _pair_arguments(spec, left, right, attention, edge_map)
    _kernels(left).pair_backward(
        adj.indptr,
        adj.indices,
        edges.indptr,
        edges.indices,
        adj.transposed_edge_ids,
        *arguments,
        grad_logits,
        *grads,
        torch.get_num_threads(),
    )
    return grads


def _pair_arguments(
    spec: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None
) -> tuple[Tensor | None, Tensor, float, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the arguments that the forward and the backward kernel have in common."""
    features, loops = (None, None) if spec.features is None else spec.features
    return (
        spec.loop,
        torch.tensor(spec.bounds),
        spec.slope,
        left,
        right,
        attention,
        features,
        None if spec.loop is None else loops,
        edge_map,
    )


def dot_logits(spec: Attention, left: Tensor, right: Tensor) -> Tensor:
    # The gradient of a weight in `weigh` is the dot product of a row and a gradient. The kernel asks of a weight only
    # whether it is negative, before it writes the gradient in its place: the zeros of the result serve as weights.
    adj, logits = spec.adj, left.new_zeros(spec.adj.num_edges, len(spec.bounds) - 1)
    weighed = torch.tensor(spec.bounds), logits, left, right, 1.0
    _kernels(left).weigh_backward(adj.indptr, adj.indices, None, *weighed, False, logits, torch.get_num_threads())
    return logits


def dot_backward(spec: Attention, left: Tensor, right: Tensor, grad_logits: Tensor) -> tuple[Tensor, Tensor]:
    adj, edges, bounds, threads = spec.adj, spec.adj.transpose, torch.tensor(spec.bounds), torch.get_num_threads()
    grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
    sides = (edges.indptr, edges.indices, adj.transposed_edge_ids), (adj.indptr, adj.indices, None)
    for side, rows, grad in zip(sides, (right, left), (grad_left, grad_right), strict=True):
        _kernels(left).weigh(*side, None, bounds, grad_logits, rows, 1.0, grad, threads)
    return grad_left, grad_right


def attend_edges(spec: Attention, h: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    adj, bounds, threads = spec.adj, torch.tensor(spec.bounds), torch.get_num_threads()
    alpha = torch.empty_like(logits)
    _kernels(h).edge_softmax(adj.indptr, spec.loop, logits, alpha, threads)
    if (drops := _drops(spec)) is not None:
        _kernels(h).drop_edges(adj.indptr, adj.indices, spec.loop, drops, alpha, threads)
    inputs = []
    for _ in range(spec.steps):
        inputs.append(h)
        y = h.new_empty(adj.num_targets, h.shape[1])
        _kernels(h).weigh(adj.indptr, adj.indices, None, spec.loop, bounds, alpha, h, spec.scale, y, threads)
        h = y
    return h, alpha, inputs


def attend_edges_backward(
    spec: Attention, alpha: Tensor, inputs: Sequence[Tensor], grad_y: Tensor
) -> tuple[Tensor, Tensor]:
    adj, edges, bounds, threads = spec.adj, spec.adj.transpose, torch.tensor(spec.bounds), torch.get_num_threads()
    grad_logits = torch.zeros_like(alpha)
    for step in reversed(range(spec.steps)):
        weighed = bounds, alpha, inputs[step], grad_y, spec.scale
        _kernels(grad_y).weigh_backward(adj.indptr, adj.indices, spec.loop, *weighed, step == 0, grad_logits, threads)
        grad_h = grad_y.new_empty(adj.num_sources, grad_y.shape[1])
        sides = edges.indptr, edges.indices, adj.transposed_edge_ids
        _kernels(grad_y).weigh(*sides, spec.loop, bounds, alpha, grad_y, spec.scale, grad_h, threads)
        grad_y = grad_h
    return grad_y, grad_logits


def _drops(spec: Attention) -> Any:
    """Return the options of edge dropout as the C++ kernels take them."""
    if spec.dropout is None:
        return None
    p, key, first_head, sources, targets = spec.dropout
    ids = sources.contiguous(), targets.contiguous()
    return _kernels(sources).EdgeDropout(*ids, int(key) & MASK64, first_head, int(p * 2**32), spec.scale)


def keyed_dropout(x: Tensor, rows: Tensor, key: RandomKey, p: float, first_column: int, relu: bool) -> Tensor:
    y = torch.empty_like(x)
    threshold, threads = int(p * 2**32), torch.get_num_threads()
    _kernels(x).dropout(x, rows.contiguous(), int(key) & MASK64, first_column, threshold, 1 / (1 - p), relu, y, threads)
    return y


def relu_dropout_backward(y: Tensor, grad_y: Tensor, p: float) -> Tensor:
    grad_x = torch.empty_like(grad_y)
    _kernels(y).relu_dropout_backward(y, grad_y, 1 / (1 - p), grad_x, torch.get_num_threads())
    return grad_x
