"""Rows and edges of a heterogeneous graph, divided by vertex type and relation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from weft.data import Adjacency


class Columns(NamedTuple):
    """Range of columns of a tensor."""

    first: int
    """First column."""
    width: int
    """Number of columns."""

    def of(self, x: Tensor) -> Tensor:
        """Return these columns of x [n, .]."""
        return x.narrow(1, *self)


class Place(NamedTuple):
    """Place of the rows of a vertex type in rows of all vertices. Types share columns, since a vertex has one type.

    `OwnRelationRows.transform` uses it for relations instead of types: each relation row has one relation.
    """

    of_type: int
    """Number of the type, or of the relation."""
    columns: Columns
    """Columns."""


def side_by_side(types: Sequence[int], parts: Sequence[Tensor]) -> list[Place]:
    """Return places for several rows, with those of a type side by side.

    Args:
        types: Number of the vertex type of each.
        parts: Rows of their type, [n_t, .].
    """
    widths, places = defaultdict[int, int](int), list[Place]()
    for of_type, part in zip(types, parts, strict=True):
        places.append(Place(of_type, Columns(widths[of_type], part.shape[1])))
        widths[of_type] += part.shape[1]
    return places


class TypeOrder(NamedTuple):
    """Order of n rows by vertex type."""

    counts: tuple[int, ...]
    """Number of rows of each type."""
    by_type: Tensor | None = None
    """Positions of the rows, type by type, int64 [n]; None: the rows are sorted by type."""

    @classmethod
    def of(cls, vertex_type: Tensor, num_types: int) -> TypeOrder:
        """Return the order of some rows, which keep their order within a type.

        Args:
            vertex_type: Number of each row's vertex type, [n, 1].
            num_types: Number of vertex types.
        """
        numbers = vertex_type.view(-1)
        if bool((numbers[1:] >= numbers[:-1]).all()):
            bounds = torch.arange(num_types + 1, dtype=numbers.dtype, device=numbers.device)
            return cls(tuple(torch.searchsorted(numbers.contiguous(), bounds).diff().tolist()))
        positions = [(numbers == number).nonzero().view(-1) for number in range(num_types)]
        return cls(tuple(map(len, positions)), torch.cat(positions))

    def rows_of(self, number: int) -> slice | Tensor:
        """Return the positions of the rows of a type: a range, or int64."""
        first, count = sum(self.counts[:number]), self.counts[number]
        return slice(first, first + count) if self.by_type is None else self.by_type[first : first + count]

    def split(self, x: Tensor, places: Sequence[Place]) -> tuple[Tensor, ...]:
        """Return the rows at some places.

        Args:
            x: Rows of all vertices, [n, F].
            places: The places, which do not overlap.
        """
        parts: tuple[Tensor, ...] = SplitRows.apply(self, places, x)  # type: ignore[no-untyped-call]
        return parts

    def join(self, parts: Sequence[Tensor], places: Sequence[Place]) -> Tensor:
        """Return rows of all vertices [n, F], which are zero elsewhere.

        Args:
            parts: Rows of a type, [n_t, .].
            places: Their places, which do not overlap.
        """
        rows: Tensor = JoinedRows.apply(self, places, *parts)  # type: ignore[no-untyped-call]
        return rows

    def _taken(self, x: Tensor, places: Sequence[Place]) -> tuple[Tensor, ...]:
        selections = [(columns.of(x), self.rows_of(of_type)) for of_type, columns in places]
        return tuple(part[rows] if isinstance(rows, slice) else part.index_select(0, rows) for part, rows in selections)

    def _put(self, parts: Sequence[Tensor | None], places: Sequence[Place], width: int) -> Tensor:
        """Return rows [n, width] with `parts` at their places; None is zero."""
        like = next(part for part in parts if part is not None)
        y, ends = like.new_empty(sum(self.counts), width), [0] * len(self.counts)
        present = [(place, part) for place, part in zip(places, parts, strict=True) if part is not None]
        for (of_type, columns), part in sorted(present, key=lambda each: each[0]):
            if columns.first > ends[of_type]:
                self._set(y, of_type, Columns(ends[of_type], columns.first - ends[of_type]), None)
            self._set(y, of_type, columns, part)
            ends[of_type] = sum(columns)
        for of_type, end in enumerate(ends):
            if end < width:
                self._set(y, of_type, Columns(end, width - end), None)
        return y

    def _set(self, y: Tensor, of_type: int, columns: Columns, part: Tensor | None) -> None:
        """Set some columns of the rows of a type, to zero if `part` is None."""
        rows, target = self.rows_of(of_type), columns.of(y)
        if isinstance(rows, slice):
            _ = target[rows].zero_() if part is None else target[rows].copy_(part)
        else:
            _ = target.index_fill_(0, rows, 0) if part is None else target.index_copy_(0, rows, part)


class JoinedRows(torch.autograd.Function):
    """Function of `TypeOrder.join`; its backward is that of `TypeOrder.split`, and the other way round."""

    @staticmethod
    def forward(ctx: Any, order: TypeOrder, places: Sequence[Place], *parts: Tensor) -> Tensor:
        ctx.order, ctx.places = order, places
        return order._put(parts, places, max(sum(place.columns) for place in places))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts = zip(ctx.order._taken(grad, ctx.places), ctx.needs_input_grad[2:], strict=True)
        return None, None, *(part if needed else None for part, needed in parts)


class SplitRows(torch.autograd.Function):
    """Function of `TypeOrder.split`."""

    @staticmethod
    def forward(ctx: Any, order: TypeOrder, places: Sequence[Place], x: Tensor) -> tuple[Tensor, ...]:
        ctx.order, ctx.places, ctx.width = order, places, x.shape[1]
        ctx.set_materialize_grads(False)
        return order._taken(x, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return None, None, None
        return None, None, ctx.order._put(grads, ctx.places, ctx.width)


class RelationEdges:
    """Edges of one relation in a block.

    Args:
        index: Source and target of each edge, int64 [2, E].
    """

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self.features: Tensor | None = None
        """Features of these edges, [E, K]; None until a convolution has read them."""
        self._adjacency: Adjacency | None = None

    def adjacency(self, num_sources: int, num_targets: int) -> Adjacency:
        """Return the edges in compressed rows, computed at the first call.

        Args:
            num_sources: Number of sources.
            num_targets: Number of targets.
        """
        if self._adjacency is None:
            source, target = self.index
            self._adjacency = Adjacency.from_edges(source, target, num_sources=num_sources, num_targets=num_targets)
        return self._adjacency


class TypedBlock(NamedTuple):
    """Block whose rows of each vertex type are numbered on their own."""

    edges: tuple[RelationEdges, ...]
    """Edges of each relation."""
    num_targets: int
    """Number of targets."""
    sources: TypeOrder | None = None
    """Order of the sources. None: rows are not divided by type, and those of other types are computed too."""
    targets: TypeOrder | None = None
    """Order of the targets, which are the first sources; None like `sources`."""

    @classmethod
    def divide(cls, edges: tuple[Tensor, ...], vertex_type: Tensor, num_targets: int, num_types: int) -> TypedBlock:
        """Divide a block by types.

        Args:
            edges: Source and target of the edges of each relation, int64 [2, .].
            vertex_type: Number of each source's vertex type, [s, 1].
            num_targets: Number of targets, which are the first sources.
            num_types: Number of vertex types.
        """
        sources, targets = (TypeOrder.of(rows, num_types) for rows in (vertex_type, vertex_type[:num_targets]))
        position = torch.empty(len(vertex_type), dtype=torch.int64, device=vertex_type.device)
        for number, count in enumerate(sources.counts):
            position[sources.rows_of(number)] = torch.arange(count, device=position.device)
        return cls(tuple(RelationEdges(position[ends]) for ends in edges), num_targets, sources, targets)

    def split(self, x: Tensor, places: Sequence[Place]) -> tuple[Tensor, ...]:
        """Return the rows of the sources at some places, which do not overlap.

        Args:
            x: Rows of all sources, [s, F].
            places: The places.
        """
        if self.sources is None:
            return tuple(place.columns.of(x) for place in places)
        return self.sources.split(x, places)

    def num_targets_of(self, number: int) -> int:
        """Return the number of targets of a vertex type, which come first among its sources."""
        return self.num_targets if self.targets is None else self.targets.counts[number]

    def join(self, vertex_type: Tensor, types: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
        """Return rows [n, F] of all targets, with the parts of a type side by side.

        Args:
            vertex_type: Number of each source's vertex type, [s, 1].
            types: Number of the vertex type of each part.
            parts: Rows of the targets of the type.
        """
        places = side_by_side(types, parts)
        if self.targets is not None:
            return self.targets.join(parts, places)
        width = max(sum(place.columns) for place in places)
        rows = parts[0].new_zeros(self.num_targets, width)
        for part, (of_type, (first, count)) in zip(parts, places, strict=True):
            is_type = vertex_type[: self.num_targets] == of_type
            rows = rows + functional.pad(torch.where(is_type, part, 0.0), (first, width - first - count))
        return rows


def split_by_relation(edge_index: Tensor, edge_type: Tensor, num_relations: int) -> tuple[Tensor, ...]:
    """Return the source and target of the edges of each relation, int64 [2, .].

    Args:
        edge_index: Source and target of all edges, int64 [2, E].
        edge_type: Relation of each edge, integer [E].
        num_relations: Number of relations.
    """
    return tuple(edge_index[:, edge_type == number] for number in range(num_relations))
