"""Inverse relations, which let messages also flow against the direction of the edges."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weft.data.edges import build
from weft.data.graph import Graph
from weft.utils.errors import InputError

INVERSE = "inverse of "
"""Prefix of an inverse relation's name."""


def with_inverse_relations(graph: Graph) -> Graph:
    """Return the graph with an inverse edge v -> u for every edge u -> v, of a new relation.

    The relation is called 'target type|inverse of name|source type' (Schlichtkrull et al. 2018, section 2). An inverse
    edge has the weight and the features of the edge that it reverses.

    Raises:
        InputError: If the graph has no relations, or already has inverse ones.
    """
    if graph.edge_type is None:
        raise InputError(f"{graph.name} has no relations: leave out --inverse-relations")
    inverse = inverse_of(graph.relations)
    if set(inverse) & set(graph.relations):
        raise InputError(f"{graph.name} has inverse relations already: leave out --inverse-relations")
    source, target = graph.in_edges.edges()
    edges = build(
        torch.cat([source, target]),
        torch.cat([target, source]),
        num_vertices=graph.num_vertices,
        weight=twice(graph.in_edges.weight),
        edge_features=twice(graph.edge_features),
        edge_type=torch.cat([graph.edge_type.int(), graph.edge_type.int() + len(inverse)]),
    )
    return replace(
        graph,
        in_edges=edges.in_edges,
        edge_type=edges.edge_type,
        edge_features=edges.edge_features,
        relations=(*graph.relations, *inverse),
        trusted=True,
    )


def forward_relations(graph: Graph) -> tuple[str, ...]:
    """Return the relations of a graph without those that `with_inverse_relations` has added."""
    half = len(graph.relations) // 2
    forward, rest = graph.relations[:half], graph.relations[half:]
    return forward if half and rest == inverse_of(forward) else graph.relations


def inverse_of(relations: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the inverse relations, in the same order."""
    parts = (name.split("|") for name in relations)
    return tuple(f"{target}|{INVERSE}{name}|{source}" for source, name, target in parts)


def twice(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor [E, ...] concatenated with itself, [2 E, ...]: first for the edges, then for their inverses."""
    return None if tensor is None else torch.cat([tensor, tensor])
