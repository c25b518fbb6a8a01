"""Vertex parallelism with old halos: approximate, after Sancus (Peng et al. 2022) and PipeGCN (Wan et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from weft.comm import Group, Halo, PendingRows, Route
from weft.strategies.base import Step
from weft.strategies.hybrid import Communicated


class HaloHistory:
    """What one exchange of a training step last brought."""

    def __init__(self) -> None:
        self.age = 0
        """Training steps since the last exchange."""
        self.fresh = True
        """Whether this step exchanges."""
        self.rows: Tensor | None = None
        """[h, F], received."""
        self.gradients: Tensor | None = None
        """Of the rows sent, received."""
        self.sent: Tensor | None = None
        """The rows sent, where they are compared with the present ones."""


class CachedRows:
    """Rows of an earlier step, so many of each rank; nothing is exchanged."""

    def __init__(self, rows: Tensor, counts: Sequence[int], history: HaloHistory) -> None:
        self.history = history
        self._rows = rows.detach()
        self._parts = self._rows.split(list(counts))

    def wait(self, rank: int | None = None) -> Tensor:
        return self._rows if rank is None else self._parts[rank]


class RecordedRows:
    """Rows on their way, which a history keeps for later steps."""

    def __init__(self, pending: PendingRows, history: HaloHistory, kind: Literal["rows", "gradients"]) -> None:
        self._pending, self.history, self._kind = pending, history, kind

    def wait(self, rank: int | None = None) -> Tensor:
        rows = self._pending.wait(rank)
        if rank is None:
            setattr(self.history, self._kind, rows.detach())
        return rows


class StaleHalo(Halo):
    """A halo whose rows, and whose gradients on the way back, may be those of an earlier step.

    They are exchanged anew after `every` training steps, and before that where the rows to be sent have changed by more
    than `bound` (over all ranks, against what was sent last; 0: never before). An evaluation always exchanges.
    """

    def __init__(
        self, route: Route, group: Group, *, name: str, every: int, bound: float, ring: bool, overlap: bool
    ) -> None:
        super().__init__(route, group, name=name, ring=ring, overlap=overlap)
        self.every, self.bound = every, bound
        self.training = False
        self._histories: list[HaloHistory] = []

    def begin(self, training: bool) -> None:
        """A step begins."""
        self.training = training
        self._num_calls = 0

    def start(self, x: Tensor) -> PendingRows:
        if not self.training:
            return super().start(x)
        call, self._num_calls = self._num_calls, self._num_calls + 1
        if call == len(self._histories):
            self._histories.append(HaloHistory())
        history = self._histories[call]
        history.age += 1
        history.fresh = history.rows is None or history.age >= self.every or self._changed(x, history)
        if not history.fresh:
            assert history.rows is not None
            return CachedRows(history.rows, self.route.received, history)
        history.age = 0
        if self.bound:
            history.sent = x.index_select(0, self.route.rows)
        return RecordedRows(super().start(x), history, "rows")

    def start_back(self, grad: Tensor, history: Any) -> PendingRows:
        if history is None:
            return super().start_back(grad, history)
        if not history.fresh:
            assert history.gradients is not None
            return CachedRows(history.gradients, self.route.sent, history)
        return RecordedRows(super().start_back(grad, history), history, "gradients")

    def _changed(self, x: Tensor, history: HaloHistory) -> bool:
        """Whether the ranks' rows, taken together, have moved by more than the bound."""
        if not self.bound:
            return False
        assert history.sent is not None
        moved = (x.index_select(0, self.route.rows) - history.sent).square().sum()
        both = self.group.all_reduce(torch.stack([moved, history.sent.square().sum()]), tag="staleness")
        return bool(both[0] > self.bound**2 * both[1])


class Stale(Communicated):
    """Layers see remote rows as they were some steps ago, and owners get their gradients as late.

    Its trace is that of a step which exchanges, without the two numbers that `staleness` compares; in between, there is
    no halo. Not part of checkpoints: a resumed run begins with an exchange.
    """

    def place(self) -> Tensor:
        self.halos: list[StaleHalo] = []
        return super().place()

    def forward(self, step: Step) -> Tensor:
        for halo in self.halos:
            halo.begin(step.training)
        return super().forward(step)

    def make_halo(self, route: Route, name: str) -> Halo:
        placement, savings = self.placement, self.savings
        halo = StaleHalo(
            route,
            self.group,
            name=name,
            every=placement.refresh_every,
            bound=placement.staleness,
            ring=savings.ring,
            overlap=savings.overlap,
        )
        self.halos.append(halo)
        return halo
