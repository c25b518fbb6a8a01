"""Each optimisation changes nothing but time and memory: training with it left out gives the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.lib.cases import Case
from tests.lib.session import Session
from weft.comm import Group
from weft.config.optimisations import OPTIMISATIONS, Optimisations
from weft.kernels import spmm

CASES = {
    "constant": Case(model="gcn", layers=2, hidden=16),
    "widening": Case(model="gcn", layers=3, hidden=16, input_dropout=0.3, weighted=True),
    "narrowing": Case(model="sage", layers=2, hidden=3, norm="layer"),
    "residual": Case(model="gin", layers=4, hidden=7, residual=True),
    "attention": Case(model="gat", layers=2),
    "decoupled": Case(model="gin", decoupled=True),
    "sparse": Case(model="sage", layers=2, sparse=True),
    "sparse, decoupled": Case(model="gcn", decoupled=True, sparse=True),
}


@pytest.mark.parametrize("saving", ["reuse", "swap", "sparse", "fuse"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_losses(saving: str, case: Case) -> None:
    plain = Session(replace(case, without=saving), "single", Group())
    assert not getattr(plain.plan.work.optimisations, saving)
    saved = Session(case, "single", Group())
    losses, others = (each.losses(4, each.step(0)[1]) for each in (plain, saved))
    assert losses == pytest.approx(others, rel=1e-12, abs=1e-12)
    for name, gradient in saved.gradients().items():
        torch.testing.assert_close(plain.gradients()[name], gradient, rtol=1e-10, atol=1e-12)


def test_what_is_left_out_is_done() -> None:
    """Without the kept aggregate, or in the dearer order, an epoch multiplies more."""
    edges = {}
    for without in ("", "reuse", "swap"):
        session = Session(Case(model="gcn", layers=3, hidden=16, without=without), "single", Group())
        session.losses(2, session.step(0)[1])
        edges[without] = session.meter.take("train").edges
    assert edges[""] < edges["reuse"]
    assert edges[""] < edges["swap"]


@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_sparse_features_are_mapped_by_their_nonzeros(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    watched = lambda adj, x, **options: seen.append(adj) or spmm(adj, x, **options)  # noqa: E731
    monkeypatch.setattr("weft.nn.graph_view.spmm", watched)
    for without in ("", "sparse"):
        seen.clear()
        session = Session(Case(model=model, layers=2, sparse=True, without=without), "single", Group())
        session.step(0)
        inputs = session.inputs
        assert sum(adj.num_sources == 300 for adj in seen) == (not without)
        assert bool(inputs.cached) == (model != "gat" and without == "sparse")
    assert not Session(Case(model=model), "single", Group()).inputs.sparse


def test_names() -> None:
    assert Optimisations.without("reuse,pages") == Optimisations(reuse=False, pages=False)
    resident = ("reuse", "swap", "sparse", "fuse", "onednn", "lines", "reach", "ring", "overlap", "cover", "pipeline")
    chunked = ("share", "keep", "reorder", "prefetch", "inter", "priority", "eager", "capture", "pages")
    assert (*resident, *chunked) == OPTIMISATIONS
