"""The backend for the CPU: allocates what the C++ kernels fill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.native import _native
from weft.data.adjacency import Adjacency
from weft.kernels.backend import Attention, LogitGrads, Scale


def spmm(adj: Adjacency, x: Tensor, scale: Scale, weighted: bool) -> Tensor:
    y = x.new_empty(adj.num_targets, x.shape[1])
    weight = adj.weight if weighted else None
    threads = torch.get_num_threads()
    _native.spmm(adj.indptr, adj.indices, weight, scale.source, scale.target, scale.loop, x, y, threads)
    return y


def spmm_transposed(adj: Adjacency, grad_y: Tensor, scale: Scale, weighted: bool) -> Tensor:
    grad_x = grad_y.new_empty(adj.num_sources, grad_y.shape[1])
    edges = adj.transpose
    weight = edges.weight if weighted else None
    threads = torch.get_num_threads()
    _native.spmm(edges.indptr, edges.indices, weight, scale.target, scale.source, scale.loop, grad_y, grad_x, threads)
    return grad_x


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


def attend(over: Attention, h: Tensor, logit_src: Tensor, logit_dst: Tensor) -> tuple[list[Tensor], Tensor]:
    adj, threads = over.adj, torch.get_num_threads()
    lse = torch.empty_like(logit_dst)
    _native.attend_lse(adj.indptr, adj.indices, logit_src, logit_dst, over.loop, over.slope, lse, threads)
    bounds = torch.tensor(over.bounds)
    results: list[Tensor] = []
    for _ in range(over.steps):
        y = h.new_empty(adj.num_targets, h.shape[1])
        _native.attend_sum(
            adj.indptr, adj.indices, logit_src, logit_dst, lse, over.loop, bounds, over.slope, h, y, threads
        )
        results.append(y)
        h = y
    return results, lse


def attend_backward(
    over: Attention,
    inputs: Sequence[Tensor],
    lse: Tensor,
    logit_src: Tensor,
    logit_dst: Tensor,
    grad_y: Tensor,
    *,
    needs_h: bool,
    needs_logits: bool,
) -> tuple[Tensor | None, LogitGrads | None]:
    adj, threads = over.adj, torch.get_num_threads()
    edges = adj.transpose
    bounds = torch.tensor(over.bounds)
    stats = logit_dst.new_empty(adj.num_targets, 3, logit_dst.shape[1])
    grads = LogitGrads(torch.zeros_like(logit_src), torch.zeros_like(logit_dst)) if needs_logits else None
    grad_edge = logit_src.new_empty(adj.num_edges, logit_src.shape[1]) if needs_logits else None
    grad_h: Tensor | None = None
    for step in reversed(range(over.steps)):
        y = inputs[step + 1] if needs_logits else None
        _native.attend_stats(logit_dst, lse, bounds, grad_y if needs_logits else None, y, stats, threads)
        grad_h = torch.empty_like(inputs[step]) if needs_h or step > 0 else None
        _native.attend_backward(
            edges.indptr,
            edges.indices,
            edges.edge_ids,
            logit_src,
            stats,
            over.loop,
            bounds,
            over.slope,
            inputs[step],
            grad_y,
            step == over.steps - 1,
            grad_h,
            grads.source if grads else None,
            grads.target if grads else None,
            grad_edge,
            threads,
        )
        if grad_h is not None:
            grad_y = grad_h
    if grads is not None and grad_edge is not None:
        _native.attend_targets(adj.indptr, grad_edge, grads.target, threads)
    return grad_h, grads


def keyed_dropout(x: Tensor, rows: Tensor, key: int, p: float, first_column: int) -> Tensor:
    y = torch.empty_like(x)
    threshold = int(p * 2**32)
    _native.dropout(x, rows.contiguous(), key, first_column, threshold, 1 / (1 - p), y, torch.get_num_threads())
    return y
