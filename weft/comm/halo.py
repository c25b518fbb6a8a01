"""Rows to whoever lacks them, and aggregates over them (NeutronStar, sections 2.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from weft.comm.exchange_key import Key
from weft.comm.group import Group, PendingExchange
from weft.comm.route import Route
from weft.data import Adjacency
from weft.kernels import Scale, spmm, spmm_transposed


class PendingRows(Protocol):
    """Rows of other ranks that are on their way."""

    history: Any
    """What the halo wants to know of these rows when their gradients go back."""

    def wait(self, rank: int | None = None) -> Tensor:
        """Those of one rank, or all of them by rank, [., F], as soon as they are here."""
        ...


class RowsInTransit:
    """Rows on their way between ranks."""

    history: Any = None

    def __init__(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, *, key: Key, ring: bool
    ) -> None:
        self._width = width = rows.shape[1]
        counts = ([number * width for number in numbers] for numbers in (sent, received))
        self._exchange = PendingExchange(group, rows.reshape(-1), *counts, tag="halo", key=key, ring=ring)

    def wait(self, rank: int | None = None) -> Tensor:
        return self._exchange.wait(rank).view(-1, self._width)


class Halo:
    """The rows that one aggregate lacks, and the way back of their gradients.

    ring: rank by rank, so that a part of the aggregate can start when its rows are here; else by one all_to_all.
    overlap: what is here already is multiplied meanwhile. name: tells its exchanges from those of other halos.
    """

    def __init__(self, route: Route, group: Group, *, name: str, ring: bool = True, overlap: bool = True) -> None:
        self.route = route.to(group.device)
        self.group, self.name, self.ring, self.overlap = group, name, ring, overlap

    def start(self, rows: Tensor) -> PendingRows:
        """Sends what the route takes of a rank's rows, [k, F] by receiver, and begins to receive [h, F]."""
        return self._exchange(rows, self.route.sent, self.route.received, "rows")

    def start_back(self, grad: Tensor, history: Any) -> PendingRows:
        """Sends the gradients [h, F] of received rows back, and begins to receive those of sent rows.

        history: that of the rows when they came.
        """
        del history
        return self._exchange(grad, self.route.received, self.route.sent, "gradients")

    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], what: str) -> RowsInTransit:
        key = self.group.next_key(f"{self.name} {what}")
        return RowsInTransit(rows, sent, received, self.group, key=key, ring=self.ring)

    def fetch(self, x: Tensor) -> Tensor:
        """The rows [h, F] of other ranks that this one lacks, by owner; from the rows [n, F] of each."""
        return _Fetch.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def complete(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Rows [n, F] with those that this rank lacks behind them, [n + h, F]; all cross side by side."""
        return _Complete.apply(self, *rows)  # type: ignore[no-any-return, no-untyped-call]

    def product(self, x: Tensor, slices: EdgeSlices) -> Tensor:
        """`A x` [n, F] over the rows x that are here and those that come.

        What comes where the route has sums has the factors of its sources already, and 1 for them in `slices`.
        """
        return _Product.apply(x, self, slices)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class EdgeSlice:
    """Those edges of a block whose sources one rank sends (None: any rank). targets: int64, the block's rows."""

    adjacency: Adjacency
    scale: Scale
    targets: Tensor
    rank: int | None


@dataclass(frozen=True, kw_only=True)
class EdgeSlices:
    """An aggregate in slices: over the rows that are here, to which those that come are added in a fixed order."""

    here: Adjacency
    scale: Scale
    coming: tuple[EdgeSlice, ...]
    weighted: bool


def slice_edges(
    block: Adjacency, num_here: int, received: Sequence[int], scale: Scale, *, weighted: bool, by_rank: Sequence[int]
) -> EdgeSlices:
    """A block's aggregate in slices: its first `num_here` sources are here, the rest comes, `received` from each rank.

    by_rank: the order in which ranks' rows are added, each by itself; empty: all at once.
    """
    source, target = block.edges()
    ends = (num_here + torch.tensor([0, *received]).cumsum(0)).tolist()
    spans: list[tuple[int | None, int, int]] = [
        (rank, ends[rank], ends[rank + 1]) for rank in by_rank if received[rank]
    ]
    if not by_rank:
        spans = [(None, num_here, ends[-1])]

    def edges(first: int, end: int, targets: Tensor | None) -> Adjacency:
        kept = (source >= first) & (source < end)
        rows = target[kept] if targets is None else torch.searchsorted(targets, target[kept])
        return Adjacency.from_edges(
            source[kept] - first,
            rows,
            num_sources=end - first,
            num_targets=block.num_targets if targets is None else len(targets),
            weight=None if block.weight is None else block.weight[kept],
        )

    coming = []
    for rank, first, end in spans:
        reached = target[(source >= first) & (source < end)].unique()
        part_scale = Scale(
            None if scale.source is None else scale.source[first:end],
            None if scale.target is None else scale.target[reached],
        )
        coming.append(EdgeSlice(adjacency=edges(first, end, reached), scale=part_scale, targets=reached, rank=rank))
    here = scale._replace(source=None if scale.source is None else scale.source[:num_here])
    return EdgeSlices(here=edges(0, num_here, None), scale=here, coming=tuple(coming), weighted=weighted)


class _Fetch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo) -> Tensor:
        pending = halo.start(halo.route.take(x))
        ctx.args = halo, pending.history
        return pending.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        halo, history = ctx.args
        return spmm(halo.route.senders, halo.start_back(grad, history).wait()), None


class _Complete(Function):
    @staticmethod
    def forward(ctx: Any, halo: Halo, *rows: Tensor) -> tuple[Tensor, ...]:
        pending = halo.start(side_by_side([halo.route.take(x) for x in rows]))
        ctx.args = halo, pending.history, len(rows[0])
        coming = pending.wait().split([x.shape[1] for x in rows], 1)
        return tuple(torch.cat(both) for both in zip(rows, coming, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        halo, history, num_own = ctx.args
        pending = halo.start_back(side_by_side([grad[num_own:] for grad in grads]), history)
        returned = pending.wait().split([grad.shape[1] for grad in grads], 1)
        added = (spmm(halo.route.senders, rows.contiguous(), wide=True) for rows in returned)
        return None, *(rows.add_(grad[:num_own]).to(grad.dtype) for rows, grad in zip(added, grads, strict=True))


def side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """The columns of all, as rows that a message may have."""
    return torch.cat(list(rows), 1) if len(rows) > 1 else rows[0].contiguous()


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo, slices: EdgeSlices) -> Tensor:
        pending = halo.start(halo.route.take(x, slices.scale.source, weighted=slices.weighted))
        ctx.args = halo, slices, pending.history
        if not halo.overlap:
            pending.wait()
        y = spmm(slices.here, x, scale=slices.scale, weighted=slices.weighted, wide=True)
        for part in slices.coming:
            rows = pending.wait(part.rank)
            added = spmm(part.adjacency, rows, scale=part.scale, weighted=slices.weighted, wide=True)
            y.index_add_(0, part.targets, added)
        pending.wait()
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None]:
        halo, slices, history = ctx.args
        grads = grad_y.new_empty(sum(halo.route.received), grad_y.shape[1])
        spans = dict(enumerate(grads.split(halo.route.received)))
        for part in slices.coming:
            grad_part, into = grad_y.index_select(0, part.targets), grads if part.rank is None else spans[part.rank]
            into.copy_(spmm_transposed(part.adjacency, grad_part, scale=part.scale, weighted=slices.weighted))
            del grad_part
        returning = halo.start_back(grads, history)
        if not halo.overlap:
            returning.wait()
        grad_x = spmm_transposed(slices.here, grad_y, scale=slices.scale, weighted=slices.weighted, wide=True)
        rows, source = returning.wait(), slices.scale.source
        halo.route.add_back(rows, grad_x, source, weighted=slices.weighted)
        return grad_x.to(grad_y.dtype), None, None
