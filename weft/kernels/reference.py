"""The definition of every kernel in plain, differentiable PyTorch, with the signatures of `ops`; slow, and large.

n targets, s sources, E edges, F columns, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from weft.data.adjacency import Adjacency
from weft.kernels.backend import EdgeDropout, EdgeFeatures, Scale
from weft.utils.random import RandomKey, key_word, mix64_each

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
    dropout: EdgeDropout | None = None,
) -> Tensor:
    source, target = edges_and_loops(adj, loop)
    logits = leaky_relu(logit_src[source] + logit_dst[target], slope)
    return attend_edges(adj, h, logits, bounds=bounds, loop=loop, steps=steps, dropout=dropout)


def dropped(alpha: Tensor, adj: Adjacency, dropout: EdgeDropout | None) -> Tensor:
    """Weights [E, H], or with those of loops [E + n, H], under dropout."""
    if dropout is None:
        return alpha
    return torch.where(edge_mask(adj, len(alpha), alpha.shape[1], dropout), alpha * dropout.scale, 0)


def edge_mask(adj: Adjacency, num_weights: int, num_heads: int, dropout: EdgeDropout) -> Tensor:
    """Which weights dropout keeps, bool [E, H], or of loops, too, [E + n, H]; see `EdgeDropout`."""
    source, target = adj.edges()
    place = torch.arange(adj.num_edges, device=adj.device)
    first = torch.ones_like(place, dtype=torch.bool)
    first[1:] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    copy = place - torch.where(first, place, 0).cummax(0).values
    itself = torch.arange(num_weights - adj.num_edges, device=adj.device)
    source, target = torch.cat([source, itself]), torch.cat([target, itself])
    copy = torch.cat([copy, torch.zeros_like(itself)])
    words = mix64_each(mix64_each(dropout.targets[target] ^ key_word(dropout.key)) ^ dropout.sources[source])
    words = torch.where(copy > 0, mix64_each(words ^ copy), words)
    kept = words.new_ones(len(words), num_heads, dtype=torch.bool)
    for head in range(num_heads):
        kept[:, head] = hashed(words, place.new_full((1,), dropout.first_head + head))[:, 0] >= int(dropout.p * 2**32)
    return kept


def hashed(words: Tensor, column: Tensor) -> Tensor:
    """The 32 bits [n, k] of words int64 [n] and columns int64 [k]."""
    low, high = words & MASK32, (words >> 32) & MASK32
    bits = (low[:, None] + column * 0x9E3779B9) & MASK32
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x21F0AAAD) & MASK32
    bits = bits ^ (bits >> 15) ^ high[:, None]
    bits = (bits * 0x735A2D97) & MASK32
    return bits ^ (bits >> 15)


def edge_softmax(logits: Tensor, target: Tensor, num_targets: int) -> Tensor:
    """The softmax by column over the edges into each target; where all are -inf, 0."""
    spread, zeros = target[:, None].expand_as(logits), logits.new_zeros(num_targets, logits.shape[1])
    largest = zeros.scatter_reduce(0, spread, logits.detach(), "amax", include_self=False)
    powers = (logits - largest.clamp(min=torch.finfo(logits.dtype).min)[target]).exp()
    sums = zeros.index_add(0, target, powers)
    return powers / torch.where(sums == 0, 1, sums)[target]


def weigh(
    alpha: Tensor, bounds: Sequence[int], source: Tensor, target: Tensor, num_targets: int, h: Tensor, steps: int
) -> Tensor:
    """The sums of rows by the weights of their head, so many times."""
    alpha = alpha.repeat_interleave(torch.tensor(bounds, device=h.device).diff(), dim=1)
    for _ in range(steps):
        h = h.new_zeros(num_targets, h.shape[1]).index_add(0, target, alpha * h[source])
    return h


def pair_logits(
    adj: Adjacency,
    left: Tensor,
    right: Tensor,
    attention: Tensor,
    edge_map: Tensor | None = None,
    *,
    bounds: Sequence[int],
    loop: Tensor | None = None,
    slope: float = 0.2,
    features: EdgeFeatures | None = None,
) -> Tensor:
    source, target = edges_and_loops(adj, loop)
    arguments = left[source] + right[target]
    if features is not None and edge_map is not None:
        arguments = arguments + features.rows(loops=loop is not None) @ edge_map
    scaled = leaky_relu(arguments, slope) * attention
    logits = torch.stack([scaled[:, begin:end].sum(1) for begin, end in pairwise(bounds)], 1)
    return logits if loop is None else logits * torch.cat([loop.new_ones(adj.num_edges), loop])[:, None]


def attend_edges(
    adj: Adjacency,
    h: Tensor,
    logits: Tensor,
    *,
    bounds: Sequence[int],
    loop: Tensor | None = None,
    steps: int = 1,
    dropout: EdgeDropout | None = None,
) -> Tensor:
    source, target = edges_and_loops(adj, loop)
    if loop is not None:
        logits = logits.masked_fill(~torch.cat([loop.new_ones(adj.num_edges), loop])[:, None], -torch.inf)
    alpha = dropped(edge_softmax(logits, target, adj.num_targets), adj, dropout)
    return weigh(alpha, bounds, source, target, adj.num_targets, h, steps)


def edges_and_loops(adj: Adjacency, loop: Tensor | None) -> tuple[Tensor, Tensor]:
    """(source, target) of every edge, and then of a loop at every target."""
    source, target = adj.edges()
    if loop is None:
        return source, target
    itself = torch.arange(adj.num_targets, device=source.device)
    return torch.cat([source, itself]), torch.cat([target, itself])


def keyed_dropout(
    x: Tensor, rows: Tensor, *, key: RandomKey, p: float, first_column: int = 0, relu: bool = False
) -> Tensor:
    x = torch.relu(x) if relu else x
    return torch.where(keep_mask(rows, x.shape[1], key, p, first_column), x * (1 / (1 - p)), 0)


def keep_mask(rows: Tensor, width: int, key: RandomKey, p: float, first_column: int) -> Tensor:
    """Which entries dropout keeps, bool [n, width]: a 32-bit hash of (key, row, column), compared with p * 2**32."""
    column = torch.arange(first_column, first_column + width, device=rows.device)
    return hashed(mix64_each(rows ^ key_word(key)), column) >= int(p * 2**32)
