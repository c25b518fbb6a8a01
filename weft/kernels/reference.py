"""Reference implementation of every kernel in plain, differentiable PyTorch, for tests.

The public functions have the signatures of `ops`. They are slow and need memory for every edge. Shapes: n targets,
s sources, E edges, F columns, H heads.
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
    winner = adj.indices.long()[entry]  # source of the maximum, by column, for targets with in-edges
    return x.new_zeros(adj.num_targets, x.shape[1]).index_put((has_edge,), x.gather(0, winner))


def max_position(adj: Adjacency, x: Tensor) -> Tensor:
    """Return the position of the first maximum among the in-edges of each row, int64 [n, F]; 0 for an empty row.

    Args:
        adj: The edges.
        x: Source rows, [s, F].
    """
    source, target = adj.edges()
    spread = target[:, None].expand(-1, x.shape[1])
    values = x.index_select(0, source)
    largest = x.new_zeros(adj.num_targets, x.shape[1])
    largest.scatter_reduce_(0, spread, values, "amax", include_self=False)
    position = (torch.arange(adj.num_edges, device=x.device) - adj.indptr[target])[:, None]
    is_largest = (values == largest[target]) | values.isnan()
    candidates = torch.where(is_largest, position, adj.num_edges)
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
    """Return attention weights after dropout, [E, H], or with self-loops [E + n, H].

    Args:
        alpha: Weights of edges and self-loops.
        adj: The edges.
        dropout: The dropout, or None.
    """
    if dropout is None:
        return alpha
    return torch.where(edge_mask(adj, len(alpha), alpha.shape[1], dropout), alpha * dropout.scale, 0)


def edge_mask(adj: Adjacency, num_weights: int, num_heads: int, dropout: EdgeDropout) -> Tensor:
    """Return a mask of the weights that are not dropped, bool [E, H], or with self-loops [E + n, H]; see `EdgeDropout`.

    The steps:

    1. Number duplicate edges: the position of an edge minus that of the first equal edge.
    2. Hash (key, target, source, copy) to 64 random bits for each edge.
    3. For each head, hash these bits and the head's number, and compare with `p * 2**32`.

    Args:
        adj: The edges.
        num_weights: E, or E + n with self-loops.
        num_heads: Number of heads.
        dropout: The dropout.
    """
    source, target = adj.edges()
    position = torch.arange(adj.num_edges, device=adj.device)
    first = torch.ones_like(position, dtype=torch.bool)
    first[1:] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    copy = position - torch.where(first, position, 0).cummax(0).values
    loop_ids = torch.arange(num_weights - adj.num_edges, device=adj.device)
    source, target = torch.cat([source, loop_ids]), torch.cat([target, loop_ids])
    copy = torch.cat([copy, torch.zeros_like(loop_ids)])
    words = mix64_each(mix64_each(dropout.targets[target] ^ key_word(dropout.key)) ^ dropout.sources[source])
    words = torch.where(copy > 0, mix64_each(words ^ copy), words)
    mask = words.new_ones(len(words), num_heads, dtype=torch.bool)
    for head in range(num_heads):
        mask[:, head] = hashed(words, position.new_full((1,), dropout.first_head + head))[:, 0] >= int(
            dropout.p * 2**32
        )
    return mask


def hashed(words: Tensor, column: Tensor) -> Tensor:
    """Return 32 random bits for each word and column, int64 [n, k].

    Args:
        words: 64 random bits of each row, int64 [n].
        column: Numbers of the columns, int64 [k].
    """
    low, high = words & MASK32, (words >> 32) & MASK32
    bits = (low[:, None] + column * 0x9E3779B9) & MASK32
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x21F0AAAD) & MASK32
    bits = bits ^ (bits >> 15) ^ high[:, None]
    bits = (bits * 0x735A2D97) & MASK32
    return bits ^ (bits >> 15)


def edge_softmax(logits: Tensor, target: Tensor, num_targets: int) -> Tensor:
    """Return the softmax of each column over the edges into each target; 0 if all logits of a target are -inf.

    Args:
        logits: Logits of edges, [E, H].
        target: Target of each edge, int64 [E].
        num_targets: Number of targets.
    """
    spread, zeros = target[:, None].expand_as(logits), logits.new_zeros(num_targets, logits.shape[1])
    largest = zeros.scatter_reduce(0, spread, logits.detach(), "amax", include_self=False)
    powers = (logits - largest.clamp(min=torch.finfo(logits.dtype).min)[target]).exp()
    sums = zeros.index_add(0, target, powers)
    return powers / torch.where(sums == 0, 1, sums)[target]


def weigh(
    alpha: Tensor, bounds: Sequence[int], source: Tensor, target: Tensor, num_targets: int, h: Tensor, steps: int
) -> Tensor:
    """Return weighted sums of rows over in-edges, [n, F], applied several times with the same weights.

    Args:
        alpha: Weights of edges, [E, H].
        bounds: Column range of each head.
        source: Source of each edge, int64 [E].
        target: Target of each edge, int64 [E].
        num_targets: Number of targets.
        h: Source rows, [s, F].
        steps: Number of times that the sum is applied.
    """
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


def dot_logits(adj: Adjacency, left: Tensor, right: Tensor, *, bounds: Sequence[int]) -> Tensor:
    source, target = edges_and_loops(adj, None)
    products = left[source] * right[target]
    return torch.stack([products[:, begin:end].sum(1) for begin, end in pairwise(bounds)], 1)


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
    """Return the source and the target of every edge, and then of a self-loop at every target.

    Args:
        adj: The edges.
        loop: Mask of self-loops; None: return no self-loops.
    """
    source, target = adj.edges()
    if loop is None:
        return source, target
    loop_ids = torch.arange(adj.num_targets, device=source.device)
    return torch.cat([source, loop_ids]), torch.cat([target, loop_ids])


def keyed_dropout(
    x: Tensor, rows: Tensor, *, key: RandomKey, p: float, first_column: int = 0, relu: bool = False
) -> Tensor:
    x = torch.relu(x) if relu else x
    return torch.where(keep_mask(rows, x.shape[1], key, p, first_column), x * (1 / (1 - p)), 0)


def keep_mask(rows: Tensor, width: int, key: RandomKey, p: float, first_column: int) -> Tensor:
    """Return a mask of the elements that are not dropped, bool [n, width].

    An element is dropped if the 32-bit hash of (key, row, column) is less than `p * 2**32`.

    Args:
        rows: Global vertex id of each row, int64 [n].
        width: Number of columns.
        key: Random key of the mask.
        p: Probability that an element is dropped.
        first_column: Global number of the first column.
    """
    column = torch.arange(first_column, first_column + width, device=rows.device)
    return hashed(mix64_each(rows ^ key_word(key)), column) >= int(p * 2**32)
