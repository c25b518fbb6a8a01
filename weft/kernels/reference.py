"""The definition of every kernel in plain, differentiable PyTorch, with the signatures of `ops`; slow, and large.

n targets, s sources, E edges, F columns, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from weft.core.random import mix64_each, signed
from weft.data.adjacency import Adjacency
from weft.kernels.backend import Scale

MASK32 = (1 << 32) - 1


def spmm(adj: Adjacency, x: Tensor, *, scale: Scale = Scale(), weighted: bool = False) -> Tensor:  # noqa: B008
    source, target = adj.edges()
    scaled = x if scale.source is None else x * scale.source[:, None]
    messages = scaled.index_select(0, source)
    if weighted:
        assert adj.weight is not None
        messages = messages * adj.weight[:, None]
    y = x.new_zeros(adj.num_targets, x.shape[1]).index_add(0, target, messages)
    if scale.target is not None:
        y = y * scale.target[:, None]
    if scale.loop is not None:
        y = y + x[: adj.num_targets] * scale.loop[:, None]
    return y


def spmm_max(adj: Adjacency, x: Tensor) -> Tensor:
    position = max_position(adj, x.detach())
    has_edge = adj.degree > 0
    entry = (adj.indptr[:-1, None] + position)[has_edge]
    winner = adj.indices.long()[entry]  # of each target that has an in-edge, and column
    return x.new_zeros(adj.num_targets, x.shape[1]).index_put((has_edge,), x.gather(0, winner))


def max_position(adj: Adjacency, x: Tensor) -> Tensor:
    """The place int64 [n, F] of the first maximum in each row; where a row is empty, 0."""
    source, target = adj.edges()
    spread = target[:, None].expand(-1, x.shape[1])
    values = x.index_select(0, source)
    largest = x.new_zeros(adj.num_targets, x.shape[1])
    largest.scatter_reduce_(0, spread, values, "amax", include_self=False)
    place = (torch.arange(adj.num_edges, device=x.device) - adj.indptr[target])[:, None]
    is_largest = (values == largest[target]) | values.isnan()
    candidates = torch.where(is_largest, place, adj.num_edges)
    first = torch.zeros(largest.shape, dtype=torch.int64, device=x.device)
    return first.scatter_reduce_(0, spread, candidates, "amin", include_self=False)


def attend(
    adj: Adjacency,
    h: Tensor,
    logit_src: Tensor,
    logit_dst: Tensor,
    *,
    bounds: Sequence[int],
    loop: Tensor | None = None,
    slope: float = 0.2,
    steps: int = 1,
) -> Tensor:
    source, target = adj.edges()
    if loop is not None:
        itself = loop.nonzero()[:, 0]
        source, target = torch.cat([source, itself]), torch.cat([target, itself])
    logits = leaky_relu(logit_src[source] + logit_dst[target], slope)
    spread = target[:, None].expand_as(logits)
    largest = torch.zeros_like(logit_dst).scatter_reduce(0, spread, logits.detach(), "amax", include_self=False)
    powers = (logits - largest.clamp(min=torch.finfo(h.dtype).min)[target]).exp()
    sums = torch.zeros_like(logit_dst).index_add(0, target, powers)
    alpha = powers / torch.where(sums == 0, 1, sums)[target]
    num_columns = torch.tensor(bounds, device=h.device).diff()
    alpha = alpha.repeat_interleave(num_columns, dim=1)
    for _ in range(steps):
        h = h.new_zeros(adj.num_targets, h.shape[1]).index_add(0, target, alpha * h[source])
    return h


def keyed_dropout(x: Tensor, rows: Tensor, *, key: int, p: float, first_column: int = 0, relu: bool = False) -> Tensor:
    x = torch.relu(x) if relu else x
    return torch.where(keep_mask(rows, x.shape[1], key, p, first_column), x * (1 / (1 - p)), 0)


def keep_mask(rows: Tensor, width: int, key: int, p: float, first_column: int) -> Tensor:
    """Which entries dropout keeps, bool [n, width]: a 32-bit hash of (key, row, column), compared with p * 2**32."""
    mixed = mix64_each(rows ^ signed(key))
    low, high = mixed & MASK32, (mixed >> 32) & MASK32
    column = torch.arange(first_column, first_column + width, device=rows.device)
    bits = (low[:, None] + column * 0x9E3779B9) & MASK32
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x21F0AAAD) & MASK32
    bits = bits ^ (bits >> 15) ^ high[:, None]
    bits = (bits * 0x735A2D97) & MASK32
    bits = bits ^ (bits >> 15)
    return bits >= int(p * 2**32)
