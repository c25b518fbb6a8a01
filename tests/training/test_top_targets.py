"""Metrics of recommender systems equal those computed source by source in Python, on any number of ranks."""

from __future__ import annotations

from collections import defaultdict
from math import log2
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.test_links import NAMES, make
from tests.lib.ranks import on_ranks
from weft.comm import Group
from weft.data import Links, reorder, with_held_out_links
from weft.nn import DistMult, Dot
from weft.training.tasks import ranking
from weft.training.tasks.top_targets import decode_keys, encode_keys, top_scores, top_targets


def rows_with_ties(ids: Tensor) -> Tensor:
    """Return rows [60, 6] by original id; a third of them are equal, so that many scores are."""
    z = torch.randn(60, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    z[torch.arange(60) % 3 == 0] = z[0].clone()
    return z[ids]


def best_by_definition(z: Tensor, links: Links, decoder: Dot | DistMult, source: int, relation: int) -> list[int]:
    """Return the candidates of a source, the best first; of equal scores, the smaller id comes first."""
    edges = {(u, v) for u, v, r in links.edges.tolist() if r == relation}
    candidates = [
        vertex
        for vertex in range(*links.candidates[relation, 1].tolist())
        if (source, vertex) not in edges and (links.typed or vertex != source)
    ]
    query = decoder.query(z[source : source + 1], torch.tensor([relation]))[0]
    score = {vertex: float((query * z[vertex]).sum().float()) for vertex in candidates}
    return sorted(candidates, key=lambda vertex: (-score[vertex], vertex))


def by_definition(z: Tensor, links: Links, decoder: Dot | DistMult, ks: list[int]) -> dict[str, float]:
    """Return the metrics of the test links, one source and relation after the other."""
    targets = defaultdict(set)
    for u, v, r in links.test.tolist():
        targets[u, r].add(v)
        if links.symmetric:
            targets[v, r].add(u)
    scores: dict[str, list[float]] = defaultdict(list)
    for (source, relation), true in targets.items():
        best = best_by_definition(z, links, decoder, source, relation)
        for k in ks:
            gains = [1 / log2(position + 2) for position, vertex in enumerate(best[:k]) if vertex in true]
            ideal = sum(1 / log2(position + 2) for position in range(min(k, len(true))))
            scores[f"recall@{k}"].append(len(gains) / len(true))
            scores[f"ndcg@{k}"].append(sum(gains) / ideal)
            scores[f"hit_rate@{k}"].append(float(len(gains) > 0))
    return {name: sum(values) / len(values) for name, values in scores.items()}


def check(group: Group, name: str, order: str, ks: list[int], expected: dict[str, Any]) -> None:
    """Check the metrics of rows that are spread over the ranks."""
    ranking.MAX_SCORES = 60 * 7
    graph = reorder(with_held_out_links(make(name), 1), order)
    links = Links.of(graph)
    ids = torch.arange(60) if graph.ids is None else graph.ids
    vertices = torch.arange(60)[group.rank :: group.size]
    row = torch.full((60,), -1)
    row[vertices] = torch.arange(len(vertices))
    z, queries = rows_with_ties(ids)[vertices], links.queries(links.directed(links.test))
    with torch.no_grad():
        blocks = top_targets(z, links, queries, ks[-1], row, decoder_of(links), group)
        scores = top_scores(blocks, links, links.test, ks)
    assert scores == pytest.approx(expected, abs=1e-12)


def decoder_of(links: Links) -> Dot | DistMult:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return DistMult(links.num_relations, 6).double() if links.typed else Dot()


@pytest.mark.parametrize("name", NAMES)
def test_metrics(name: str) -> None:
    links = Links.of(with_held_out_links(make(name), 1))
    for ks in ([1, 5, 20], [100]):
        with torch.no_grad():
            expected = by_definition(rows_with_ties(torch.arange(60)), links, decoder_of(links), ks)
        assert max(expected.values()) > 0
        order = "none" if len(make(name).vertex_types) > 1 else "degree"
        check(Group(), name, "none", ks, expected)
        check(Group(), name, order, ks, expected)
        on_ranks(3, check, name, order, ks, expected)


def test_keys() -> None:
    """Keys order candidates by score and then by id, and contain both."""
    scores = torch.tensor([3.0, -0.0, 0.0, -1e-30, -2.0, float("inf"), -float("inf"), 3.0])
    ids = torch.tensor([5, 1, 0, 7, (1 << 31) - 1, 3, 4, 2])
    keys = encode_keys(scores, ids)
    assert ids[keys.argsort(descending=True)].tolist() == [3, 2, 5, 0, 1, 7, (1 << 31) - 1, 4]
    decoded_ids, decoded_scores = decode_keys(keys)
    assert torch.equal(decoded_ids, ids)
    assert torch.equal(decoded_scores, scores)
