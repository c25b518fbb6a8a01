"""Task on edges: predicts the labels of edges from the rows of their endpoints and the features of the edges.

A rank decodes the edges whose source it owns. Loss and metrics are those of `NodeTask`, on edges instead of vertices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.data import EdgeLabels
from weft.kernels import spmm
from weft.strategies import CandidateLinks, Step
from weft.training.custom_functions import RowLoss
from weft.training.tasks.link_prediction import (
    MAX_PAIRS,
    LinkHalo,
    VertexOwners,
    locate_endpoints,
    owner_of_vertices,
)
from weft.training.tasks.metrics import MetricCounts, NodeTask
from weft.training.tasks.scores import Metric


class EdgeRows:
    """Labelled edges of a rank, and the rows of their endpoints. Rows of other ranks are fetched once each.

    Args:
        labels: All labelled edges.
        located: Edges of the rank, with row positions as endpoints and their positions among the labelled edges.
        num_local: Number of rows of this rank.
        group: The ranks.
    """

    def __init__(self, labels: EdgeLabels, located: CandidateLinks, num_local: int, group: Group) -> None:
        self.labels = labels
        self.halo = LinkHalo(located, num_local, group, "labelled edges")
        self.edges = located.pairs[:, 2].split(MAX_PAIRS)
        """Positions among the labelled edges of the edges of each block, int64 [p]."""

    def decode(self, number: int, rows: Tensor, decoder: nn.Module) -> Tensor:
        """Return the logits [p, C] of a block of the edges.

        Args:
            number: Number of the block.
            rows: Endpoint rows of the block, [m, D].
            decoder: The decoder.
        """
        block, edges, features = self.halo.blocks[number], self.edges[number], self.labels.features
        features = rows.new_empty(len(edges), 0) if features is None else features[edges].to(rows.device)
        logits: Tensor = decoder(spmm(block.source, rows), spmm(block.target, rows), features)
        return logits

    @torch.no_grad()
    def logits(self, z: Tensor, decoder: nn.Module) -> Tensor:
        """Return the logits [k, C] of the rank's edges. All ranks must call it.

        Args:
            z: Rows of this rank, [n, D].
            decoder: The decoder.
        """
        fetched = self.halo.fetch(z)
        blocks = enumerate(self.halo.blocks)
        return torch.cat([self.decode(number, block.rows(z, fetched), decoder) for number, block in blocks])


class EdgeAssignment:
    """Assignment of the labelled edges to the ranks that own their sources.

    Args:
        labels: The labelled edges.
        rows: Vertices of this rank's rows.
        num_vertices: Number of vertices of the graph.
        group: The ranks.
    """

    def __init__(self, labels: EdgeLabels, rows: slice | Tensor, num_vertices: int, group: Group) -> None:
        self.labels, self.group = labels, group
        self.vertices = torch.arange(num_vertices)[rows]
        owner = owner_of_vertices(self.vertices, num_vertices, group)
        self.owners = VertexOwners(owner=owner, size=group.size)
        self.edges = (owner[labels.edges[:, 0]] == group.rank).nonzero()[:, 0]
        """Positions of this rank's edges among the labelled ones, int64 [k], ascending."""

    def rows_of(self, edges: Tensor) -> EdgeRows:
        """Return the rows of some edges of this rank. All ranks must call it.

        Args:
            edges: Positions of the edges among the labelled ones, int64 [k].
        """
        located = locate_endpoints(self.owners, self.labels.pairs(edges), self.vertices, self.group)
        return EdgeRows(self.labels, located, len(self.vertices), self.group)


class EdgeTask:
    """Task that trains a model to predict the labels of edges.

    Args:
        labels: The labelled edges.
        num_vertices: Number of vertices of the graph.
        decoder: The decoder, whose parameters `loss` gives gradients.
        rows: Vertices of this rank's rows.
        group: The ranks.
        loss: Loss of each edge.
        metrics: The metrics.
        empty: Allocates the gradient of a tensor of rows, in the same kind of memory.
    """

    def __init__(
        self,
        labels: EdgeLabels,
        num_vertices: int,
        decoder: nn.Module,
        rows: slice | Tensor,
        group: Group,
        loss: RowLoss,
        metrics: Sequence[Metric],
        empty: Callable[[Tensor], Tensor] = torch.empty_like,
    ) -> None:
        self.labels, self.decoder, self.group, self.empty = labels, decoder, group, empty
        assignment = EdgeAssignment(labels, rows, num_vertices, group)
        self.of_edges = NodeTask(labels, assignment.edges, group, loss=loss, metrics=metrics)
        """Loss and metrics, given the logits of this rank's edges."""
        self.assignment, self.scored = assignment, assignment.rows_of(assignment.edges)

    @cached_property
    def training(self) -> EdgeRows:
        """Training edges of this rank, for steps on all of them."""
        edges = self.assignment.edges
        return self.assignment.rows_of(edges[self.of_edges.labelled["train"][edges]])

    def loss(self, z: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Compute loss and gradient of a step, and set the gradients of the decoder's parameters.

        Args:
            z: Output rows of the model, [n, D].
            step: The step.

        Returns:
            This rank's part of the loss, [], and its gradient with respect to z, [n, D].
        """
        with self.group.meter.timer("decode"):
            edge_rows = EdgeRows(self.labels, step.links, len(z), self.group) if step.links else self.training

        def decode(number: int, rows: Tensor) -> Tensor:
            return edge_rows.decode(number, rows, self.decoder)

        def loss(number: int, logits: Tensor) -> tuple[Tensor, Tensor]:
            return self.of_edges.loss(logits, replace(step, vertices=edge_rows.edges[number]))

        return edge_rows.halo.backpropagate(z, self.empty, decode, loss)

    def counts(self, z: Tensor, step: Step) -> MetricCounts:
        """Return the results of an evaluation by split and metric; see `NodeTask.counts`.

        Args:
            z: Output rows of the model, [n, D].
            step: The step.
        """
        return self.of_edges.counts(self.scored.logits(z, self.decoder), step)

    def scores(self, counts: list[MetricCounts]) -> dict[str, float | None]:
        """Return the score of each metric and split; see `NodeTask.scores`."""
        return self.of_edges.scores(counts)

    def details(self, counts: list[MetricCounts]) -> dict[str, dict[str, Any]]:
        """Return the results for a report; see `Task.details`."""
        return self.of_edges.details(counts)
