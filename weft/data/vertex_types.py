"""Vertex types and relations: the ids of a type, the edges of a relation, and what a model needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.fields import GraphFields
from weft.data.tensor_checks import check_numbering
from weft.runtime.memory import require_memory
from weft.utils.errors import unknown

# The type of all vertices in a graph that has relations and no vertex types.
VERTEX = "vertex"


class TypedShape(NamedTuple):
    """As much of a graph's types as a model needs."""

    num_relations: int = 0
    """0 of a graph whose edges have no types."""
    featured: tuple[tuple[int, int], ...] = ()
    """(vertices, features) of each vertex type that has features, in the order of the types; () in a graph with x."""
    num_embedded: int = 0
    """The number of vertices without features, for each of which a model learns a row; 0 in a graph with x."""

    @property
    def has_input(self) -> bool:
        """Whether a model has to make rows of one width first."""
        return bool(self.featured or self.num_embedded)

    @property
    def mean_width(self) -> float:
        """Features of a vertex of a graph without x, on average."""
        count = self.num_embedded + sum(count for count, _ in self.featured)
        return sum(count * width for count, width in self.featured) / max(count, 1)


UNTYPED = TypedShape()
"""Of a graph with x and without relations."""


def type_range(graph: GraphFields, name: str) -> range:
    """The vertex ids of one type; InputError if there is no such type."""
    if name not in graph.vertex_types:
        raise unknown("vertex type", name, graph.vertex_types)
    i = graph.vertex_types.index(name)
    return range(graph.type_offsets[i], graph.type_offsets[i + 1])


def relation_edges(graph: GraphFields, name: str) -> Adjacency:
    """The in-edges of one relation, targets and sources numbered within their own type. Made anew at each call.

    Raises InputError if there is no such relation.
    """
    if graph.edge_type is None or name not in graph.relations:
        raise unknown("relation", name, graph.relations)
    source_type, _, target_type = name.split("|")
    sources, targets = type_range(graph, source_type), type_range(graph, target_type)
    in_edges, chosen = graph.in_edges, graph.edge_type == graph.relations.index(name)
    before = torch.zeros(in_edges.num_edges + 1, dtype=torch.int64)
    torch.cumsum(chosen, 0, out=before[1:])
    indptr = before[in_edges.indptr[targets.start : targets.stop + 1]]
    return Adjacency(
        indptr=indptr - indptr[0],
        indices=in_edges.indices[chosen] - sources.start,
        num_sources=len(sources),
        weight=None if in_edges.weight is None else in_edges.weight[chosen],
    )


def vertex_relations(names: Sequence[str]) -> tuple[str, ...]:
    """Relation names of a graph with one kind of vertices."""
    return tuple(f"{VERTEX}|{name.replace('|', '/')}|{VERTEX}" for name in names)


def numbered_relations(edge_type: Tensor, count: int | None = None) -> tuple[str, ...]:
    """Relation names of a graph with one kind of vertices whose relations have numbers only.

    count: how many there are, else one more than the largest. InputError where they are no numbers from 0 on.
    """
    if count is None:
        count = int(edge_type.max()) + 1 if len(edge_type) else 0
    check_numbering("edge_type", count, len(edge_type), "edges")
    return vertex_relations([str(i) for i in range(count)])


def put_rows(parts: Mapping[int, Tensor], num_rows: int, fill: float) -> Tensor:
    """A tensor of `num_rows` rows that holds each part from its first row on, and `fill` elsewhere."""
    some = next(iter(parts.values()))
    num_bytes = num_rows * some[:1].nbytes
    require_memory(num_bytes, f"labels or masks of {num_rows} vertices", "give as many vertices as the graph has")
    result = torch.full((num_rows, *some.shape[1:]), fill, dtype=some.dtype)
    for first, part in parts.items():
        result[first : first + len(part)] = part
    return result


def merge_features(vertex_types: Sequence[str], found: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
    """(x, features): one matrix where every type has features of one width, else the features per type."""
    widths = {part.shape[1:] for part in found.values()}
    if vertex_types and len(found) == len(vertex_types) and len(widths) == 1:
        return torch.cat([found[name] for name in vertex_types]), {}
    return None, dict(found)
