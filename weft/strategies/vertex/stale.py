"""Vertex parallelism with old halos: approximate, after Sancus (Peng et al. 2022) and PipeGCN (Wan et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from weft.comm import EdgeSlices, Group, Halo, PendingRows, Route
from weft.config.strategy_flags import StaleFlags
from weft.parallel.blocks.blocks import Halos
from weft.parallel.blocks.vertex_blocks import VertexBlocks
from weft.parallel.blocks.vertex_layout import VertexLayout
from weft.strategies.base import Step, VertexOptions
from weft.strategies.resident import ResidentPlan
from weft.strategies.vertex.plan import PlacedVertices, make_vertex_blocks


class HaloHistory:
    """Rows and gradients that one exchange of a training step last received."""

    def __init__(self) -> None:
        self.age = 0
        """Number of training steps since the last exchange."""
        self.fresh = True
        """True if this step exchanges rows."""
        self.rows: Tensor | None = None
        """Received rows [h, F]."""
        self.gradients: Tensor | None = None
        """Received gradients of the rows that were sent."""
        self.sent: Tensor | None = None
        """Rows that were sent, if they are compared with the present ones."""


class StaleRows:
    """Rows of an earlier step in place of an exchange.

    Args:
        rows: The rows [h, F].
        counts: Number of rows of each rank.
        history: History that has the rows.
    """

    def __init__(self, rows: Tensor, counts: Sequence[int], history: HaloHistory) -> None:
        self.history = history
        self._rows = rows.detach()
        self._parts = self._rows.split(list(counts))

    def wait(self, rank: int | None = None) -> Tensor:
        return self._rows if rank is None else self._parts[rank]


class RecordedRows:
    """Rows in transit, which a history keeps for later steps.

    Args:
        pending: The exchange.
        history: History that gets the rows.
        kind: Field of the history.
    """

    def __init__(self, pending: PendingRows, history: HaloHistory, kind: Literal["rows", "gradients"]) -> None:
        self._pending, self.history, self._kind = pending, history, kind

    def wait(self, rank: int | None = None) -> Tensor:
        rows = self._pending.wait(rank)
        if rank is None:
            setattr(self.history, self._kind, rows.detach())
        return rows


class StaleHalo(Halo):
    """Halo whose rows, and whose gradients on the way back, may be those of an earlier step.

    It exchanges after `every` training steps, and earlier if the rows to send have changed by more than `bound`. An
    evaluation always exchanges.

    Args:
        route: Rows that ranks exchange.
        group: The ranks.
        name: Name of the exchange.
        every: Training steps between two exchanges.
        bound: Relative change (norm over all ranks, since the last exchange) after which to exchange; 0: ignore
            changes.
        ring: True to receive the rows rank by rank.
        overlap: True to aggregate local rows while halo rows are in transit.
    """

    def __init__(
        self, route: Route, group: Group, *, name: str, every: int, bound: float, ring: bool, overlap: bool
    ) -> None:
        super().__init__(route, group, name=name, ring=ring, overlap=overlap)
        self.every, self.bound = every, bound
        self.training = False
        self._histories: list[HaloHistory] = []

    def begin(self, training: bool) -> None:
        """Begin a step: reset the count of exchanges in it."""
        self.training = training
        self._num_calls = 0

    def fetch(self, x: Tensor) -> Tensor:
        with self._exchange_of_constants():
            return super().fetch(x)

    def complete(self, *rows: Tensor) -> tuple[Tensor, ...]:
        with self._exchange_of_constants():
            return super().complete(*rows)

    def product(self, x: Tensor, slices: EdgeSlices) -> Tensor:
        with self._exchange_of_constants():
            return super().product(x, slices)

    @contextmanager
    def _exchange_of_constants(self) -> Iterator[None]:
        """Exchange rows in the `with` block as in an evaluation if gradients are off.

        An aggregate of constant features is computed once, in the first step, so its exchange must not count as one of
        each step. `start` cannot check this: inside an `autograd.Function`, gradients are always off.
        """
        training, self.training = self.training, self.training and torch.is_grad_enabled()
        try:
            yield
        finally:
            self.training = training

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
        """Return whether the rows of all ranks together have changed by more than the bound."""
        if not self.bound:
            return False
        assert history.sent is not None
        change = (rows - history.sent).square().sum()
        norms = self.group.all_reduce(torch.stack([change, history.sent.square().sum()]), tag="staleness")
        return bool(norms[0] > self.bound**2 * norms[1])


@dataclass(frozen=True, kw_only=True)
class StaleOptions(StaleFlags, VertexOptions):
    """Options of `stale`: when halos are exchanged."""


class StaleLayout(VertexLayout):
    """Layout of vertex parallelism whose halos may be old.

    Args:
        blocks: Vertices that each rank computes and fetches, and sizes of its blocks.
        options: When halos are exchanged.
    """

    def __init__(self, blocks: VertexBlocks, options: StaleOptions) -> None:
        super().__init__(blocks)
        self.options = options

    def make_halo(self, route: Route, group: Group, name: str) -> StaleHalo:
        options, optimisations = self.options, self.work.optimisations
        every, bound = options.refresh_every, options.staleness
        return StaleHalo(
            route, group, name=name, every=every, bound=bound, ring=optimisations.ring, overlap=optimisations.overlap
        )

    def meta_exchanges(self, rank: int, *, training: bool) -> Sequence[Halos]:
        exchanges = super().meta_exchanges(rank, training=training)
        begin_step(exchanges, training=training)  # its halos have no old rows, so it exchanges all
        return exchanges


def begin_step(exchanges: Sequence[Halos], *, training: bool) -> None:
    """Tell the halos of all stages that a step begins.

    Args:
        exchanges: Exchange of each stage.
        training: True for a training step.
    """
    for halo in {halo for stage in exchanges for block in stage.blocks for halo in (block.halo, block.least_halo)}:
        if isinstance(halo, StaleHalo):
            halo.begin(training)


class PlacedStale(PlacedVertices):
    """Plan of `stale` on a rank; tells its halos when a step begins."""

    plan: StalePlan

    def forward(self, step: Step) -> Tensor:
        begin_step(self.whole.exchanges, training=step.training)
        return super().forward(step)


class StalePlan(ResidentPlan):
    """Plan of `stale`: layers use remote rows that are some steps old, and gradients reach the owners with equal delay.

    The trace describes a step that exchanges rows; all other steps use the old ones. It leaves out the exchange of the
    two numbers that `staleness` compares. Checkpoints do not include old rows: a resumed run begins with an exchange.
    """

    name = "stale"
    options_type = StaleOptions
    exact = False
    evaluates_as = "communicated"
    optimisations = ("ring", "overlap", "cover")
    placed_type = PlacedStale
    options: StaleOptions

    def make_layout(self) -> StaleLayout:
        return StaleLayout(make_vertex_blocks(self, ratio=0.0), self.options)

    def extra_memory(self, rank: int) -> int:
        """Return the bytes of the last exchange: rows, gradients, and the rows that it sent if these are compared.

        Args:
            rank: The rank.
        """
        num_bytes = 0
        for op in self.work.outline(self.traits, training=True):
            halos = [] if self.work.is_cached(op) or op.op == "embed" else self.layout.forward_operations(op, rank)
            received, sent = (sum(getattr(halo, name) for halo in halos) for name in ("bytes_received", "bytes_sent"))
            num_bytes += received + sent * (op.backward + bool(self.options.staleness))
        return num_bytes
