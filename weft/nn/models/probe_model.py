"""Probe model: a copy of a model on a few vertices with random edges, to find properties of it by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from weft.data import Adjacency, Graph
from weft.nn.aggregate.topology import Topology
from weft.nn.graph_view import GraphView, Inputs
from weft.nn.layers.typed_input import typed_rows, with_own_rows
from weft.nn.workload.workload import Workload


def random_topology(
    graph: Graph, num_vertices: int, degree: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> Topology:
    """Return random edges with the same kinds of data as the edges of a graph: weights, features and types.

    Args:
        graph: The graph.
        num_vertices: Number of vertices between which edges are drawn.
        degree: Number of edges for each vertex, on average.
        dtype: Type of weights and features.
        device: Device of the edges.
        seed: Seed of the random numbers.
    """
    num_edges, random = num_vertices * degree, torch.Generator().manual_seed(seed)
    source, target = (torch.randint(num_vertices, (num_edges,), generator=random) for _ in range(2))
    weight = None if graph.in_edges.weight is None else torch.ones(num_edges, dtype=dtype)
    adjacency = Adjacency.from_edges(source, target, num_sources=num_vertices, num_targets=num_vertices, weight=weight)
    features = torch.randn(num_edges, graph.num_edge_features, generator=random) if graph.num_edge_features else None
    edge_type = None
    if graph.edge_type is not None:
        edge_type = torch.randint(len(graph.relations), (num_edges,), generator=random)
    return Topology(
        adjacency.to(device),
        edge_features=features,
        dtype=dtype,
        edge_type=edge_type,
        num_relations=len(graph.relations),
    )


def some_vertices(graph: Graph, number: int) -> Tensor:
    """Return vertices of a graph that are evenly spaced, so that all large types occur: int64 [number].

    Args:
        graph: The graph.
        number: Number of vertices; if the graph has fewer, some occur twice.
    """
    return torch.arange(number) * graph.num_vertices // number


class ProbeModel:
    """Copy of a workload's model, in training mode, with the features of some vertices and edges between them.

    Args:
        work: The workload.
        topology: The edges.
        vertices: The vertices, int64 [n], in any order.
    """

    def __init__(self, work: Workload, topology: Topology, vertices: Tensor) -> None:
        device = topology.adjacency.device
        self.work, self.topology = work, topology
        self.x = work.features(vertices, device)
        self.typed = typed_rows(work.graph, vertices, device, work.dtype)
        self.model = with_own_rows(work.model, work.graph, vertices)[0].to(device).train()

    def forward(self, view_type: type[GraphView], **options: Any) -> Callable[[], Tensor]:
        """Return a function that runs the model once and returns its logits.

        Args:
            view_type: Class of the views.
            **options: Further arguments of the views.
        """
        inputs = Inputs(rows=self.x, optimisations=self.work.optimisations, typed=self.typed)
        num_stages = cast(int, self.model.num_stages)

        def run() -> Tensor:
            views = [view_type(self.topology, inputs=inputs, key=1, **options) for _ in range(num_stages)]
            logits: Tensor = self.model(views, self.x)
            return logits

        return run
