"""Exchange of halo rows, and aggregates over local and halo rows (NeutronStar, sections 2.2 and 4.3)."""

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
    """Pending exchange of halo rows."""

    history: Any
    """State that the halo needs when it sends the gradients of the rows back; its type depends on the halo."""

    def wait(self, rank: int | None = None) -> Tensor:
        """Wait for the rows of a rank and return them, [., F]; None: of all ranks, ordered by rank."""
        ...


class RowsInTransit:
    """Pending exchange of rows, or of their gradients.

    Args:
        rows: Rows to send, ordered by receiver, [k, F].
        sent: Number of rows to each rank.
        received: Number of rows from each rank.
        group: All ranks.
        key: Key that identifies this exchange on all ranks.
        ring: True for messages between pairs of ranks, False for one all_to_all of the backend.
    """

    history: Any = None

    def __init__(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, *, key: Key, ring: bool
    ) -> None:
        self._received, self._width = received, rows.shape[1]
        counts = ([num_rows * self._width for num_rows in by_rank] for by_rank in (sent, received))
        self._exchange = PendingExchange(group, rows.reshape(-1), *counts, tag="halo", key=key, ring=ring)

    def wait(self, rank: int | None = None) -> Tensor:
        num_rows = sum(self._received) if rank is None else self._received[rank]
        return self._exchange.wait(rank).view(num_rows, self._width)


class Halo:
    """Exchange of the halo rows that an aggregate needs from other ranks, and of their gradients.

    Args:
        route: Rows that each rank sends to each rank.
        group: All ranks.
        name: Name of the halo, different from that of other halos of the model.
        ring: True to receive the rows rank by rank, so that each rank's part of the aggregate starts as soon as its
            rows have arrived; False for one all_to_all.
        overlap: True to aggregate local rows while halo rows are in transit.
    """

    def __init__(self, route: Route, group: Group, *, name: str, ring: bool = True, overlap: bool = True) -> None:
        self.route = route.to(group.device)
        self.group, self.name, self.ring, self.overlap = group, name, ring, overlap

    def start(self, rows: Tensor) -> PendingRows:
        """Start to send rows [k, F], ordered by receiver as `Route.take` returns them, and to receive rows [h, F]."""
        return self._exchange(rows, self.route.sent, self.route.received, "rows")

    def start_back(self, grad: Tensor, history: Any) -> PendingRows:
        """Start to send the gradients of received rows back, and to receive the gradients of sent rows.

        Args:
            grad: Gradients of the received rows, [h, F].
            history: The `PendingRows.history` of the exchange that received these rows.
        """
        del history
        return self._exchange(grad, self.route.received, self.route.sent, "gradients")

    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], what: str) -> RowsInTransit:
        key = self.group.next_key(f"{self.name} {what}")
        return RowsInTransit(rows, sent, received, self.group, key=key, ring=self.ring)

    def fetch(self, x: Tensor) -> Tensor:
        """Return the halo rows of this rank, ordered by owner, [h, F]. `x` contains this rank's rows, [n, F]."""
        return _Fetch.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def complete(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Append the halo rows to each tensor of this rank's rows [n, F], with one exchange: [n + h, F] each."""
        return _Complete.apply(self, *rows)  # type: ignore[no-any-return, no-untyped-call]

    def product(self, x: Tensor, slices: EdgeSlices) -> Tensor:
        """Return the aggregate `A x` over local and halo rows, [n, F].

        Args:
            x: This rank's rows, [n, F].
            slices: The edges of A, split into those from local and from halo rows. If the route sends partial sums,
                the sender has already applied the source factors to these, and `slices` must have 1 for them.
        """
        return _Product.apply(x, self, slices)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class EdgeSlice:
    """Edges of a block whose sources are the halo rows of one rank, or of all ranks."""

    adjacency: Adjacency
    """The edges; sources are the rows that `rank` sends, targets are numbered by `targets`."""
    scale: Scale
    """Constant factors of the sources and targets of `adjacency`."""
    targets: Tensor
    """Row of the block for each target of `adjacency`, int64."""
    rank: int | None
    """The rank that sends the sources; None: all ranks."""


@dataclass(frozen=True, kw_only=True)
class EdgeSlices:
    """Edges of a block, split into those from local rows and slices of those from halo rows."""

    local: Adjacency
    """Edges from local rows."""
    scale: Scale
    """Factors of the local edges' sources and targets."""
    remote: tuple[EdgeSlice, ...]
    """Edges from halo rows; their sums are added in this order, so that results do not depend on timing."""
    weighted: bool
    """True if the edges have weights."""


def slice_edges(
    block: Adjacency, num_local: int, received: Sequence[int], scale: Scale, *, weighted: bool, by_rank: Sequence[int]
) -> EdgeSlices:
    """Split the edges of a block by where their sources come from.

    Args:
        block: Edges of the aggregate. The first sources are local rows, the others halo rows ordered by rank.
        num_local: Number of local sources.
        received: Number of halo rows from each rank.
        scale: Factors of sources and targets.
        weighted: True if the edges have weights.
        by_rank: Ranks in the order in which their parts are added, a slice for each; empty: one slice for all.
    """
    source, target = block.edges()
    ends = (num_local + torch.tensor([0, *received]).cumsum(0)).tolist()
    spans: list[tuple[int | None, int, int]] = [
        (rank, ends[rank], ends[rank + 1]) for rank in by_rank if received[rank]
    ]
    if not by_rank:
        spans = [(None, num_local, ends[-1])]

    def edges(first: int, end: int, targets: Tensor | None) -> Adjacency:
        selected = (source >= first) & (source < end)
        rows = target[selected] if targets is None else torch.searchsorted(targets, target[selected])
        return Adjacency.from_edges(
            source[selected] - first,
            rows,
            num_sources=end - first,
            num_targets=block.num_targets if targets is None else len(targets),
            weight=None if block.weight is None else block.weight[selected],
        )

    remote = []
    for rank, first, end in spans:
        reached = target[(source >= first) & (source < end)].unique()
        part_scale = Scale(
            None if scale.source is None else scale.source[first:end],
            None if scale.target is None else scale.target[reached],
        )
        remote.append(EdgeSlice(adjacency=edges(first, end, reached), scale=part_scale, targets=reached, rank=rank))
    local_scale = scale._replace(source=None if scale.source is None else scale.source[:num_local])
    return EdgeSlices(local=edges(0, num_local, None), scale=local_scale, remote=tuple(remote), weighted=weighted)


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
        fetched = pending.wait().split([x.shape[1] for x in rows], 1)
        return tuple(torch.cat(parts) for parts in zip(rows, fetched, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        halo, history, num_local = ctx.args
        pending = halo.start_back(side_by_side([grad[num_local:] for grad in grads]), history)
        returned = pending.wait().split([grad.shape[1] for grad in grads], 1)
        added = (spmm(halo.route.senders, rows.contiguous(), in_sum_dtype=True) for rows in returned)
        return None, *(rows.add_(grad[:num_local]).to(grad.dtype) for rows, grad in zip(added, grads, strict=True))


def side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Return the columns of all tensors next to each other, contiguous, so that one message can send them."""
    return torch.cat(list(rows), 1) if len(rows) > 1 else rows[0].contiguous()


class _Product(Function):
    """Aggregate over local and halo rows that computes while rows are in transit.

    Forward: start the exchange, aggregate local rows, add the part of each halo slice as its rows arrive. Backward:
    compute the gradients of halo rows first and start to send them back, then those of local rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo, slices: EdgeSlices) -> Tensor:
        pending = halo.start(halo.route.take(x, slices.scale.source, weighted=slices.weighted))
        ctx.args = halo, slices, pending.history
        if not halo.overlap:
            pending.wait()
        y = spmm(slices.local, x, scale=slices.scale, weighted=slices.weighted, in_sum_dtype=True)
        for part in slices.remote:
            rows = pending.wait(part.rank)
            added = spmm(part.adjacency, rows, scale=part.scale, weighted=slices.weighted, in_sum_dtype=True)
            y.index_add_(0, part.targets, added)
        pending.wait()
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None]:
        halo, slices, history = ctx.args
        grads = grad_y.new_empty(sum(halo.route.received), grad_y.shape[1])
        spans = dict(enumerate(grads.split(halo.route.received)))
        for part in slices.remote:
            grad_part, into = grad_y.index_select(0, part.targets), grads if part.rank is None else spans[part.rank]
            into.copy_(spmm_transposed(part.adjacency, grad_part, scale=part.scale, weighted=slices.weighted))
            del grad_part
        returning = halo.start_back(grads, history)
        if not halo.overlap:
            returning.wait()
        grad_x = spmm_transposed(slices.local, grad_y, scale=slices.scale, weighted=slices.weighted, in_sum_dtype=True)
        rows, source = returning.wait(), slices.scale.source
        halo.route.add_back(rows, grad_x, source, weighted=slices.weighted)
        return grad_x.to(grad_y.dtype), None, None
