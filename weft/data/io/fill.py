"""Features and labels for a graph that lacks them, and features normalized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.data.graph import Graph
from weft.data.splits import balanced_classes, random_matrix, random_split
from weft.utils.errors import InputError


def placed(drawn: Tensor, graph: Graph) -> Tensor:
    """What was drawn for the vertices by their original ids, in the order in which the graph has them."""
    return drawn if graph.ids is None else drawn[graph.ids]


def with_random_features(graph: Graph, width: int, seed: int) -> Graph:
    """The graph with standard normal features of `width` columns where it has none.

    All vertices get them, or those vertex types that lack any. Raises InputError if nothing is lacking.
    """
    if not graph.features and graph.x is None:
        return replace(graph, x=placed(random_matrix(graph.num_vertices, width, seed), graph), trusted=True)
    missing = [] if graph.x is not None else [name for name in graph.vertex_types if name not in graph.features]
    if not missing:
        raise InputError(f"{graph.name} has features of its own: leave out --random-features")
    drawn = {
        name: random_matrix(len(graph.type_range(name)), width, seed, 1 + graph.vertex_types.index(name))
        for name in missing
    }
    return replace(graph, features={**graph.features, **drawn}, trusted=True)


def with_random_classes(graph: Graph, num_classes: int, seed: int) -> Graph:
    """The graph with random labels and a random 60/20/20 split. Raises InputError if it has labels."""
    if graph.y is not None:
        raise InputError(f"{graph.name} has labels of its own: leave out --random-classes")
    y = balanced_classes(graph.num_vertices, num_classes, seed)
    drawn = {"y": y, **random_split(torch.ones(len(y), dtype=torch.bool), seed)._asdict()}
    fields: dict[str, Any] = {name: placed(tensor, graph) for name, tensor in drawn.items()}
    return replace(graph, **fields, trusted=True)


def with_normalized_features(graph: Graph) -> Graph:
    """A copy whose rows of x have absolute values that sum to 1; a row of zeros stays. InputError without x."""
    if graph.x is None:
        raise InputError(f"{graph.name} has no features to normalize: leave out --normalize-features")
    total = graph.x.abs().sum(1, keepdim=True)
    return replace(graph, x=graph.x / total.where(total > 0, 1.0))
