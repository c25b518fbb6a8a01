"""Vertex parallelism with old halos: approximate, after Sancus (Peng et al. 2022) and PipeGCN (Wan et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from weft.comm import Coming, Group, Halo, Route
from weft.strategies.base import Step
from weft.strategies.vertex.plan import CommunicatedPlan, PlacedVertices, VertexOptions


class Memory:
    """What one exchange of a step brought last. age: steps since. fresh: whether this step's is new."""

    def __init__(self) -> None:
        self.age, self.fresh = 0, True
        self.rows: Tensor | None = None
        self.gradients: Tensor | None = None
        self.sent: Tensor | None = None


class Arrived:
    """Rows that are here already, so many of each rank."""

    def __init__(self, rows: Tensor, counts: Sequence[int], memory: Memory) -> None:
        self.memory = memory
        self._rows = rows.detach()
        self._parts = self._rows.split(list(counts))

    def wait(self, rank: int | None = None) -> Tensor:
        return self._rows if rank is None else self._parts[rank]


class Remembered:
    """Rows on their way, of which a memory keeps a copy."""

    def __init__(self, coming: Coming, memory: Memory, kind: Literal["rows", "gradients"]) -> None:
        self._coming, self.memory, self._kind = coming, memory, kind

    def wait(self, rank: int | None = None) -> Tensor:
        rows = self._coming.wait(rank)
        if rank is None:
            setattr(self.memory, self._kind, rows.detach())
        return rows


class StaleHalo(Halo):
    """A halo whose rows, and whose gradients on the way back, may be those of an earlier step.

    They are exchanged anew after `every` training steps, and before that where the rows to be sent have changed by more
    than `bound` (over all ranks, against what was sent last; 0: never before). An evaluation always exchanges.
    """

    def __init__(self, route: Route, group: Group, *, every: int, bound: float, ring: bool, overlap: bool) -> None:
        super().__init__(route, group, ring=ring, overlap=overlap)
        self.every, self.bound = every, bound
        self.training = False
        self._memories: list[Memory] = []

    def begin(self, training: bool) -> None:
        """A step begins."""
        self.training = training
        self._num_calls = 0

    def start(self, x: Tensor) -> Coming:
        if not self.training:
            return super().start(x)
        call, self._num_calls = self._num_calls, self._num_calls + 1
        if call == len(self._memories):
            self._memories.append(Memory())
        memory = self._memories[call]
        memory.age += 1
        memory.fresh = memory.rows is None or memory.age >= self.every or self._changed(x, memory)
        if not memory.fresh:
            assert memory.rows is not None
            return Arrived(memory.rows, self.route.received, memory)
        memory.age = 0
        if self.bound:
            memory.sent = x.index_select(0, self.route.rows)
        return Remembered(super().start(x), memory, "rows")

    def start_back(self, grad: Tensor, memory: Any) -> Coming:
        if memory is None:
            return super().start_back(grad, memory)
        if not memory.fresh:
            assert memory.gradients is not None
            return Arrived(memory.gradients, self.route.sent, memory)
        return Remembered(super().start_back(grad, memory), memory, "gradients")

    def _changed(self, x: Tensor, memory: Memory) -> bool:
        """Whether the ranks' rows, taken together, have moved by more than the bound."""
        if not self.bound:
            return False
        assert memory.sent is not None
        moved = (x.index_select(0, self.route.rows) - memory.sent).square().sum()
        both = self.group.all_reduce(torch.stack([moved, memory.sent.square().sum()]), tag="staleness")
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
    options: StaleOptions

    def make_halo(self, route: Route, group: Group) -> StaleHalo:
        options, savings = self.options, self.work.savings
        every, bound = options.refresh_every, options.staleness
        return StaleHalo(route, group, every=every, bound=bound, ring=savings.ring, overlap=savings.overlap)

    def place(self, group: Group, *, seed: int = 0) -> PlacedStale:
        return PlacedStale(self, group, seed=seed)


class PlacedStale(PlacedVertices):
    """Tells its halos when a step begins."""

    def forward(self, step: Step) -> Tensor:
        halos = {id(block.halo): block.halo for blocks in self.blocks for block in blocks}
        for halo in halos.values():
            if isinstance(halo, StaleHalo):
                halo.begin(step.training)
        return super().forward(step)
