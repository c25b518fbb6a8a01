"""Link scores equal scikit-learn's area under the curve, and ranks computed one by one."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import roc_auc_score

from tests.data.test_links import NAMES, make
from weft.comm import Group
from weft.data import Links, with_held_out_links
from weft.nn import DistMult, Dot
from weft.training.tasks import ranking
from weft.training.tasks.ranking import auc, filtered_ranks, rank_scores


def test_auc_is_sklearns() -> None:
    random = torch.Generator().manual_seed(0)
    for ties in (False, True):
        positive, negative = torch.randn(83, generator=random) + 0.5, torch.randn(57, generator=random)
        if ties:
            positive, negative = positive.round(), negative.round()
        labels = torch.cat([torch.ones(83), torch.zeros(57)])
        expected = roc_auc_score(labels.numpy(), torch.cat([positive, negative]).numpy())
        assert auc(positive, negative) == pytest.approx(expected, abs=1e-12)


def oracle(z: torch.Tensor, links: Links, requested: torch.Tensor, decoder: Dot | DistMult) -> list[float]:
    """Return the filtered rank of every link's target, then of every source, by definition.

    A rank is 1 + the number of candidates with a higher score + half of those with an equal score. Candidates are all
    vertices with which the pair is not a link.
    """
    true = {tuple(row) for row in torch.cat([links.edges, links.val, links.test]).tolist()}
    if links.symmetric:
        true |= {(v, u, r) for u, v, r in true}
    ranks = []
    for side in (1, 0):
        for link in requested.tolist():
            scores = {}
            for vertex in range(*links.candidates[link[2], side].tolist()):
                u, v = (link[0], vertex) if side else (vertex, link[1])
                if vertex == link[side] or ((u, v, link[2]) not in true and (links.typed or u != v)):
                    query = decoder.query(z[u : u + 1], torch.tensor(link[2:]))
                    scores[vertex] = float((query * z[v]).sum())
            score = scores.pop(link[side])
            tied = sum(abs(other - score) < 1e-12 for other in scores.values())
            ranks.append(1 + sum(other > score + 1e-12 for other in scores.values()) + tied / 2)
    return ranks


@pytest.mark.parametrize("name", NAMES)
def test_filtered_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks computed in blocks equal those by definition, also with halves, because many vertices have equal rows."""
    monkeypatch.setattr(ranking, "MAX_SCORES", 60 * 7)
    links = Links.of(with_held_out_links(make(name), 1))
    random = torch.Generator().manual_seed(5)
    z = torch.randn(60, 6, generator=random, dtype=torch.float64)
    z[torch.arange(60) % 3 == 0] = z[0].clone()
    decoders = [Dot(), DistMult(links.num_relations, 6).double()]
    for decoder, requested in ((decoders[0], links.test), (decoders[1], links.val)):
        with torch.no_grad():
            ranks = filtered_ranks(z, links, requested, torch.arange(60), decoder, Group())
            expected = oracle(z, links, requested, decoder)
        assert ranks.tolist() == expected
        scores = rank_scores("test", ranks)
        assert scores["test_mrr"] == pytest.approx(sum(1 / rank for rank in expected) / len(expected))
        assert scores["test_hits@3"] == pytest.approx(sum(rank <= 3 for rank in expected) / len(expected))
    assert any(rank % 1 for rank in expected) or name == "bipartite"
