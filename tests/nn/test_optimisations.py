"""Every optimisation changes only time and memory: training without it gives the same losses and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.lib.cases import Case
from tests.lib.session import Session
from weft.comm import Group
from weft.config.optimisations import OPTIMISATIONS, Optimisations
from weft.kernels import spmm
from weft.nn.sparse_rows import SparseRows

CASES = {
    "constant": Case(model="gcn", layers=2, hidden=16),
    "widening": Case(model="gcn", layers=3, hidden=16, input_dropout=0.3, weighted=True),
    "narrowing": Case(model="sage", layers=2, hidden=3, norm="layer"),
    "residual": Case(model="gin", layers=4, hidden=7, residual=True),
    "attention": Case(model="gat", layers=2),
    "decoupled": Case(model="gin", decoupled=True),
    "sparse": Case(model="sage", layers=2, sparse=True),
    "sparse, decoupled": Case(model="gcn", decoupled=True, sparse=True),
    "sparse, by type": Case(model="rgcn", typed="some", layers=2, sparse=True),
}


@pytest.mark.parametrize("saving", ["reuse", "swap", "sparse", "fuse"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_losses(saving: str, case: Case) -> None:
    plain = Session(replace(case, without=saving), "single", Group())
    assert not getattr(plain.plan.work.optimisations, saving)
    saved = Session(case, "single", Group())
    losses, others = (session.losses(4, session.step(0)[1]) for session in (plain, saved))
    assert losses == pytest.approx(others, rel=1e-12, abs=1e-12)
    for name, gradient in saved.gradients().items():
        torch.testing.assert_close(plain.gradients()[name], gradient, rtol=1e-10, atol=1e-12)


def test_an_optimisation_can_be_turned_off() -> None:
    """Without a cached aggregate, or with the more expensive order, an epoch processes more edges."""
    edges = {}
    for without in ("", "reuse", "swap"):
        session = Session(Case(model="gcn", layers=3, hidden=16, without=without), "single", Group())
        session.losses(2, session.step(0)[1])
        edges[without] = session.meter.take("train").edges
    assert edges[""] < edges["reuse"]
    assert edges[""] < edges["swap"]


@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_sparse_features_are_multiplied_by_their_nonzeros(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    recorded = lambda adj, x, **options: calls.append((adj, x.device)) or spmm(adj, x, **options)  # noqa: E731
    monkeypatch.setattr("weft.nn.sparse_rows.spmm", recorded)
    for without in ("", "sparse"):
        calls.clear()
        session = Session(Case(model=model, layers=2, sparse=True, without=without), "single", Group())
        session.step(0)
        inputs = session.inputs
        assert sum(adj.num_sources == 300 and device.type == "cpu" for adj, device in calls) == (not without)
        assert bool(inputs.cached) == (model != "gat" and without == "sparse")
    assert not isinstance(Session(Case(model=model), "single", Group()).inputs.rows, SparseRows)


def test_names_of_optimisations() -> None:
    assert Optimisations.without("reuse,pages") == Optimisations(reuse=False, pages=False)
    resident = ("reuse", "swap", "sparse", "fuse", "onednn", "lines", "reach", "ring", "overlap", "cover", "pipeline")
    chunked = ("share", "keep", "reorder", "prefetch", "inter", "priority", "eager", "capture", "pages")
    assert (*resident, *chunked) == OPTIMISATIONS
