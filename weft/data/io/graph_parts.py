"""A graph as its source gives it: edges and features in parts. Gathered here, or written part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from weft.data.edges import build
from weft.data.fields import GraphFields
from weft.data.splits import Masks
from weft.data.vertex_names import VertexNames
from weft.utils.errors import InputError

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgesOfPart:
    """Some edges, between vertices by number; checked."""

    source: Tensor
    """int32 or int64 [e]."""
    target: Tensor
    """int32 or int64 [e]."""
    weight: Tensor | None = None
    """float32 [e]."""
    features: Tensor | None = None
    """float32 [e, K]."""

    def rows(self, first: int, last: int) -> EdgesOfPart:
        """Those from one place up to another."""
        found = {name: getattr(self, name) for name in ("source", "target", "weight", "features")}
        return EdgesOfPart(**{name: rows[first:last] for name, rows in found.items() if rows is not None})


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphParts:
    """A graph of N vertices whose edges and features are read when they are asked for, each time from the start."""

    name: str
    edges: Callable[[], Iterator[EdgesOfPart]]
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


def gather_parts(parts: GraphParts) -> GraphFields:
    """The graph in memory."""
    found, none = list(parts.edges()), torch.empty(0, dtype=torch.int64)
    ends = (concatenate_parts(getattr(part, end) for part in found) for end in ("source", "target"))
    source, target = (none if ids is None else ids for ids in ends)
    weight, features = (concatenate_parts(getattr(part, name) for part in found) for name in ("weight", "features"))
    edges = build(
        source,
        target,
        num_vertices=parts.num_vertices,
        weight=weight,
        edge_features=features,
        undirected=parts.undirected,
    )
    return replace(
        edges,
        name=parts.name,
        x=None if parts.x is None else concatenate_parts(parts.x()),
        y=parts.y,
        vertex_names=parts.vertex_names,
        **parts.masks._asdict(),
    )


def concatenate_parts(parts: Iterable[Tensor | None]) -> Tensor | None:
    """The rows of all parts; None where there are none."""
    found = [part for part in parts if part is not None]
    return (found[0] if len(found) == 1 else torch.cat(found)) if found else None


def require_rows(field: str, num_rows: int, num_vertices: int) -> None:
    """InputError unless there is a row for each vertex."""
    if num_rows != num_vertices:
        raise InputError(f"{field} has {num_rows} rows, and the graph {num_vertices} vertices: give a row for each")
