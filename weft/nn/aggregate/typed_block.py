"""Block of edges of a heterogeneous graph, divided by vertex type and relation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class TypePositions(NamedTuple):
    """Positions of the rows of each vertex type in a block."""

    sources: tuple[Tensor, ...]
    """Sources of each type, int64 [s_t]; its targets come first."""
    targets: tuple[Tensor, ...]
    """Targets of each type, int64 [n_t]."""
    order: Tensor
    """Position of each target in the concatenation of `targets`, int64 [n]."""
    in_order: bool
    """True if all sources are targets, and are sorted by type: then the rows of a type are a range."""

    @classmethod
    def of(cls, vertex_type: Tensor, num_targets: int, num_types: int) -> TypePositions:
        """Find the rows of each type.

        Args:
            vertex_type: Number of each source's vertex type, [s].
            num_targets: Number of targets, which are the first sources.
            num_types: Number of vertex types.
        """
        sources = tuple((vertex_type == number).nonzero().view(-1) for number in range(num_types))
        targets = tuple(ids[: int((ids < num_targets).sum())] for ids in sources)
        in_order = num_targets == len(vertex_type) and bool((vertex_type[1:] >= vertex_type[:-1]).all())
        return cls(sources, targets, torch.cat(targets).argsort(), in_order)


class TypedBlock(NamedTuple):
    """Block whose rows of each vertex type are numbered on their own."""

    edges: tuple[Tensor, ...]
    """Source and target of the edges of each relation, int64 [2, .]."""
    num_targets: int
    """Number of targets."""
    rows: TypePositions | None = None
    """Rows of each type. None: rows are not divided by type, and those of other types are computed too."""

    @classmethod
    def divide(cls, edges: tuple[Tensor, ...], vertex_type: Tensor, num_targets: int, num_types: int) -> TypedBlock:
        """Divide a block by types.

        Args:
            edges: Source and target of the edges of each relation, int64 [2, .].
            vertex_type: Number of each source's vertex type, [s].
            num_targets: Number of targets, which are the first sources.
            num_types: Number of vertex types.
        """
        rows = TypePositions.of(vertex_type, num_targets, num_types)
        position = torch.empty(len(vertex_type), dtype=torch.int64, device=vertex_type.device)
        for ids in rows.sources:
            position[ids] = torch.arange(len(ids), device=ids.device)
        return cls(tuple(position[ends] for ends in edges), num_targets, rows)

    def sources_of(self, x: Tensor, number: int) -> Tensor:
        """Return the rows of the sources of a vertex type.

        Args:
            x: Rows of all sources, [s, F].
            number: Number of the type.
        """
        if self.rows is None:
            return x
        sources = self.rows.sources
        if self.rows.in_order:
            return x.narrow(0, sum(map(len, sources[:number])), len(sources[number]))
        return x.index_select(0, sources[number])

    def num_targets_of(self, number: int) -> int:
        """Return the number of targets of a vertex type, which come first among its sources."""
        return self.num_targets if self.rows is None else len(self.rows.targets[number])

    def join(self, vertex_type: Tensor, parts: dict[int, Tensor]) -> Tensor:
        """Return rows [n, F] of all targets, which are zero for a type without a part.

        Args:
            vertex_type: Number of each source's vertex type, [s, 1].
            parts: Rows of the targets of a type, by its number, with at most F columns.
        """
        if self.rows is None:
            return select_by_type(vertex_type[: self.num_targets], tuple(parts), *parts.values())
        width, like = max(part.shape[1] for part in parts.values()), next(iter(parts.values()))
        rows = [
            _widened(parts[number], width) if number in parts else like.new_zeros(len(ids), width)
            for number, ids in enumerate(self.rows.targets)
        ]
        joined = torch.cat(rows)
        return joined if self.rows.in_order else joined.index_select(0, self.rows.order)


def split_by_relation(edge_index: Tensor, edge_type: Tensor, num_relations: int) -> tuple[Tensor, ...]:
    """Return the source and target of the edges of each relation, int64 [2, .].

    Args:
        edge_index: Source and target of all edges, int64 [2, E].
        edge_type: Relation of each edge, integer [E].
        num_relations: Number of relations.
    """
    return tuple(edge_index[:, edge_type == number] for number in range(num_relations))


def select_by_type(vertex_type: Tensor, numbers: tuple[int, ...], *parts: Tensor) -> Tensor:
    """Return rows [n, .] that are taken, for each vertex, from the tensor of its type.

    Rows of other types are zero, as are columns that a type does not have.

    Args:
        vertex_type: Number of each vertex's type, [n, 1].
        numbers: Number of the type of each part.
        *parts: Rows of all vertices, [n, .].
    """
    widest = max(part.shape[1] for part in parts)
    rows = parts[0].new_zeros(len(vertex_type), widest)
    for number, part in zip(numbers, parts, strict=True):
        rows = torch.where(vertex_type == number, _widened(part, widest), rows)
    return rows


def _widened(rows: Tensor, width: int) -> Tensor:
    missing = width - rows.shape[1]
    return functional.pad(rows, (0, missing)) if missing else rows
