"""Which rows a rank sends to whom: agreed on once, before anything is sent."""

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
    """Which of its rows, or of sums over them, a rank sends to whom, and how many it gets from each rank."""

    rows: Tensor
    """int64, positions of the rows sent, by receiver, in rank order."""
    sent: tuple[int, ...]
    """How many of them each rank gets."""
    received: tuple[int, ...]
    """How many rows each rank sends here."""
    num_rows: int
    """Of this rank, of which those sent are some."""
    sums: Adjacency | None = None
    """Where what is sent are sums, they are its targets, by receiver, and this rank's rows its sources. A row that is
    sent as it is has one edge, of weight 1. `rows` are the sources of its edges then."""

    def to(self, device: torch.device) -> Route:
        """The same on a device."""
        if self.rows.device == device:
            return self
        return replace(self, rows=self.rows.to(device), sums=self.sums.to(device) if self.sums else None)

    @cached_property
    def senders(self) -> Adjacency:
        """The sent rows as sources, the rows they were taken from as targets: the adjoint of taking them."""
        places = torch.arange(len(self.rows), device=self.rows.device)
        return Adjacency.from_edges(places, self.rows, num_sources=len(places), num_targets=self.num_rows)

    @cached_property
    def num_summed(self) -> int:
        """The edges of those sums that are of several rows."""
        if self.sums is None:
            return 0
        degree = self.sums.degree
        return int(degree[degree > 1].sum())

    def take(self, x: Tensor, source: Tensor | None = None, *, weighted: bool = False) -> Tensor:
        """What is sent of rows x [n, F], by receiver; sums are over rows times `source` [n], so for rows as well."""
        if self.sums is None:
            return x.index_select(0, self.rows)
        return spmm(self.sums, x, scale=Scale(source=source), weighted=weighted)

    def add_back(self, grad: Tensor, into: Tensor, source: Tensor | None = None, *, weighted: bool = False) -> Tensor:
        """The adjoint of `take`: adds the gradients of what was sent to those of the rows, `into` [n, F], as summed."""
        if self.sums is None:
            return into.add_(spmm(self.senders, grad, wide=True))
        return spmm_transposed(self.sums, grad, scale=Scale(source=source), weighted=weighted, into=into)


def make_route(fetched: Tensor, received: Sequence[int], own: Tensor, num_rows: int, group: Group) -> Route:
    """Tells every rank which of its vertices the others lack; all ranks call it.

    fetched: int64, the vertices lacking here, by owner; received: how many each rank owns. own: int64, the vertices of
    this rank, which are the first of its `num_rows` rows.
    """
    one_each = [1] * group.size
    counts = torch.tensor(received, device=group.device)
    sent = group.all_to_all(counts, one_each, one_each, tag="route").tolist()
    asked = group.all_to_all(fetched.to(group.device), received, sent, tag="route")
    return Route(rows=_places(asked, own, group), sent=tuple(sent), received=tuple(received), num_rows=num_rows)


def make_sum_route(
    asked: Adjacency,
    vertices: Tensor,
    received: Sequence[int],
    edges: Sequence[int],
    own: Tensor,
    num_rows: int,
    group: Group,
) -> Route:
    """Tells every rank which sums over its vertices the others want; all ranks call it.

    asked: the sums as targets, by owner, over `vertices`, int64, as sources. received, edges: how many sums each rank
    owns, and how many edges they have. own, num_rows: as of `make_route`.
    """
    twice = [2] * group.size
    counts = torch.tensor([received, edges], device=group.device).t().reshape(-1)
    sent, told = group.all_to_all(counts, twice, twice, tag="route").view(-1, 2).t().tolist()
    degree = group.all_to_all(asked.degree.to(group.device), received, sent, tag="route")
    sources = group.all_to_all(vertices[asked.indices.long()].to(group.device), edges, told, tag="route")
    weight = None
    if asked.weight is not None:
        weight = group.all_to_all(asked.weight.to(group.device), edges, told, tag="route")
    rows = _places(sources, own, group)
    sums = Adjacency(
        indptr=torch.cat([degree.new_zeros(1), degree.cumsum(0)]),
        indices=rows.to(asked.indices.dtype),
        num_sources=num_rows,
        weight=weight,
    )
    return Route(rows=rows, sent=tuple(sent), received=tuple(received), num_rows=num_rows, sums=sums)


def _places(vertices: Tensor, own: Tensor, group: Group) -> Tensor:
    """Where vertices of this rank stand among its rows."""
    ascending, places = own.to(group.device).sort()
    return places[torch.searchsorted(ascending, vertices)]
