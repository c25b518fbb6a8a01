"""Stale halos: exact if every step refreshes them, otherwise those of the last refresh; exchanges are counted."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.lib.cases import Case
from tests.lib.pairwise import param
from tests.lib.ranks import on_ranks
from tests.lib.session import Flops, Given, Session, check_counts, check_flops
from weft.comm import Group, make_route
from weft.runtime.meter import Counts
from weft.strategies.vertex.stale import StaleHalo

CASES = [
    Case(model="gcn", input_dropout=0.3, norm="batch"),
    Case(model="gcn", decoupled=True),
    Case(model="gat"),
    Case(model="pyg-mixed"),  # exchanges rows also for an aggregate of constants, which is computed once
    Case(model="gat", decoupled=True, layers=2),
    Case(model="sage", layers=4),
]


class Pair:
    """Ten vertices assigned to two ranks in turn; each rank fetches the rows of three remote vertices."""

    def __init__(self, group: Group, *, every: int, bound: float, ring: bool = True) -> None:
        self.group, other = group, 1 - group.rank
        self.owned, self.fetched = torch.arange(group.rank, 10, 2), torch.arange(other, 6, 2)
        received = [3 * (rank == other) for rank in range(2)]
        route = make_route(self.fetched, received, self.owned, 5, group)
        self.halo = StaleHalo(route, group, name="halo", every=every, bound=bound, ring=ring, overlap=True)

    def fetch(self, whole: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the exchanges of a step; return the fetched rows, and the gradients that come back."""
        self.halo.begin(training=True)
        xs = [x[self.owned].requires_grad_() for x in whole]
        rows = [self.halo.fetch(x) for x in xs]
        torch.autograd.backward(rows, grads)
        return [row.detach() for row in rows], [x.grad for x in xs if x.grad is not None]


def random_rows(step: int, call: int, rank: int = 0) -> Tensor:
    return torch.randn(10, 4, generator=torch.Generator().manual_seed(100 * step + 10 * call + rank))


def check_memory(group: Group) -> None:
    """Check that each of three exchanges returns rows and gradients of the last refresh, also after evaluations."""
    for every, ring in product((1, 3), (True, False)):
        pair = Pair(group, every=every, bound=0.0, ring=ring)
        for step in range(7):
            grads = [random_rows(step, call, 1 + group.rank)[:3] for call in range(3)]
            rows, returned = pair.fetch([random_rows(step, call) for call in range(3)], grads)
            refresh_step = step - step % every
            for call in range(3):
                assert torch.equal(rows[call], random_rows(refresh_step, call)[pair.fetched])
                sent_back = random_rows(refresh_step, call, 2 - group.rank)[:3]
                assert torch.equal(returned[call], torch.cat([sent_back, torch.zeros(2, 4)]))
            pair.halo.begin(training=False)
            assert torch.equal(pair.halo.fetch(random_rows(step, 9)[pair.owned]), random_rows(step, 9)[pair.fetched])


def check_bound(group: Group) -> None:
    """Check the refreshes while only rank 0's rows grow: 0.1 of all rows is 0.14 of its rows since the last refresh."""
    pair = Pair(group, every=9, bound=0.1)
    unit = torch.ones(10, 4)
    means = []
    for factor in (1.0, 1.05, 1.09, 1.13, 1.15, 1.2, 1.3, 1.4):
        whole = torch.where(torch.arange(10)[:, None] % 2 == 0, factor * unit, unit)
        (rows,), _ = pair.fetch([whole], [torch.ones(3, 4)])
        means.append(round(float(rows.mean()), 2))
    assert means == ([1.0] * 8 if group.rank == 0 else [1.0] * 4 + [1.15] * 3 + [1.4])


def train(session: Session, steps: int) -> tuple[list[float], list[Counts]]:
    """Return the losses of Adam steps, summed over all ranks, and the counts of each step on this rank."""
    optimizer = torch.optim.Adam(session.model.parameters(), lr=0.02)
    losses, counts = [], []
    for epoch in range(steps):
        session.meter.take("train")
        loss = session.step(epoch)[1]
        counts.append(session.meter.take("train"))
        optimizer.step()
        losses.append(float(session.group.all_reduce(torch.tensor(loss, dtype=torch.float64), tag="test")))
    return losses, counts


def same_weights(left: Session, right: Session) -> bool:
    pairs = zip(left.model.state_dict().values(), right.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def without_halo(counts: Counter[str]) -> Counter[str]:
    return Counter({tag: count for tag, count in counts.items() if tag not in ("halo", "staleness")})


def check_steps(session: Session, counts: list[Counts], fresh: list[int]) -> None:
    """Check that steps in `fresh` exchange what the trace says, and that others compute as much without a halo."""
    trace = session.trace(training=True)
    assert trace.bytes_sent["halo"] > 0
    for step, counted in enumerate(counts):
        if step in fresh:
            counted.collectives.pop("staleness", None)
            counted.bytes_sent.pop("staleness", None)
            counted.bytes_received.pop("staleness", None)
            check_counts(counted, trace, session.case)
        else:
            assert counted.edges == trace.edges
            for kind in ("collectives", "bytes_sent", "bytes_received"):
                assert getattr(counted, kind)["halo"] == 0
                assert without_halo(getattr(counted, kind)) == without_halo(getattr(trace, kind))


def check_case(group: Group, case: Case) -> None:
    def stale(refresh_every: int, staleness: float = 0.0) -> Session:
        return Session(case, "stale", group, Given(refresh_every=refresh_every, staleness=staleness), traced=True)

    exact = Session(case, "communicated", group)
    losses, _ = train(exact, 7)

    always = stale(1)
    always_losses, counts = train(always, 7)
    assert always_losses == losses
    assert same_weights(always, exact)
    check_steps(always, counts, fresh=list(range(7)))

    third = stale(3)
    third_losses, counts = train(third, 7)
    assert third_losses[0] == losses[0]
    assert all(math.isfinite(old) and old != new for old, new in zip(third_losses[1:], losses[1:], strict=True))
    check_steps(third, counts, fresh=[0, 3, 6])

    tiny = stale(3, 1e-12)
    tiny_losses, counts = train(tiny, 7)
    assert tiny_losses == losses
    check_steps(tiny, counts, fresh=list(range(7)))

    huge = stale(3, 1e12)
    huge_losses, counts = train(huge, 7)
    assert huge_losses == third_losses
    compared = counts[1].collectives["staleness"]  # each exchange of the forward pass
    assert [count.collectives["staleness"] for count in counts] == [0, compared, compared] * 2 + [0]
    assert 0 < compared < counts[0].collectives["halo"]
    # Two float64 numbers for each exchange.
    assert counts[1].bytes_sent["staleness"] == counts[1].bytes_received["staleness"] == 16 * compared
    check_steps(huge, counts, fresh=[0, 3, 6])

    check_evaluation(exact, stale(3), third_losses)


def check_evaluation(exact: Session, stale: Session, losses: list[float]) -> None:
    """Check that evaluations exchange fresh halos, are exact, and do not change the training."""
    optimizer = torch.optim.Adam(stale.model.parameters(), lr=0.02)
    group = stale.group
    for epoch, loss in enumerate(losses):
        with Flops() as flops:
            rank_loss = stale.step(epoch)[1]
        check_flops(flops, stale.trace(training=True), stale.case)
        optimizer.step()
        assert float(group.all_reduce(torch.tensor(rank_loss, dtype=torch.float64), tag="test")) == loss
        exact.model.load_state_dict(stale.model.state_dict())
        expected = exact.evaluation()
        stale.meter.take("eval")
        with Flops() as flops:
            assert torch.equal(stale.evaluation(), expected)
        check_counts(stale.meter.take("eval"), stale.trace(training=False), stale.case)
        check_flops(flops, stale.trace(training=False), stale.case)


def test_stale_halos_are_those_of_the_last_refresh() -> None:
    on_ranks(2, check_memory)


def test_rows_that_change_much_are_refreshed() -> None:
    on_ranks(2, check_bound)


@pytest.mark.parametrize("case", [param(case, name=case.id, quick=case in CASES[::3]) for case in CASES])
def test_training_with_stale_halos(case: Case) -> None:
    on_ranks(2, check_case, case)
