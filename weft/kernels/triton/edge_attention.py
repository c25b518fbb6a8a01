"""Attention by logits of edges (GATv2, edge features): logits, softmax, weighted sums, and their gradients."""

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
    columns_of,
    flat,
    options,
    over_segments,
    types,
    whole_rows,
)
from weft.kernels.triton.sums import sum_into, sum_pieces
from weft.utils.dtypes import sum_dtype

EDGES = 16  # of a program, where each has a row of columns
MOST_PARTS = 512  # of a sum over all edges
FEATURES = 4  # of edges that a program has at a time, where it adds up the gradient of their map


class _Ends(NamedTuple):
    """Edges, or the loops of targets."""

    sources: Tensor
    targets: Tensor
    loop: Tensor | None
    """uint8: which there are; None: all."""
    rows: slice
    """Of what is by edge, and then by loop."""
    loops: bool

    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None, int]:
        return self.sources, self.targets, self.loop, len(self.sources)


def _ends(adj: Adjacency, loop: Tensor | None) -> Iterator[_Ends]:
    """The edges, and then the loops, if there are any."""
    yield _Ends(adj.indices, adj.entry_rows, None, slice(0, adj.num_edges), False)
    if loop is not None:
        itself = torch.arange(len(loop), dtype=adj.indices.dtype, device=adj.device)
        rows = slice(adj.num_edges, adj.num_edges + len(loop))
        yield _Ends(itself, itself, loop.view(torch.uint8), rows, True)


def pair_logits(over: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None) -> Tensor:
    num_heads, num_loops = len(over.bounds) - 1, 0 if over.loop is None else len(over.loop)
    logits = left.new_empty(over.adj.num_edges + num_loops, num_heads)
    columns = columns_of(tuple(over.bounds), left.device)
    for ends in _ends(over.adj, over.loop):
        flat(
            device.pair_logits,
            len(ends.sources),
            EDGES,
            *ends.arguments(),
            left,
            right,
            attention,
            _features(over, loops=ends.loops),
            edge_map,
            0 if edge_map is None else len(edge_map),
            columns.bounds,
            over.slope,
            logits[ends.rows],
            left.shape[1],
            programs=num_heads,
            H=num_heads,
            C=columns.size,
            ALIGN=columns.align,
            **types(left, right, logits),
        )
    return logits


def pair_backward(
    over: Pairs, left: Tensor, right: Tensor, attention: Tensor, edge_map: Tensor | None, grad_logits: Tensor
) -> PairGrads:
    sides = (left, right), (right, left)
    transposed, forward = over.adj.transpose, over.adj
    grads = [
        _pair_rows(over, rows, own, other, attention, edge_map, grad_logits, ids)
        for rows, (own, other), ids in zip((transposed, forward), sides, (transposed.edge_ids, None), strict=True)
    ]
    sums = sum(_pair_sums(over, ends, left, right, edge_map, grad_logits) for ends in _ends(over.adj, over.loop))
    assert isinstance(sums, Tensor)
    of_map = None if edge_map is None else (sums[1:] * attention).to(edge_map.dtype)
    return PairGrads(grads[0], grads[1], sums[0].to(attention.dtype), of_map)


def _pair_rows(
    over: Pairs,
    rows: Any,
    own: Tensor,
    other: Tensor,
    attention: Tensor,
    edge_map: Tensor | None,
    grad_logits: Tensor,
    edge_ids: Tensor | None,
) -> Tensor:
    """The gradient of the rows of one end, see the kernel."""
    classes, columns, width = rows.degree_classes, columns_of(tuple(over.bounds), own.device), own.shape[1]
    y = torch.empty_like(own)
    partial = own.new_empty(len(classes.pieces), width, dtype=sum_dtype(own.dtype))
    common: dict[str, Any] = {
        "indices": rows.indices,
        "edge_ids": edge_ids,
        "own_rows": own,
        "other_rows": other,
        "attention": attention,
        "features": _features(over, loops=False),
        "edge_map": edge_map,
        "num_features": 0 if edge_map is None else len(edge_map),
        "slope": over.slope,
        "grad_logits": grad_logits,
        "loop": None if over.loop is None else over.loop.view(torch.uint8),
        "num_loops": 0 if over.loop is None else len(over.loop),
        "loop_features": _features(over, loops=True),
        "loop_grads": grad_logits[over.adj.num_edges :],
        "width": width,
        "H": grad_logits.shape[1],
        **types(own, other, grad_logits, partial, _features(over, loops=False)),
    }
    for segments, lanes in whole_rows(classes):
        over_segments(device.pair_rows, segments, columns, lanes=lanes, totals=None, y=y, **common, FINISH=True)
    if len(classes.pieces):
        over_segments(
            device.pair_rows, classes.pieces, columns, lanes=MAX_LANES, totals=None, y=partial, **common, FINISH=False
        )
        totals = sum_pieces(rows, partial)
        over_segments(device.pair_rows, classes.hubs, columns, lanes=1, totals=totals, y=y, **common, FINISH=True)
    return y


def _pair_sums(
    over: Pairs, ends: _Ends, left: Tensor, right: Tensor, edge_map: Tensor | None, grad_logits: Tensor
) -> Tensor:
    """The gradients of attention and of edge_map, but for a factor, [1 + K, W], of edges or of loops."""
    num_features, width = 0 if edge_map is None else len(edge_map), left.shape[1]
    columns = columns_of(tuple(over.bounds), left.device)
    size = max(TILE // FEATURES // columns.size, 1)
    num_programs = min(triton.cdiv(len(ends.sources), size), MOST_PARTS)
    parts = left.new_empty(num_programs, 1 + num_features, width, dtype=sum_dtype(left.dtype))
    num_blocks = len(columns.blocks)
    if num_programs:
        device.pair_sums[(num_programs * num_blocks * max(triton.cdiv(num_features, FEATURES), 1),)](
            *ends.arguments(),
            num_programs,
            num_blocks,
            columns.blocks,
            left,
            right,
            _features(over, loops=ends.loops),
            edge_map,
            num_features,
            over.slope,
            grad_logits[ends.rows],
            parts,
            width,
            FEATURES=FEATURES,
            H=grad_logits.shape[1],
            B=size,
            C=columns.size,
            ALIGN=columns.align,
            **types(left, right, grad_logits, parts, _features(over, loops=False)),
            **options(TILE),
        )
    return parts.sum(0)


def _features(over: Pairs, *, loops: bool) -> Tensor | None:
    """Of the edges, or of the loops."""
    if over.features is None:
        return None
    return over.features.loops if loops else over.features.edges


def attend_edges(over: Attention, h: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    adj, num_heads = over.adj, logits.shape[1]
    by_loop = None if over.loop is None else logits[adj.num_edges :]
    lse, _ = softmax_sums(adj, over.loop, num_heads, logits=logits[: adj.num_edges], loop_logits=by_loop)
    alpha = torch.empty(logits.shape, dtype=lse.dtype, device=logits.device)
    masks = dropout_arguments(over, adj)
    for ends in _ends(adj, over.loop):
        flat(
            device.edge_weights,
            len(ends.sources),
            EDGES,
            *ends.arguments(),
            logits[ends.rows],
            lse,
            alpha[ends.rows],
            **{**masks, "copies": None if ends.loops else masks["copies"]},
            H=num_heads,
            C=columns_of((0, num_heads), h.device).size,
            **types(logits, lse),
        )
    inputs = []
    for _ in range(over.steps):
        inputs.append(h)
        y = h.new_empty(adj.num_targets, h.shape[1])
        h = sum_into(adj, h, y, **_weights(over, alpha))
    return h, alpha, inputs


def attend_edges_backward(
    over: Attention, alpha: Tensor, inputs: Sequence[Tensor], grad_y: Tensor
) -> tuple[Tensor, Tensor]:
    adj, edges = over.adj, over.adj.transpose
    grad, dtype = torch.zeros_like(alpha), grad_y.dtype
    for x in reversed(inputs):
        for ends in _ends(adj, over.loop):
            _add_dots(over, ends, alpha, x, grad_y, grad)
        grad_h = grad_y.new_empty(adj.num_sources, grad_y.shape[1])
        grad_y = sum_into(edges, grad_y, grad_h, **_weights(over, alpha), edge_ids=edges.edge_ids)
    weight = alpha.abs()
    grad.mul_(weight)
    weight.mul_(_row_sums(adj, over.loop, grad).index_select(0, _targets(adj, over.loop)))
    return grad_y, grad.sub_(weight).to(dtype)


def _weights(over: Attention, alpha: Tensor) -> dict[str, Any]:
    """alpha as weights of a sum by head, those of the edges and those of loops."""
    num_edges = over.adj.num_edges
    return {
        "weight": alpha[:num_edges],
        "loop": None if over.loop is None else alpha[num_edges:],
        "bounds": over.bounds,
        "keep_scale": over.scale,
    }


def _add_dots(over: Attention, ends: _Ends, alpha: Tensor, x: Tensor, grad_y: Tensor, grad: Tensor) -> None:
    """Adds what one step's result asks of alpha."""
    columns = columns_of(tuple(over.bounds), x.device)
    flat(
        device.edge_dots,
        len(ends.sources),
        EDGES,
        *ends.arguments(),
        columns.bounds,
        x,
        grad_y,
        alpha[ends.rows],
        grad[ends.rows],
        over.scale,
        x.shape[1],
        programs=alpha.shape[1],
        H=alpha.shape[1],
        C=columns.size,
        ALIGN=columns.align,
        **types(x, grad_y, alpha),
    )


def _row_sums(adj: Adjacency, loop: Tensor | None, by_edge: Tensor) -> Tensor:
    """Sums [n, H] of numbers [E, H] over the in-edges, or [E + n, H] with those of loops."""
    sums = by_edge.new_empty(adj.num_targets, by_edge.shape[1])
    sum_into(adj, by_edge, sums, None, by_place=True)
    return sums if loop is None else sums.add_(by_edge[adj.num_edges :])


def _targets(adj: Adjacency, loop: Tensor | None) -> Tensor:
    """Of the edges and loops."""
    return torch.cat([ends.targets for ends in _ends(adj, loop)])
