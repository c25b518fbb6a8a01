"""Routes: the rows that each rank sends to each other rank, determined once before the first exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from weft.comm.group import Group
from weft.data import Adjacency
from weft.kernels import Scale, spmm, spmm_transposed


@dataclass(frozen=True, kw_only=True)
class Route:
    """Rows, or partial sums over rows, that this rank sends to each rank, and number of those that it receives."""

    rows: Tensor
    """Positions of the sent rows among this rank's rows, ordered by receiver, int64; with `sums`, their sources."""
    sent: tuple[int, ...]
    """Number of rows that this rank sends to each rank."""
    received: tuple[int, ...]
    """Number of rows that this rank receives from each rank."""
    num_rows: int
    """Number of all rows of this rank, sent or not."""
    sums: Adjacency | None = None
    """Partial sums that are sent instead of rows: targets are the sums by receiver, sources this rank's rows.

    A row that is sent unchanged has one edge of weight 1. None: the rows themselves are sent.
    """

    @classmethod
    def without_data(
        cls, num_rows: int, sent: tuple[int, ...], received: tuple[int, ...], sums: Adjacency | None = None
    ) -> Route:
        """Return a route on the meta device, which has sizes and no data.

        Args:
            num_rows: Number of rows of the rank.
            sent: Number of rows that it sends to each rank.
            received: Number of rows that it receives from each rank.
            sums: Partial sums that it sends instead of rows.
        """
        num_read = sum(sent) if sums is None else sums.num_edges
        rows = torch.empty(num_read, dtype=torch.int64, device="meta")
        route = cls(rows=rows, sent=sent, received=received, num_rows=num_rows, sums=sums)
        route.senders  # noqa: B018  # exists before a step, as in all steps but the first
        return route

    def to(self, device: torch.device) -> Route:
        """Return this route with its tensors on a device."""
        if self.rows.device == device:
            return self
        return replace(self, rows=self.rows.to(device), sums=self.sums.to(device) if self.sums else None)

    @cached_property
    def senders(self) -> Adjacency:
        """Edges from the sent rows to the rows that they were copied from, for the adjoint of `take`."""
        sent_ids = torch.arange(len(self.rows), device=self.rows.device)
        return Adjacency.from_edges(sent_ids, self.rows, num_sources=len(sent_ids), num_targets=self.num_rows)

    @cached_property
    def num_summed(self) -> int:
        """Number of edges in `sums` to partial sums over several rows."""
        if self.sums is None:
            return 0
        degree = self.sums.degree
        return int(degree[degree > 1].sum())

    def take(self, x: Tensor, source: Tensor | None = None, *, weighted: bool = False) -> Tensor:
        """Return the rows or partial sums to send, ordered by receiver, [k, F].

        Args:
            x: This rank's rows, [n, F].
            source: Factor of each row in the partial sums, [n]; a row that is sent unchanged is multiplied too.
            weighted: True to multiply by the weights of the edges of `sums`.
        """
        if self.sums is None:
            return x.index_select(0, self.rows)
        return spmm(self.sums, x, scale=Scale(source=source), weighted=weighted)

    def add_back(self, grad: Tensor, into: Tensor, source: Tensor | None = None, *, weighted: bool = False) -> Tensor:
        """Add the gradients of sent rows to those of this rank's rows, and return these. Adjoint of `take`.

        Args:
            grad: Gradients of what `take` returned, [k, F].
            into: Gradients of this rank's rows, [n, F], in the dtype of sums; changed in place.
            source: As for `take`.
            weighted: As for `take`.
        """
        if self.sums is None:
            return into.add_(spmm(self.senders, grad, in_sum_dtype=True))
        return spmm_transposed(self.sums, grad, scale=Scale(source=source), weighted=weighted, into=into)


def make_route(fetched: Tensor, received: Sequence[int], vertices: Tensor, num_rows: int, group: Group) -> Route:
    """Exchange the ids of the vertices that each rank needs, and return this rank's route.

    Args:
        fetched: Vertices that this rank needs from others, ordered by owner, int64.
        received: Number of these vertices that each rank owns.
        vertices: Vertices of this rank, int64; they are the first of its rows.
        num_rows: Number of this rank's rows.
        group: All ranks; each of them must call this function.
    """
    one_each = [1] * group.size
    counts = torch.tensor(received, device=group.device)
    sent = group.all_to_all(counts, one_each, one_each, tag="route").tolist()
    requested = group.all_to_all(fetched.to(group.device), received, sent, tag="route")
    return Route(
        rows=_positions(requested, vertices, group), sent=tuple(sent), received=tuple(received), num_rows=num_rows
    )


def make_sum_route(
    requested: Adjacency,
    source_vertices: Tensor,
    received: Sequence[int],
    edges: Sequence[int],
    vertices: Tensor,
    num_rows: int,
    group: Group,
) -> Route:
    """Exchange the partial sums that each rank needs from others, and return this rank's route.

    Args:
        requested: Partial sums that this rank needs, as targets ordered by owner.
        source_vertices: Vertex of each source of `requested`, int64.
        received: Number of sums that each rank owns.
        edges: Number of edges of these sums, by rank.
        vertices: Vertices of this rank, int64; they are the first of its rows.
        num_rows: Number of this rank's rows.
        group: All ranks; each of them must call this function.
    """
    twice = [2] * group.size
    counts = torch.tensor([received, edges], device=group.device).t().reshape(-1)
    sent, sent_edges = group.all_to_all(counts, twice, twice, tag="route").view(-1, 2).t().tolist()
    degree = group.all_to_all(requested.degree.to(group.device), received, sent, tag="route")
    sources = group.all_to_all(
        source_vertices[requested.indices.long()].to(group.device), edges, sent_edges, tag="route"
    )
    weight = None
    if requested.weight is not None:
        weight = group.all_to_all(requested.weight.to(group.device), edges, sent_edges, tag="route")
    rows = _positions(sources, vertices, group)
    sums = Adjacency(
        indptr=torch.cat([degree.new_zeros(1), degree.cumsum(0)]),
        indices=rows.to(requested.indices.dtype),
        num_sources=num_rows,
        weight=weight,
    )
    return Route(rows=rows, sent=tuple(sent), received=tuple(received), num_rows=num_rows, sums=sums)


def _positions(requested: Tensor, vertices: Tensor, group: Group) -> Tensor:
    """Return the position of each requested vertex among the vertices of this rank."""
    ascending, positions = vertices.to(group.device).sort()
    return positions[torch.searchsorted(ascending, requested)]
