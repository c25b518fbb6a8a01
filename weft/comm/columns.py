"""Exchanges between rows and columns: `split` and `gather` of NeutronTP (section 3.1, figure 6), which are adjoint.

A matrix [N, F] is distributed in two ways. By rows: rank r has the rows `rows[r]:rows[r + 1]` with all columns. By
columns: rank r has the columns `columns[r]` of all rows.
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
"""First column, and the end of the columns."""
BlockPlace = tuple[slice, int]
"""Range of rows, and the column among this rank's columns."""


def even_bounds(count: int, parts: int) -> tuple[int, ...]:
    """Return the bounds of contiguous ranges whose sizes differ by at most one.

    Args:
        count: Number of items.
        parts: Number of ranges.

    Returns:
        `parts + 1` ascending bounds, from 0 to `count`.
    """
    return tuple(count * part // parts for part in range(parts + 1))


@dataclass(frozen=True, kw_only=True)
class ColumnLayout:
    """Distribution of a matrix [N, F] over the ranks, by rows and by columns.

    Two ranks may have the same columns; `cols_to_rows` then adds up their values.
    """

    rows: tuple[int, ...]
    """Bounds of the ranks' rows, P + 1 numbers."""
    columns: tuple[tuple[Range, ...], ...]
    """Ranges of columns of each rank."""

    @property
    def num_columns(self) -> int:
        """Number of columns of the whole matrix: F."""
        return max(stop for ranges in self.columns for _, stop in ranges)

    @property
    def overlaps(self) -> bool:
        """True if there is a column that several ranks have."""
        return sum(self.width(rank) for rank in range(len(self.columns))) > self.num_columns

    def width(self, rank: int) -> int:
        """Return the number of columns of `rank`: f."""
        return sum(stop - start for start, stop in self.columns[rank])

    def num_rows(self, rank: int) -> int:
        """Return the number of rows of `rank`: n."""
        return self.rows[rank + 1] - self.rows[rank]


def column_layout(rows: tuple[int, ...], width: int) -> ColumnLayout:
    """Return a layout that splits the columns evenly over the ranks.

    Args:
        rows: Bounds of the ranks' rows, P + 1 numbers.
        width: Number of columns. Ranks beyond this number get none.
    """
    return ColumnLayout(
        rows=rows, columns=tuple(((start, stop),) for start, stop in pairwise(even_bounds(width, len(rows) - 1)))
    )


def rows_to_cols(x_nF: Tensor, layout: ColumnLayout, group: Group) -> Tensor:
    """Exchange rows for columns: return this rank's columns of all rows, [N, f].

    Args:
        x_nF: This rank's rows with all columns, [n, F].
        layout: Distribution of the matrix.
        group: All ranks; each of them must call this function.
    """
    return _RowsToCols.apply(x_nF, layout, group)  # type: ignore[no-any-return, no-untyped-call]


def cols_to_rows(x_Nf: Tensor, layout: ColumnLayout, group: Group) -> Tensor:
    """Exchange columns for rows: return this rank's rows with all columns, [n, F].

    Args:
        x_Nf: This rank's columns of all rows, [N, f].
        layout: Distribution of the matrix. Columns that several ranks have are added up.
        group: All ranks; each of them must call this function.
    """
    return _ColsToRows.apply(x_Nf, layout, group)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSet:
    """Subset of all N rows that one exchange sends."""

    ids: Tensor
    """Vertex ids of the rows of all ranks, ordered by rank, int64 [c]."""
    counts: tuple[int, ...]
    """Number of rows of the set on each rank."""
    positions: Tensor
    """Positions, among all rows of this rank, of those that are in the set, int64."""


class RowsToCols:
    """Pending exchange of the rows of a set for columns.

    Args:
        x_nF: All rows of this rank, [n, F].
        rows: The rows to exchange.
        layout: Distribution of the matrix.
        group: All ranks.
        key: Key that identifies this exchange on all ranks.
    """

    def __init__(self, x_nF: Tensor, rows: RowSet, layout: ColumnLayout, group: Group, key: Key) -> None:
        self._shape = len(rows.ids), layout.width(group.rank)
        self._exchange = _send_columns(x_nF[rows.positions], rows.counts, layout, group, key)

    def wait(self) -> Tensor:
        """Wait for the exchange, and return this rank's columns of all exchanged rows, [c, f]."""
        return self._exchange.wait().view(self._shape)


class ColsToRows:
    """Pending exchange of this rank's columns of a set of rows for complete rows.

    Args:
        x_cf: This rank's columns of all rows of the set, [c, f].
        rows: The rows to exchange.
        layout: Distribution of the matrix.
        group: All ranks.
        key: Key that identifies this exchange on all ranks.
    """

    def __init__(self, x_cf: Tensor, rows: RowSet, layout: ColumnLayout, group: Group, key: Key) -> None:
        self._rows, self._layout = rows, layout
        self._exchange = _send_rows(x_cf, rows.counts, layout, group, key)

    def wait(self) -> Tensor:
        """Wait for the exchange, and return this rank's rows of the set, [., F], in the order of `positions`."""
        return _join_columns(self._exchange.wait(), len(self._rows.positions), self._layout)


def sum_over_ranks(values: Tensor, group: Group, *, tag: str) -> Tensor:
    """Return the sum of a tensor over the ranks. The backward pass is the same sum.

    Args:
        values: Tensor of the same shape on every rank.
        group: All ranks; each of them must call this function.
        tag: Name under which the meter counts the bytes.
    """
    return _SumOverRanks.apply(values, group, tag)  # type: ignore[no-any-return, no-untyped-call]


def sum_shared(x: Tensor, columns: Sequence[Range], group: Group) -> Tensor:
    """Return x with each column summed over the ranks that have this column. The backward pass is the same sum.

    A column that only one rank has is not changed. The rows of a column that several ranks have are split evenly:

    1. Each of these ranks receives its part of the rows from the others.
    2. It adds them up in rank order, so that the result does not depend on timing.
    3. It sends the sums to the others.

    Args:
        x: This rank's columns, [E, f].
        columns: Range of columns of each rank; the ranges may overlap.
        group: All ranks; each of them must call this function.
    """
    return _SumShared.apply(x, columns, group)  # type: ignore[no-any-return, no-untyped-call]


def holders(columns: Sequence[Range], column: int) -> list[int]:
    """Return the ranks that have a column.

    Args:
        columns: Range of columns of each rank.
        column: Number of the column.
    """
    return [rank for rank, (start, stop) in enumerate(columns) if start <= column < stop]


def count_shared(columns: Sequence[Range], num_rows: int, rank: int) -> tuple[int, int]:
    """Return the number of elements that a rank sends and receives in step 1 of `sum_shared`.

    In step 3 the rank sends as many elements as it received in step 1, and receives as many as it sent.

    Args:
        columns: Range of columns of each rank.
        num_rows: Number of rows.
        rank: Number of the rank.
    """
    sent = received = 0
    for column in range(*columns[rank]):
        ranks = holders(columns, column)
        bounds, place = even_bounds(num_rows, len(ranks)), ranks.index(rank)
        num_summed = bounds[place + 1] - bounds[place]  # rows of this column that the rank adds up
        sent += num_rows - num_summed
        received += (len(ranks) - 1) * num_summed
    return sent, received


def sum_gradients(parameters: Sequence[torch.nn.Parameter], group: Group) -> None:
    """Sum the gradients of all trainable parameters over the ranks, in one all-reduce.

    A parameter that has a gradient on some rank has one on every rank afterwards: a rank without edges of a relation
    computes none for its weights. Without a gradient on any rank, it has none afterwards, and the optimizer skips it.

    Args:
        parameters: Parameters of the model, in the same order on every rank.
        group: All ranks; each of them must call this function.
    """
    if group.size == 1:
        return
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
    if not trainable:
        return
    present = gradients[0].new_tensor([p.grad is not None for p in trainable])
    total = group.all_reduce(torch.cat([*(gradient.reshape(-1) for gradient in gradients), present]), tag="gradients")
    *parts, num_present = total.split([*(p.numel() for p in trainable), len(trainable)])
    for number, (parameter, part) in enumerate(zip(trainable, parts, strict=True)):
        if parameter.grad is not None or num_present[number] > 0:  # a GPU waits only for the second condition
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
    """Start the exchange that sends each rank its columns of `x_nF`, and receives `counts` rows from each rank."""
    messages = [torch.cat([x_nF[:, start:stop] for start, stop in ranges], 1).reshape(-1) for ranges in layout.columns]
    sent = [len(x_nF) * layout.width(rank) for rank in range(group.size)]
    f = layout.width(group.rank)
    return group.all_to_all_async(
        torch.cat(messages), sent, [count * f for count in counts], tag="rows_to_cols", key=key
    )


def _send_rows(
    x_Nf: Tensor, counts: Sequence[int], layout: ColumnLayout, group: Group, key: Key | None = None
) -> Pending:
    """Start the exchange that sends each rank its rows of `x_Nf`, and receives all columns of this rank's rows.

    The rows of `x_Nf` are ordered by the rank that they belong to: `counts` rows for each rank.
    """
    f, n = layout.width(group.rank), counts[group.rank]
    received = [n * layout.width(rank) for rank in range(group.size)]
    return group.all_to_all_async(
        x_Nf.reshape(-1), [count * f for count in counts], received, tag="cols_to_rows", key=key
    )


def _join_columns(messages: Tensor, n: int, layout: ColumnLayout) -> Tensor:
    """Return the rows [n, F], put together from the columns that each rank sent."""
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
    # By rank: the entries that both have and this rank adds up, and those that the other rank adds up.
    ours = [_shared_blocks(columns, me, rank, me, len(x)) for rank in range(group.size)]
    theirs = [_shared_blocks(columns, me, rank, rank, len(x)) for rank in range(group.size)]
    for place in ours[me]:
        total[place] = 0
    for place, part in _exchange_blocks(x, theirs, ours, group):
        total[place] += part
    for place, part in _exchange_blocks(total, ours, theirs, group):
        total[place] = part
    return total


def _shared_blocks(columns: Sequence[Range], rank: int, other: int, owner: int, num_rows: int) -> list[BlockPlace]:
    """Return the blocks that `owner` adds up, of the columns that both `rank` and `other` have."""
    places = []
    for column in range(*columns[rank]):
        ranks = holders(columns, column)
        if len(ranks) > 1 and other in ranks:
            bounds, number = even_bounds(num_rows, len(ranks)), ranks.index(owner)
            places.append((slice(bounds[number], bounds[number + 1]), column - columns[rank][0]))
    return places


def _exchange_blocks(
    x: Tensor, sent: Sequence[list[BlockPlace]], received: Sequence[list[BlockPlace]], group: Group
) -> Iterable[tuple[BlockPlace, Tensor]]:
    """Send blocks of x to each rank, and return the received blocks in rank order, each with its place in x."""
    counts = [[sum(rows.stop - rows.start for rows, _ in blocks) for blocks in ranks] for ranks in (sent, received)]
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
