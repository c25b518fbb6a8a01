"""A graph as its source gives it: edges and features in parts. Gathered here, or written part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.data.edges import build, count_vertices, vertex_count
from weft.data.fields import GraphFields
from weft.data.names import VertexNames
from weft.data.splits import Masks

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgePart:
    """Some edges, between vertices by number; checked."""

    source: Tensor
    """int64 [e]."""
    target: Tensor
    """int64 [e]."""
    weight: Tensor | None = None
    """float32 [e]."""
    features: Tensor | None = None
    """float32 [e, K]."""

    def reversed(self) -> EdgePart:
        """The same edges in the other direction."""
        return replace(self, source=self.target, target=self.source)


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphParts:
    """A graph of N vertices whose edges and features are read when they are asked for, each time from the start."""

    name: str
    edges: Callable[[], Iterator[EdgePart]]
    """The edges; all parts have weights, or features of one width, or none has."""
    num_vertices: int | None = None
    """N; None: one more than the largest number in the edges."""
    x: Callable[[], Iterator[Tensor]] | None = None
    """Features, float32 [n, F] of the next n vertices each."""
    y: Tensor | None = None
    """As in GraphFields."""
    masks: Masks = field(default_factory=Masks)
    vertex_names: VertexNames | None = None
    undirected: bool = False
    """Whether an edge also leads back: each pair that an edge joins is joined once in either direction then.

    Of several edges from one vertex to another, the first that is given stays, and one given before one turned round.
    """


def gathered(parts: GraphParts) -> GraphFields:
    """The graph in memory."""
    found = list(parts.edges())
    given = [*found, *(part.reversed() for part in found)] if parts.undirected else found
    none = torch.empty(0, dtype=torch.int64)
    source, target = (torch.cat([none, *(getattr(part, end) for part in given)]) for end in ("source", "target"))
    weight, features = (together(getattr(part, name) for part in given) for name in ("weight", "features"))
    num_vertices = known_vertices(parts, lambda: count_vertices(source, target, "edges"))
    if parts.undirected:
        first = first_of_pairs(source, target)
        source, target = source[first], target[first]
        weight, features = (None if rows is None else rows[first] for rows in (weight, features))
    edges = build(source, target, num_vertices=num_vertices, weight=weight, edge_features=features)
    return replace(
        edges,
        name=parts.name,
        x=None if parts.x is None else together(parts.x()),
        y=parts.y,
        vertex_names=parts.vertex_names,
        **parts.masks._asdict(),
    )


def first_of_pairs(source: Tensor, target: Tensor) -> Tensor:
    """Where each pair of ends is first among edges int64 [E], ascending."""
    order = source.argsort(stable=True)
    order = order[target[order].argsort(stable=True)]
    pairs = torch.stack([target[order], source[order]])
    new = torch.ones(len(order), dtype=torch.bool)
    new[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(0)
    return order[new].sort().values


def together(parts: Iterable[Tensor | None]) -> Tensor | None:
    """The rows of all parts; None where there are none."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def known_vertices(parts: GraphParts, count: Callable[[], int]) -> int:
    """N, as it is stated or counted."""
    return vertex_count(count() if parts.num_vertices is None else parts.num_vertices)


def require_rows(field: str, num_rows: int, num_vertices: int) -> None:
    """InputError unless there is a row for each vertex."""
    if num_rows != num_vertices:
        raise InputError(f"{field} has {num_rows} rows, and the graph {num_vertices} vertices: give a row for each")
