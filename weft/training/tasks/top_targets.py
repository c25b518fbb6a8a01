"""Best targets of each source among all candidates, and the metrics of recommender systems that follow from them.

A *query* is a source and a relation: a link (source, target, relation) whose target is ignored. Its candidates are all
vertices that the relation allows as targets, apart from the targets of its training links and, in a graph without
relations, the source itself. Shapes: b queries of a block, c candidates on this rank, D columns, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from weft.comm import Group
from weft.cost import Operation, all_reduce
from weft.data import Links
from weft.nn import Decoder
from weft.training.tasks.ranking import block_size
from weft.training.tasks.row_batching import parts_in_memory

ID_BITS = (1 << 32) - 1
"""Bits of a key that hold the id of a vertex."""
MAGNITUDE_BITS = (1 << 31) - 1
"""Bits of a float32 number without its sign."""


def encode_keys(scores: Tensor, ids: Tensor) -> Tensor:
    """Return an int64 key for each candidate: a better candidate has a larger key, and no two keys are equal.

    Scores are compared in float32, so that rounding differences between ranks and strategies do not break ties. Of
    equal scores, the one of the vertex with the smaller original id is better.

    Args:
        scores: Scores, [..., c].
        ids: Original ids of the vertices, int64, of a shape that broadcasts with `scores`.
    """
    # Upper 32 bits: the score. The bits of floats ascend with their value, but descend below zero: invert them there.
    # Adding 0 turns -0.0 into 0.0. Lower 32 bits: the id, descending.
    bits = (scores.float() + 0.0).view(torch.int32).long()
    return (torch.where(bits < 0, bits ^ MAGNITUDE_BITS, bits) << 32) | (ID_BITS - ids)


def decode_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return original ids, int64, and scores, float32, of candidates; the inverse of `encode_keys`.

    Args:
        keys: Keys of any shape. A score of minus infinity means that there is no candidate.
    """
    bits = keys >> 32
    scores = torch.where(bits < 0, bits ^ MAGNITUDE_BITS, bits).int().view(torch.float32)
    return ID_BITS - (keys & ID_BITS), scores


def query_blocks(links: Links, queries: Tensor) -> Iterator[Tensor]:
    """Yield the queries in blocks [b, 3] of one relation each, which are small enough for all scores of a block.

    Args:
        links: All links of the graph.
        queries: The queries, ascending by relation.
    """
    relations, counts = queries[:, 2].unique_consecutive(return_counts=True)
    for relation, same_relation in zip(relations.tolist(), queries.split(counts.tolist()), strict=True):
        first, stop = links.candidates[relation, 1].tolist()
        yield from same_relation.split(block_size(stop - first))


def top_targets(
    z: Tensor, links: Links, queries: Tensor, k: int, row_of_vertex: Tensor, decoder: Decoder, group: Group
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the k best targets of each query, block by block. All ranks must iterate over it, and get the same results.

    Each rank scores its own rows. Only the rows of the sources are exchanged, and the best candidates of each rank.

    Args:
        z: Rows of this rank, [n, D].
        links: All links of the graph.
        queries: The queries, the same on every rank, ascending by relation.
        k: Number of targets.
        row_of_vertex: Row of each vertex in z, or -1, int64 [N].
        decoder: The decoder.
        group: The ranks.

    Yields:
        The queries of a block, [b, 3], and the keys of their targets, the best first, [b, k]. See `decode_keys`.
    """
    for block in query_blocks(links, queries):
        first, stop = links.candidates[block[0, 2], 1].tolist()
        vertices = (row_of_vertex[first:stop] >= 0).nonzero()[:, 0] + first  # [c]
        rows = row_of_vertex[vertices]
        consecutive = len(rows) > 0 and bool((rows.diff() == 1).all())
        candidates = z[int(rows[0]) : int(rows[-1]) + 1] if consecutive else z[rows.to(z.device)]
        ids = (vertices if links.ids is None else links.ids[vertices]).to(z.device)
        excluded = [part.to(z.device) for part in _excluded(links, block, vertices)]
        query = decoder.query(_source_rows(z, block, row_of_vertex, group), block[:, 2].to(z.device))
        keys = _keys_of_rank(query, candidates, ids, excluded, k)
        yield block, _best_of_ranks(keys, group)


def top_operations(links: Links, queries: Tensor, k: int, width: int, itemsize: int, size: int) -> list[Operation]:
    """Return the exchanges of `top_targets`.

    Args:
        links: All links of the graph.
        queries: The queries.
        k: Number of targets.
        width: Width of a row.
        itemsize: Bytes of each number.
        size: Number of ranks.
    """
    operations = []
    for block in query_blocks(links, queries):
        operations.append(all_reduce("ends", len(block) * width, itemsize, size))
        operations.append(all_reduce("top", len(block) * size * k, 8, size))
    return operations


def _source_rows(z: Tensor, block: Tensor, row_of_vertex: Tensor, group: Group) -> Tensor:
    """Return the rows [b, D] of the sources of a block on every rank."""
    row = row_of_vertex[block[:, 0]].to(z.device)
    rows = z.new_zeros(len(block), z.shape[1])
    rows[row >= 0] = z[row[row >= 0]]
    return group.all_reduce(rows, tag="ends")


def _excluded(links: Links, block: Tensor, vertices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs of a query and a candidate to exclude, as positions in `block` and in `vertices`, int64 [e]."""
    query, target = links.matching_targets(block, links.edge_codes)
    if not links.typed:  # a vertex is not linked to itself
        query, target = torch.cat([query, torch.arange(len(block))]), torch.cat([target, block[:, 0]])
    column = torch.searchsorted(vertices, target)
    here = column < len(vertices)
    here[here.clone()] = vertices[column[here]] == target[here]
    return query[here], column[here]


def _keys_of_rank(query: Tensor, candidates: Tensor, ids: Tensor, excluded: Sequence[Tensor], k: int) -> Tensor:
    """Return the keys [b, k] of the best targets of a block on this rank; without targets, keys of no candidate.

    Args:
        query: Queries of the decoder, [b, D].
        candidates: Rows of the candidates, [c, D].
        ids: Original ids of the candidates.
        excluded: Pairs to exclude, from `_excluded`.
        k: Number of targets.
    """
    no_candidate = encode_keys(query.new_full((len(query), k), -torch.inf), ids.new_zeros(()))
    keys, (row, column) = [no_candidate], excluded
    for part in parts_in_memory(candidates):
        scores = query @ candidates[part].t()  # [b, c]
        inside = (column >= part.start) & (column < part.stop)
        scores[row[inside], column[inside] - part.start] = -torch.inf
        keys.append(_best_keys(scores.float(), ids[part], k))
    return torch.cat(keys, 1).topk(k, 1).values


def _best_keys(scores: Tensor, ids: Tensor, k: int) -> Tensor:
    """Return the keys of the k best candidates of each row, [b, k], or of all if there are fewer.

    Args:
        scores: Scores, float32 [b, c].
        ids: Original ids of the candidates.
        k: Number of candidates.
    """
    # The scores alone decide unless candidates k and k + 1 are tied: only then compare the keys of the whole row.
    values, columns = scores.topk(min(k + 1, scores.shape[1]), 1)
    keys = encode_keys(values, ids[columns])[:, :k]
    if values.shape[1] > k:
        tied = (values[:, k] == values[:, k - 1]) & (values[:, k] > -torch.inf)
        keys[tied] = encode_keys(scores[tied], ids).topk(k, 1).values
    return keys


def _best_of_ranks(keys: Tensor, group: Group) -> Tensor:
    """Return the largest keys [b, k] of all ranks, descending, from the keys [b, k] of this rank."""
    of_all = keys.new_zeros(len(keys), group.size, keys.shape[1])
    of_all[:, group.rank] = keys
    best: Tensor = group.all_reduce(of_all, tag="top").flatten(1).topk(keys.shape[1], 1).values
    return best


def top_scores(
    blocks: Iterator[tuple[Tensor, Tensor]], links: Links, held_out: Tensor, ks: Sequence[int]
) -> dict[str, float]:
    """Return recall@k, ndcg@k and hit_rate@k, as means over the queries of a split.

    Args:
        blocks: Queries of the split and the keys of their targets, from `top_targets` with the largest k.
        links: All links of the graph.
        held_out: Links of the split, [m, 3].
        ks: Values of k.
    """
    # With n held-out targets of a query, and hits among its k best: recall = hits / n. The discounted cumulative gain
    # (DCG) is the sum of 1 / log2(1 + position) over hits; NDCG divides it by that of hits at the first min(k, n).
    codes = links.codes(links.directed(held_out)).unique()
    totals = torch.zeros(3, len(ks), dtype=torch.float64)
    num_queries, largest = 0, max(ks)
    discount = 1 / (torch.arange(largest, dtype=torch.float64) + 2).log2()
    ideal = discount.cumsum(0)
    for block, keys in blocks:
        ids, scores = decode_keys(keys.cpu())
        target_codes = links.codes(block)[:, None] + links.vertex_of_id[ids]
        position = torch.searchsorted(codes, target_codes).clamp(max=len(codes) - 1)
        hits = ((codes[position] == target_codes) & (scores > -torch.inf)).double()
        query, _ = links.matching_targets(block, codes)
        num_targets = torch.bincount(query, minlength=len(block))
        for number, k in enumerate(ks):
            first = hits[:, :k]
            gain = first @ discount[:k]
            best_gain = ideal[num_targets.clamp(max=k) - 1]
            totals[:, number] += torch.stack(
                [(first.sum(1) / num_targets).sum(), (gain / best_gain).sum(), (first.sum(1) > 0).sum()]
            )
        num_queries += len(block)
    means = (totals / num_queries).tolist()
    return {f"{name}@{k}": row[n] for name, row in zip(TOP_METRICS, means, strict=True) for n, k in enumerate(ks)}


TOP_METRICS = ("recall", "ndcg", "hit_rate")
"""Metrics that `top_scores` returns for each k."""
