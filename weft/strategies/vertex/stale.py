"""Vertex parallelism with old halos: approximate, after Sancus (Peng et al. 2022) and PipeGCN (Wan et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from weft.comm import Group, Halo, PendingRows, Route
from weft.strategies.base import MemoryUse, Step
from weft.strategies.vertex.plan import CommunicatedPlan, PlacedVertices, VertexOptions


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


class StaleRows:
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

    def start(self, rows: Tensor) -> PendingRows:
        if not self.training:
            return super().start(rows)
        call, self._num_calls = self._num_calls, self._num_calls + 1
        if call == len(self._histories):
            self._histories.append(HaloHistory())
        history = self._histories[call]
        history.age += 1
        history.fresh = history.rows is None or history.age >= self.every or self._changed(rows, history)
        if not history.fresh:
            assert history.rows is not None
            return StaleRows(history.rows, self.route.received, history)
        history.age = 0
        if self.bound:
            history.sent = rows
        return RecordedRows(super().start(rows), history, "rows")

    def start_back(self, grad: Tensor, history: Any) -> PendingRows:
        if history is None:
            return super().start_back(grad, history)
        if not history.fresh:
            assert history.gradients is not None
            return StaleRows(history.gradients, self.route.sent, history)
        return RecordedRows(super().start_back(grad, history), history, "gradients")

    def _changed(self, rows: Tensor, history: HaloHistory) -> bool:
        """Whether the ranks' rows, taken together, have moved by more than the bound."""
        if not self.bound:
            return False
        assert history.sent is not None
        moved = (rows - history.sent).square().sum()
        both = self.group.all_reduce(torch.stack([moved, history.sent.square().sum()]), tag="staleness")
        return bool(both[0] > self.bound**2 * both[1])


@dataclass(frozen=True, kw_only=True)
class StaleOptions(VertexOptions):
    """And of when halos are exchanged."""

    refresh_every: int = 4
    """Training steps between two exchanges."""
    staleness: float = 0.0
    """The change of rows, as a share, that is exchanged before that; 0: none."""


class StalePlan(CommunicatedPlan):
    """Layers see remote rows as they were some steps ago, and owners get their gradients as late.

    Its trace is that of a step which exchanges, without the two numbers that `staleness` compares; in between, there is
    no halo. Not part of checkpoints: a resumed run begins with an exchange.
    """

    name = "stale"
    options_type = StaleOptions
    exact = False
    evaluates_as = "communicated"
    optimisations = ("ring", "overlap", "cover")
    options: StaleOptions

    def make_halo(self, route: Route, group: Group, name: str) -> StaleHalo:
        options, on = self.options, self.work.optimisations
        every, bound = options.refresh_every, options.staleness
        return StaleHalo(route, group, name=name, every=every, bound=bound, ring=on.ring, overlap=on.overlap)

    def resident_memory(self, rank: int, *, trains: bool = True) -> MemoryUse:
        """And what exchanges last brought, both ways; with a bound, also what they sent."""
        known, tables = super().resident_memory(rank, trains=trains), 0
        for op in self.work.outline(self.traits, training=True):
            halos = [] if self.work.is_cached(op) or op.op == "embed" else self.forward_operations(op, rank)
            received, sent = (sum(getattr(one, name) for one in halos) for name in ("bytes_received", "bytes_sent"))
            tables += received + sent * (op.backward + bool(self.options.staleness))
        return known._replace(device=known.device + tables)

    def place(self, group: Group, *, seed: int = 0) -> PlacedStale:
        return PlacedStale(self, group, seed=seed)


class PlacedStale(PlacedVertices):
    """Tells its halos when a step begins."""

    def forward(self, step: Step) -> Tensor:
        halos = {halo for blocks in self.whole.blocks for block in blocks for halo in (block.halo, block.least_halo)}
        for halo in halos:
            if isinstance(halo, StaleHalo):
                halo.begin(step.training)
        return super().forward(step)
