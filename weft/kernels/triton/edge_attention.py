"""Attention with one logit per edge and head (GATv2, edge features): logits, softmax, weighted sums, and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.kernels.backend import Attention, PairGrads, Pairs
from weft.kernels.triton.additive_attention import dropout_arguments, softmax_sums
from weft.kernels.triton.device import edge_attention as device
from weft.kernels.triton.launch_config import (
    MAX_LANES,
    TILE,
    column_blocks,
    kernel_types,
    launch_items,
    launch_options,
    launch_segments,
    whole_rows,
)
from weft.kernels.triton.sums import sum_into, sum_pieces
from weft.utils.dtypes import sum_dtype

EDGES_PER_PROGRAM = 16
"""Number of edges that a program processes at a time, each with a row of columns."""
MAX_PARTS = 512
"""Largest number of parts that a sum over all edges is split into."""
FEATURES_PER_PROGRAM = 4
"""Number of edge features for which a program computes the gradient of their linear transform."""


class _Endpoints(NamedTuple):
    """Endpoints of the edges, or of the self-loops of targets."""

    sources: Tensor
    """Source of each edge."""
    targets: Tensor
    """Target of each edge."""
    loop: Tensor | None
    """Mask of self-loops that exist, uint8; None: all edges exist."""
    rows: slice
    """Rows of these edges or self-loops in tensors with a row for each edge, then one for each self-loop."""
    loops: bool
    """True if the endpoints are those of self-loops, False if they are those of edges."""

    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """Return the arguments that kernels take."""
        return self.sources, self.targets, self.loop, len(self.sources)


def _endpoints(adj: Adjacency, loop: Tensor | None) -> Iterator[_Endpoints]:
    """Yield the endpoints of the edges, and then those of the self-loops, if there are any."""
    yield _Endpoints(adj.indices, adj.entry_rows, None, slice(0, adj.num_edges), False)
    if loop is not None:
        loop_ids = torch.arange(len(loop), dtype=adj.indices.dtype, device=adj.device)
        rows = slice(adj.num_edges, adj.num_edges + len(loop))
        yield _Endpoints(loop_ids, loop_ids, loop.view(torch.uint8), rows, True)


def pair_logits(spec: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None) -> Tensor:
    num_heads, num_loops = len(spec.bounds) - 1, 0 if spec.loop is None else len(spec.loop)
    logits = left.new_empty(spec.adj.num_edges + num_loops, num_heads)
    columns = column_blocks(tuple(spec.bounds), left.device)
    for endpoints in _endpoints(spec.adj, spec.loop):
        launch_items(
            device.pair_logits,
            len(endpoints.sources),
            EDGES_PER_PROGRAM,
            *endpoints.arguments(),
            left,
            right,
            attention,
            _features(spec, loops=endpoints.loops),
            edge_map,
            0 if edge_map is None else len(edge_map),
            columns.bounds,
            spec.slope,
            logits[endpoints.rows],
            left.shape[1],
            programs=num_heads,
            H=num_heads,
            C=columns.size,
            ALIGN=columns.align,
            **kernel_types(left, right, logits),
        )
    return logits


def pair_backward(
    spec: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None, grad_logits: Tensor
) -> PairGrads:
    sides = (left, right), (right, left)
    transposed, forward = spec.adj.transpose, spec.adj
    grads = [
        _pair_rows(spec, rows, end_rows, other_rows, attention, edge_map, grad_logits, ids)
        for rows, (end_rows, other_rows), ids in zip(
            (transposed, forward), sides, (forward.transposed_edge_ids, None), strict=True
        )
    ]
    sums = sum(
        _pair_sums(spec, endpoints, left, right, edge_map, grad_logits) for endpoints in _endpoints(spec.adj, spec.loop)
    )
    assert isinstance(sums, Tensor)
    grad_map = None if edge_map is None else (sums[1:] * attention).to(edge_map.dtype)
    return PairGrads(grads[0], grads[1], sums[0].to(attention.dtype), grad_map)


def _pair_rows(
    spec: Pairs,
    rows: Any,
    end_rows: Tensor,
    other_rows: Tensor,
    attention: Tensor,
    edge_map: Tensor | None,
    grad_logits: Tensor,
    edge_ids: Tensor | None,
) -> Tensor:
    """Return the gradient of the rows of one endpoint; see the kernel `pair_rows`."""
    classes, columns, width = rows.degree_classes, column_blocks(tuple(spec.bounds), end_rows.device), end_rows.shape[1]
    y = torch.empty_like(end_rows)
    partial = end_rows.new_empty(len(classes.pieces), width, dtype=sum_dtype(end_rows.dtype))
    common: dict[str, Any] = {
        "indices": rows.indices,
        "edge_ids": edge_ids,
        "own_rows": end_rows,
        "other_rows": other_rows,
        "attention": attention,
        "features": _features(spec, loops=False),
        "edge_map": edge_map,
        "num_features": 0 if edge_map is None else len(edge_map),
        "slope": spec.slope,
        "grad_logits": grad_logits,
        "loop": None if spec.loop is None else spec.loop.view(torch.uint8),
        "num_loops": 0 if spec.loop is None else len(spec.loop),
        "loop_features": _features(spec, loops=True),
        "loop_grads": grad_logits[spec.adj.num_edges :],
        "width": width,
        "H": grad_logits.shape[1],
        **kernel_types(end_rows, other_rows, grad_logits, partial, _features(spec, loops=False)),
    }
    for segments, lanes in whole_rows(classes):
        launch_segments(device.pair_rows, segments, columns, lanes=lanes, totals=None, y=y, **common, FINISH=True)
    if len(classes.pieces):
        launch_segments(
            device.pair_rows, classes.pieces, columns, lanes=MAX_LANES, totals=None, y=partial, **common, FINISH=False
        )
        totals = sum_pieces(rows, partial)
        launch_segments(device.pair_rows, classes.hubs, columns, lanes=1, totals=totals, y=y, **common, FINISH=True)
    return y


def _pair_sums(
    spec: Pairs, endpoints: _Endpoints, left: Tensor, right: Tensor, edge_map: Tensor | None, grad_logits: Tensor
) -> Tensor:
    """Return the gradient of `attention`, and that of `edge_map` except for the factor `attention`, [1 + K, W].

    The sums are over the edges, or over the self-loops.
    """
    num_features, width = 0 if edge_map is None else len(edge_map), left.shape[1]
    columns = column_blocks(tuple(spec.bounds), left.device)
    size = max(TILE // FEATURES_PER_PROGRAM // columns.size, 1)
    num_programs = min(triton.cdiv(len(endpoints.sources), size), MAX_PARTS)
    parts = left.new_empty(num_programs, 1 + num_features, width, dtype=sum_dtype(left.dtype))
    num_blocks = len(columns.blocks)
    if num_programs:
        device.pair_sums[(num_programs * num_blocks * max(triton.cdiv(num_features, FEATURES_PER_PROGRAM), 1),)](
            *endpoints.arguments(),
            num_programs,
            num_blocks,
            columns.blocks,
            left,
            right,
            _features(spec, loops=endpoints.loops),
            edge_map,
            num_features,
            spec.slope,
            grad_logits[endpoints.rows],
            parts,
            width,
            FEATURES=FEATURES_PER_PROGRAM,
            H=grad_logits.shape[1],
            B=size,
            C=columns.size,
            ALIGN=columns.align,
            **kernel_types(left, right, grad_logits, parts, _features(spec, loops=False)),
            **launch_options(TILE),
        )
    return parts.sum(0)


def _features(spec: Pairs, *, loops: bool) -> Tensor | None:
    """Return the features of the edges or of the self-loops."""
    if spec.features is None:
        return None
    return spec.features.loops if loops else spec.features.edges


def dot_logits(spec: Attention, left: Tensor, right: Tensor) -> Tensor:
    logits = left.new_zeros(spec.adj.num_edges, len(spec.bounds) - 1)
    for endpoints in _endpoints(spec.adj, None):
        _add_dots(spec, endpoints, torch.zeros_like(logits), left, right, logits)  # zeros: no edge was dropped
    return logits


def dot_backward(spec: Attention, left: Tensor, right: Tensor, grad_logits: Tensor) -> tuple[Tensor, Tensor]:
    adj, weights = spec.adj, _weights(spec, grad_logits)
    ids = adj.transposed_edge_ids
    grad_left = sum_into(adj.transpose, right, torch.empty_like(left), **weights, edge_ids=ids)
    return grad_left, sum_into(adj, left, torch.empty_like(right), **weights)


def attend_edges(spec: Attention, h: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    adj, num_heads = spec.adj, logits.shape[1]
    by_loop = None if spec.loop is None else logits[adj.num_edges :]
    lse, _ = softmax_sums(adj, spec.loop, num_heads, logits=logits[: adj.num_edges], loop_logits=by_loop)
    alpha = torch.empty(logits.shape, dtype=lse.dtype, device=logits.device)
    masks = dropout_arguments(spec, adj)
    for endpoints in _endpoints(adj, spec.loop):
        launch_items(
            device.edge_weights,
            len(endpoints.sources),
            EDGES_PER_PROGRAM,
            *endpoints.arguments(),
            logits[endpoints.rows],
            lse,
            alpha[endpoints.rows],
            **{**masks, "copies": None if endpoints.loops else masks["copies"]},
            H=num_heads,
            C=column_blocks((0, num_heads), h.device).size,
            **kernel_types(logits, lse),
        )
    inputs = []
    for _ in range(spec.steps):
        inputs.append(h)
        y = h.new_empty(adj.num_targets, h.shape[1])
        h = sum_into(adj, h, y, **_weights(spec, alpha))
    return h, alpha, inputs


def attend_edges_backward(
    spec: Attention, alpha: Tensor, inputs: Sequence[Tensor], grad_y: Tensor
) -> tuple[Tensor, Tensor]:
    adj, edges = spec.adj, spec.adj.transpose
    grad, dtype = torch.zeros_like(alpha), grad_y.dtype
    for x in reversed(inputs):
        for endpoints in _endpoints(adj, spec.loop):
            _add_dots(spec, endpoints, alpha, x, grad_y, grad)
        grad_h = grad_y.new_empty(adj.num_sources, grad_y.shape[1])
        grad_y = sum_into(edges, grad_y, grad_h, **_weights(spec, alpha), edge_ids=adj.transposed_edge_ids)
    # Softmax: the gradient of logit e is alpha_e (g_e - sum of alpha_i g_i over the row), where g is that of alpha.
    weight = alpha.abs()
    grad.mul_(weight)
    weight.mul_(_row_sums(adj, spec.loop, grad).index_select(0, _targets(adj, spec.loop)))
    return grad_y, grad.sub_(weight).to(dtype)


def _weights(spec: Attention, alpha: Tensor) -> dict[str, Any]:
    """Return alpha as weights of a sum by head: those of edges and those of self-loops."""
    num_edges = spec.adj.num_edges
    return {
        "weight": alpha[:num_edges],
        "loop": None if spec.loop is None else alpha[num_edges:],
        "bounds": spec.bounds,
        "keep_scale": spec.scale,
    }


def _add_dots(spec: Attention, endpoints: _Endpoints, alpha: Tensor, x: Tensor, grad_y: Tensor, grad: Tensor) -> None:
    """Add the gradient of alpha from one step's result to `grad`."""
    columns = column_blocks(tuple(spec.bounds), x.device)
    launch_items(
        device.edge_dots,
        len(endpoints.sources),
        EDGES_PER_PROGRAM,
        *endpoints.arguments(),
        columns.bounds,
        x,
        grad_y,
        alpha[endpoints.rows],
        grad[endpoints.rows],
        spec.scale,
        x.shape[1],
        programs=alpha.shape[1],
        H=alpha.shape[1],
        C=columns.size,
        ALIGN=columns.align,
        **kernel_types(x, grad_y, alpha),
    )


def _row_sums(adj: Adjacency, loop: Tensor | None, by_edge: Tensor) -> Tensor:
    """Return sums of values over the in-edges, and over self-loops if there are any, [n, H]."""
    sums = by_edge.new_empty(adj.num_targets, by_edge.shape[1])
    sum_into(adj, by_edge, sums, None, x_by_entry=True)
    return sums if loop is None else sums.add_(by_edge[adj.num_edges :])


def _targets(adj: Adjacency, loop: Tensor | None) -> Tensor:
    """Return the target of each edge and self-loop."""
    return torch.cat([endpoints.targets for endpoints in _endpoints(adj, loop)])
