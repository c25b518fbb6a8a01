"""Random features and labels for a graph that has none, and normalized features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.data.graph import Graph
from weft.data.splits import balanced_classes, random_matrix, random_split
from weft.utils.errors import InputError


def in_graph_order(tensor: Tensor, graph: Graph) -> Tensor:
    """Return rows that are ordered by original vertex id in the order of the graph's vertices.

    Args:
        tensor: One row for each vertex, by original id.
        graph: The graph.
    """
    return tensor if graph.ids is None else tensor[graph.ids]


def with_random_features(graph: Graph, width: int, seed: int) -> Graph:
    """Return the graph with standard normal features for all vertices, or for the vertex types without features.

    Args:
        graph: The graph.
        width: Number of features.
        seed: Seed of the features.

    Raises:
        InputError: If no features are missing.
    """
    if not graph.features and graph.x is None:
        return replace(graph, x=in_graph_order(random_matrix(graph.num_vertices, width, seed), graph), trusted=True)
    missing = [] if graph.x is not None else [name for name in graph.vertex_types if name not in graph.features]
    if not missing:
        raise InputError(f"{graph.name} already has features: leave out --random-features")
    features = {
        name: random_matrix(len(graph.type_range(name)), width, seed, 1 + graph.vertex_types.index(name))
        for name in missing
    }
    return replace(graph, features={**graph.features, **features}, trusted=True)


def with_random_classes(graph: Graph, num_classes: int, seed: int) -> Graph:
    """Return the graph with random labels and a random 60/20/20 split.

    Args:
        graph: The graph.
        num_classes: Number of classes.
        seed: Seed of labels and split.

    Raises:
        InputError: If it has labels.
    """
    if graph.y is not None:
        raise InputError(f"{graph.name} already has labels: leave out --random-classes")
    y = balanced_classes(graph.num_vertices, num_classes, seed)
    arrays = {"y": y, **random_split(torch.ones(len(y), dtype=torch.bool), seed)._asdict()}
    fields: dict[str, Any] = {name: in_graph_order(tensor, graph) for name, tensor in arrays.items()}
    return replace(graph, **fields, trusted=True)


def with_normalized_features(graph: Graph) -> Graph:
    """Return the graph with each row of x divided by the sum of its absolute values; rows of zeros are unchanged.

    Raises:
        InputError: If it has no x.
    """
    if graph.x is None:
        raise InputError(f"{graph.name} has no features to normalize: leave out --normalize-features")
    x = graph.x[:].float()
    total = x.abs().sum(1, keepdim=True)
    return replace(graph, x=x / total.where(total > 0, 1.0))
