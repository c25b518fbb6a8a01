"""Metrics of link prediction: area under the ROC curve, and filtered ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from weft.comm import Group
from weft.cost import Operation, all_reduce
from weft.data import Links
from weft.nn import Decoder
from weft.training.tasks.row_batching import parts_in_memory

MAX_SCORES = 1 << 23
"""Number of scores that all ranks together keep in memory at once."""
HITS = (1, 3, 10)
"""Values k of the metric hits@k that always come with the mean reciprocal rank."""


def auc(positive: Tensor, negative: Tensor) -> float:
    """Return the area under the ROC curve: the probability that a positive scores higher than a negative.

    Ties count half. Scores are compared in float32, so that rounding differences between ranks and strategies do not
    break ties.

    Args:
        positive: Scores of the links.
        negative: Scores of the other pairs.
    """
    low, values = negative.float().sort().values, positive.float()
    below, not_above = (torch.searchsorted(low, values, right=right).sum() for right in (False, True))
    return float(below + not_above) / (2 * len(positive) * len(negative))


def rank_scores(split: str, ranks: Tensor, ks: Iterable[int] = ()) -> dict[str, float]:
    """Return mean reciprocal rank and hits@k.

    Args:
        split: Name of the split, for the names of the scores.
        ranks: Rank of each link, from 1, float64.
        ks: Further values of k.
    """
    hits = {f"{split}_hits@{k}": float((ranks <= k).double().mean()) for k in sorted({*HITS, *ks})}
    return {f"{split}_mrr": float((1 / ranks).mean()), **hits}


def sampled_ranks(scores: Tensor, negatives: Tensor) -> Tensor:
    """Rank each link among its negative samples, as OGB does; tied links share the mean of their possible ranks.

    Scores are compared in float32, as in `auc`.

    Args:
        scores: Scores of the links, [m].
        negatives: Scores of the negative samples of each link, [m, S].

    Returns:
        Ranks from 1, float64 [m].
    """
    own_scores, others = scores.float()[:, None], negatives.float()
    return 1 + (others > own_scores).sum(1).double() + (others == own_scores).sum(1).double() / 2


def filtered_ranks(
    z: Tensor, links: Links, queries: Tensor, row_of_vertex: Tensor, decoder: Decoder, group: Group
) -> Tensor:
    """Rank each link among all links with another target, and among all with another source.

    Other true links are excluded (Bordes et al. 2013, the filtered setting), and so are vertices of types that the
    relation does not connect. Tied links share the mean of the first and last rank that they could have. Scores that
    differ by no more than rounding count as tied, so that the result does not depend on the order of sums.

    Each rank compares its own rows. Only the rows of the endpoints are exchanged, and the counts.

    Args:
        z: Rows of this rank, [n, D].
        links: All links of the graph.
        queries: The links to rank, [m, 3], the same on every rank.
        row_of_vertex: Row of each vertex in z, or -1, int64 [N].
        decoder: The decoder.
        group: The ranks.

    Returns:
        Ranks from 1, float64 [2 m]: among targets, then among sources.
    """
    parts = [
        _block_ranks(z, links, block, row_of_vertex, decoder, group)
        for block in queries.split(block_size(links.num_vertices))
    ]
    return torch.cat(parts, 1).view(-1)


def block_size(num_vertices: int) -> int:
    """Return the number of links that are ranked at once."""
    return max(1, MAX_SCORES // num_vertices)


def ranking_operations(num_links: int, num_vertices: int, width: int, itemsize: int, size: int) -> list[Operation]:
    """Return the exchanges of `filtered_ranks`.

    Args:
        num_links: Number of links to rank.
        num_vertices: Number of vertices.
        width: Width of a row.
        itemsize: Bytes of each number.
        size: Number of ranks.
    """
    at_once = block_size(num_vertices)
    operations = []
    for first in range(0, num_links if size > 1 else 0, at_once):
        count = min(at_once, num_links - first)
        operations.append(all_reduce("ends", 2 * count * width, itemsize, size))
        operations.append(all_reduce("ranks", 4 * count, 8, size))
    return operations


def _block_ranks(
    z: Tensor, links: Links, block: Tensor, row_of_vertex: Tensor, decoder: Decoder, group: Group
) -> Tensor:
    """Return the ranks [2, b] of the b links of a block."""
    rows_here = row_of_vertex[block[:, :2]].t().to(z.device)  # [2, b]
    endpoints = z.new_zeros(2, len(block), z.shape[1])
    endpoints[rows_here >= 0] = z[rows_here[rows_here >= 0]]
    endpoints = group.all_reduce(endpoints, tag="ends")
    relation = block[:, 2].to(z.device)
    counts = []
    # For each end of the links, and each row of this rank: score the link with that row in place of the end. Count
    # scores above the true score, and scores equal to it up to rounding. A float sum of D products is exact to
    # D * eps * (product of the norms).
    for end in (1, 0):
        query, true_row = decoder.query(endpoints[1 - end], relation), endpoints[end]
        score = (query * true_row).sum(1)
        rounding = z.shape[1] * torch.finfo(z.dtype).eps * query.norm(dim=1) * true_row.norm(dim=1)
        excluded = _excluded(links, block, end, row_of_vertex, len(z))
        count = rows_here.new_zeros(2, len(block))
        for rows in parts_in_memory(z):
            scores = query @ z[rows].t()  # [b, n]
            scores.masked_fill_(excluded[:, rows].to(z.device), -torch.inf)
            higher = (scores > (score + rounding)[:, None]).sum(1)
            count += torch.stack([higher, (scores >= (score - rounding)[:, None]).sum(1) - higher])
        counts.append(count)
    higher, tied = group.all_reduce(torch.stack(counts, 1), tag="ranks").double()
    ranks: Tensor = 1 + higher + tied / 2
    return ranks


def _excluded(links: Links, block: Tensor, end: int, row_of_vertex: Tensor, num_rows: int) -> Tensor:
    """Return which rows [b, n] to exclude for one end of each link: other true links, and vertices of wrong types."""
    link, vertex = links.true_endpoints(block, end)
    row = row_of_vertex[vertex]
    excluded = torch.zeros(len(block), num_rows, dtype=torch.bool)
    if links.num_types > 1:
        vertices = (row_of_vertex >= 0).nonzero()[:, 0]
        vertices = vertices[row_of_vertex[vertices].argsort()]  # in the order of the rows
        first, stop = links.candidates[block[:, 2], end].unbind(1)
        excluded |= (vertices < first[:, None]) | (vertices >= stop[:, None])
    excluded[link[row >= 0], row[row >= 0]] = True
    if not links.typed:  # a vertex is not linked to itself
        itself = row_of_vertex[block[:, 1 - end]]
        excluded[itself >= 0, itself[itself >= 0]] = True
    return excluded
