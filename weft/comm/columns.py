"""Rows to columns and back: the `split` and `gather` of NeutronTP (section 3.1, figure 6), each the other's adjoint.

Rank r answers for the rows `rows[r]:rows[r + 1]` of all N vertices and holds the columns `columns[r]` of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from weft.comm.exchange_key import Key
from weft.comm.group import Group, Pending
from weft.utils.dtypes import sum_dtype

Range = tuple[int, int]
BlockPlace = tuple[slice, int]


def even_bounds(count: int, parts: int) -> tuple[int, ...]:
    """Bounds of `parts` contiguous ranges over `count` items whose sizes differ by at most one."""
    return tuple(count * part // parts for part in range(parts + 1))


@dataclass(frozen=True, kw_only=True)
class ColumnLayout:
    """Who holds what of an [N, F] matrix. Column ranges of two ranks may overlap; then `cols_to_rows` sums them."""

    rows: tuple[int, ...]
    columns: tuple[tuple[Range, ...], ...]

    @property
    def num_columns(self) -> int:
        """Columns of the whole matrix: F."""
        return max(stop for ranges in self.columns for _, stop in ranges)

    @property
    def overlaps(self) -> bool:
        """Whether ranks hold the same columns."""
        return sum(self.width(rank) for rank in range(len(self.columns))) > self.num_columns

    def width(self, rank: int) -> int:
        """Columns that `rank` holds: f."""
        return sum(stop - start for start, stop in self.columns[rank])

    def num_rows(self, rank: int) -> int:
        """Rows that `rank` answers for: n."""
        return self.rows[rank + 1] - self.rows[rank]


def column_layout(rows: tuple[int, ...], width: int) -> ColumnLayout:
    """Every rank gets its even share of `width` columns; ranks beyond the width get none."""
    return ColumnLayout(
        rows=rows, columns=tuple(((start, stop),) for start, stop in pairwise(even_bounds(width, len(rows) - 1)))
    )


def rows_to_cols(x_nF: Tensor, layout: ColumnLayout, group: Group) -> Tensor:
    """Rows to columns: from the rows [n, F] this rank answers for to its columns [N, f] of all rows."""
    return _RowsToCols.apply(x_nF, layout, group)  # type: ignore[no-any-return, no-untyped-call]


def cols_to_rows(x_Nf: Tensor, layout: ColumnLayout, group: Group) -> Tensor:
    """Columns to rows: from this rank's columns [N, f] of all rows to the rows [n, F] it answers for."""
    return _ColsToRows.apply(x_Nf, layout, group)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSet:
    """Rows that cross together, out of all N that the ranks answer for."""

    ids: Tensor
    """int64 [c], rank by rank, of any rank's rows."""
    counts: tuple[int, ...]
    """How many of them each rank answers for."""
    own: Tensor
    """int64, where this rank's stand among the rows that it answers for."""


class RowsToCols:
    """Rows of a set on their way to columns."""

    def __init__(self, x_nF: Tensor, rows: RowSet, layout: ColumnLayout, group: Group, key: Key) -> None:
        self._shape = len(rows.ids), layout.width(group.rank)
        self._exchange = _send_columns(x_nF[rows.own], rows.counts, layout, group, key)

    def wait(self) -> Tensor:
        """This rank's columns [c, f] of the set."""
        return self._exchange.wait().view(self._shape)


class ColsToRows:
    """A rank's columns [c, f] of a set on their way to the rows' ranks."""

    def __init__(self, x_cf: Tensor, rows: RowSet, layout: ColumnLayout, group: Group, key: Key) -> None:
        self._rows, self._layout = rows, layout
        self._exchange = _send_rows(x_cf, rows.counts, layout, group, key)

    def wait(self) -> Tensor:
        """Those rows [., F] of the set that this rank answers for, at its `own`."""
        return _join_columns(self._exchange.wait(), len(self._rows.own), self._layout)


def sum_over_ranks(values: Tensor, group: Group, *, tag: str) -> Tensor:
    """The sum of a tensor over the ranks, on every rank; its adjoint is the same sum."""
    return _SumOverRanks.apply(values, group, tag)  # type: ignore[no-any-return, no-untyped-call]


def sum_shared(x: Tensor, columns: Sequence[Range], group: Group) -> Tensor:
    """x [E, f] with each column summed over the ranks that hold it; rank r holds the range columns[r].

    A column of one rank stays as it is. Of the others, each holder adds up an even share of the rows, in rank order,
    and tells the other holders. The adjoint is the same sum.
    """
    return _SumShared.apply(x, columns, group)  # type: ignore[no-any-return, no-untyped-call]


def holders(columns: Sequence[Range], column: int) -> list[int]:
    """The ranks that hold a column."""
    return [rank for rank, (start, stop) in enumerate(columns) if start <= column < stop]


def count_shared(columns: Sequence[Range], num_rows: int, rank: int) -> tuple[int, int]:
    """Numbers that a rank sends and receives before `sum_shared` adds up; afterwards it is the other way round."""
    sent = received = 0
    for column in range(*columns[rank]):
        ranks = holders(columns, column)
        bounds, place = even_bounds(num_rows, len(ranks)), ranks.index(rank)
        own = bounds[place + 1] - bounds[place]
        sent += num_rows - own
        received += (len(ranks) - 1) * own
    return sent, received


def sum_gradients(parameters: Sequence[torch.nn.Parameter], group: Group) -> None:
    """Adds the gradients of all parameters that want one over the ranks, in one collective.

    A parameter that the model does not use has none afterwards either, so that the optimiser passes it over.
    """
    if group.size == 1:
        return
    wanting = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in wanting]
    total = group.all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]), tag="gradients")
    for parameter, part in zip(wanting, total.split([p.numel() for p in wanting]), strict=True):
        if parameter.grad is not None:
            parameter.grad = part.view_as(parameter)


def _split(x_nF: Tensor, layout: ColumnLayout, group: Group) -> Tensor:
    counts = [layout.num_rows(rank) for rank in range(group.size)]
    return _send_columns(x_nF, counts, layout, group).wait().view(layout.rows[-1], layout.width(group.rank))


def _gather(x_Nf: Tensor, layout: ColumnLayout, group: Group) -> Tensor:
    counts = [layout.num_rows(rank) for rank in range(group.size)]
    return _join_columns(_send_rows(x_Nf, counts, layout, group).wait(), counts[group.rank], layout)


def _send_columns(
    x_nF: Tensor, counts: Sequence[int], layout: ColumnLayout, group: Group, key: Key | None = None
) -> Pending:
    """Begins to send every rank its columns of these rows, and to receive this rank's of `counts` rows of each."""
    messages = [torch.cat([x_nF[:, start:stop] for start, stop in ranges], 1).reshape(-1) for ranges in layout.columns]
    sent = [len(x_nF) * layout.width(rank) for rank in range(group.size)]
    f = layout.width(group.rank)
    return group.all_to_all_async(
        torch.cat(messages), sent, [count * f for count in counts], tag="rows_to_cols", key=key
    )


def _send_rows(
    x_Nf: Tensor, counts: Sequence[int], layout: ColumnLayout, group: Group, key: Key | None = None
) -> Pending:
    """Begins to send every rank its `counts` of these rows, which stand rank by rank, and to receive this rank's."""
    f, n = layout.width(group.rank), counts[group.rank]
    received = [n * layout.width(rank) for rank in range(group.size)]
    return group.all_to_all_async(
        x_Nf.reshape(-1), [count * f for count in counts], received, tag="cols_to_rows", key=key
    )


def _join_columns(messages: Tensor, n: int, layout: ColumnLayout) -> Tensor:
    """The rows [n, F] whose columns the ranks have sent."""
    dtype = sum_dtype(messages.dtype) if layout.overlaps else messages.dtype
    x_nF = messages.new_zeros(n, layout.num_columns, dtype=dtype)
    parts = messages.split([n * layout.width(rank) for rank in range(len(layout.columns))])
    for message, ranges in zip(parts, layout.columns, strict=True):
        widths = [stop - start for start, stop in ranges]
        for part, (start, stop) in zip(message.view(n, sum(widths)).split(widths, 1), ranges, strict=True):
            x_nF[:, start:stop] += part
    return x_nF.to(messages.dtype)


def _sum_shared(x: Tensor, columns: Sequence[Range], group: Group) -> Tensor:
    me, total = group.rank, x.clone()
    ours = [_share(columns, me, rank, me, len(x)) for rank in range(group.size)]
    theirs = [_share(columns, me, rank, rank, len(x)) for rank in range(group.size)]
    for place in ours[me]:
        total[place] = 0
    for place, part in _swap(x, theirs, ours, group):
        total[place] += part
    for place, part in _swap(total, ours, theirs, group):
        total[place] = part
    return total


def _share(columns: Sequence[Range], rank: int, other: int, owner: int, num_rows: int) -> list[BlockPlace]:
    """Where in `rank`'s columns that `other` holds as well, and others perhaps, `owner` adds up."""
    places = []
    for column in range(*columns[rank]):
        ranks = holders(columns, column)
        if len(ranks) > 1 and other in ranks:
            bounds, number = even_bounds(num_rows, len(ranks)), ranks.index(owner)
            places.append((slice(bounds[number], bounds[number + 1]), column - columns[rank][0]))
    return places


def _swap(
    x: Tensor, sent: Sequence[list[BlockPlace]], received: Sequence[list[BlockPlace]], group: Group
) -> Iterable[tuple[BlockPlace, Tensor]]:
    """Sends each rank some entries of x, and gives what came of each, in rank order, with the place that it is for."""
    counts = [[sum(rows.stop - rows.start for rows, _ in one) for one in places] for places in (sent, received)]
    message = torch.cat([x.new_empty(0), *(x[place] for place in chain(*sent))])
    places = list(chain(*received))
    parts = group.all_to_all(message, *counts, tag="logits").split([rows.stop - rows.start for rows, _ in places])
    return zip(places, parts, strict=True)


class _RowsToCols(Function):
    @staticmethod
    def forward(ctx: Any, x_nF: Tensor, layout: ColumnLayout, group: Group) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return _split(x_nF, layout, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Nf: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad_Nf, ctx.layout, ctx.group), None, None


class _ColsToRows(Function):
    @staticmethod
    def forward(ctx: Any, x_Nf: Tensor, layout: ColumnLayout, group: Group) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return _gather(x_Nf, layout, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nF: Tensor) -> tuple[Tensor, None, None]:
        return _split(grad_nF, ctx.layout, ctx.group), None, None


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group, tag: str) -> Tensor:
        ctx.group, ctx.tag = group, tag
        return group.all_reduce(values, tag=tag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_reduce(grad, tag=ctx.tag), None, None


class _SumShared(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Sequence[Range], group: Group) -> Tensor:
        ctx.columns, ctx.group = columns, group
        return _sum_shared(x, columns, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum_shared(grad.contiguous(), ctx.columns, ctx.group), None, None
