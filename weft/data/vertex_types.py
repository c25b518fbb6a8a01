"""Vertex types and relations: the ids of a type, the edges of a relation, and the sizes that a model depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.checks.tensor_checks import check_numbering
from weft.data.fields import GraphFields
from weft.runtime.memory.limit import check_fits_memory
from weft.utils.errors import unknown

VERTEX = "vertex"
"""Name of the only vertex type in a graph that has relations but no vertex types."""


class TypedShape(NamedTuple):
    """Sizes of a graph's types, on which the structure of a model depends."""

    num_relations: int = 0
    """Number of relations; 0 if edges have no types."""
    featured: tuple[tuple[int, int], ...] = ()
    """(vertices, features) of each vertex type that has features, in the order of the types; () in a graph with x."""
    num_embedded: int = 0
    """Number of vertices without features, for each of which a model learns an embedding; 0 with x."""

    @property
    def has_input(self) -> bool:
        """True if a model first has to map the types' features and embeddings to rows of one width."""
        return bool(self.featured or self.num_embedded)

    @property
    def mean_width(self) -> float:
        """Mean number of features per vertex of a graph without x."""
        count = self.num_embedded + sum(count for count, _ in self.featured)
        return sum(count * width for count, width in self.featured) / max(count, 1)


UNTYPED = TypedShape()
"""Shape of a graph with x and without relations."""


def type_range(graph: GraphFields, name: str) -> range:
    """Return the vertex ids of one type.

    Args:
        graph: The graph.
        name: Name of the type.

    Raises:
        InputError: If there is no such type.
    """
    if name not in graph.vertex_types:
        raise unknown("vertex type", name, graph.vertex_types)
    i = graph.vertex_types.index(name)
    return range(graph.type_offsets[i], graph.type_offsets[i + 1])


def relation_edges(graph: GraphFields, name: str) -> Adjacency:
    """Return the in-edges of one relation, with targets and sources numbered within their types. Not cached.

    Args:
        graph: The graph.
        name: Name of the relation.

    Raises:
        InputError: If there is no such relation.
    """
    if graph.edge_type is None or name not in graph.relations:
        raise unknown("relation", name, graph.relations)
    source_type, _, target_type = name.split("|")
    sources, targets = type_range(graph, source_type), type_range(graph, target_type)
    in_edges, mask = graph.in_edges, graph.edge_type == graph.relations.index(name)
    num_before = torch.zeros(in_edges.num_edges + 1, dtype=torch.int64)
    torch.cumsum(mask, 0, out=num_before[1:])
    indptr = num_before[in_edges.indptr[targets.start : targets.stop + 1]]
    return Adjacency(
        indptr=indptr - indptr[0],
        indices=in_edges.indices[mask] - sources.start,
        num_sources=len(sources),
        weight=None if in_edges.weight is None else in_edges.weight[mask],
    )


def vertex_relations(names: Sequence[str]) -> tuple[str, ...]:
    """Return full relation names for a graph with one vertex type, from short names."""
    return tuple(f"{VERTEX}|{name.replace('|', '/')}|{VERTEX}" for name in names)


def numbered_relations(edge_type: Tensor, count: int | None = None) -> tuple[str, ...]:
    """Return relation names for a graph with one vertex type whose relations are only numbered.

    Args:
        edge_type: Relation of each edge, integer [E].
        count: Number of relations. Default: one more than the largest number.

    Raises:
        InputError: If the relations are not numbered from 0 without large gaps.
    """
    if count is None:
        count = int(edge_type.max()) + 1 if len(edge_type) else 0
    check_numbering("edge_type", count, len(edge_type), "edges")
    return vertex_relations([str(i) for i in range(count)])


def put_rows(parts: Mapping[int, Tensor], num_rows: int, fill: float) -> Tensor:
    """Return a tensor that contains each part from its first row on, and a fill value elsewhere.

    Args:
        parts: Parts by first row.
        num_rows: Number of rows of the result.
        fill: The value of all other rows.
    """
    example = next(iter(parts.values()))
    num_bytes = num_rows * example[:1].nbytes
    check_fits_memory(num_bytes, f"labels or masks of {num_rows} vertices", "give as many vertices as the graph has")
    result = torch.full((num_rows, *example.shape[1:]), fill, dtype=example.dtype)
    for first, part in parts.items():
        result[first : first + len(part)] = part
    return result


def merge_features(
    vertex_types: Sequence[str], features: Mapping[str, Tensor]
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return (x, features): one matrix if every type has features of the same width, else the features per type.

    Args:
        vertex_types: Names of the types, in order.
        features: Features of the types that have some.
    """
    widths = {part.shape[1:] for part in features.values()}
    if vertex_types and len(features) == len(vertex_types) and len(widths) == 1:
        return torch.cat([features[name] for name in vertex_types]), {}
    return None, dict(features)
