"""Task on edges: predicts the labels of edges from the rows of their endpoints and the features of the edges.

A rank decodes the edges whose source it owns. Loss and metrics are those of `NodeTask`, on edges instead of vertices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Group
from weft.cost import Trace
from weft.data import EdgeLabels
from weft.kernels import spmm
from weft.strategies import CandidateLinks, Step
from weft.training.custom_functions import RowLoss
from weft.training.tasks.link_prediction import (
    MAX_PAIRS,
    LinkHalo,
    VertexOwners,
    halo_operation,
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


@dataclass(frozen=True, kw_only=True)
class EdgeAssignment(VertexOwners):
    """Assignment of the labelled edges to the ranks that own their sources."""

    labels: EdgeLabels
    """The labelled edges."""

    def edges(self, rank: int) -> Tensor:
        """Return the positions of a rank's edges among the labelled ones, int64 [k], ascending."""
        return (self.owner[self.labels.edges[:, 0]] == rank).nonzero()[:, 0]

    def train(self, rank: int) -> Tensor:
        """Return the rows (source, target, position) of a rank's training edges, int64 [k, 3]."""
        pairs = self.labels.training_pairs()
        return pairs[self.owner[pairs[:, 0]] == rank]

    def rows_of(self, pairs: Tensor, vertices: Tensor, group: Group) -> EdgeRows:
        """Return the rows of some edges of this rank. All ranks must call it.

        Args:
            pairs: Rows (source, target, position) of the edges, int64 [k, 3].
            vertices: Vertices of this rank's rows, int64 [n].
            group: The ranks.
        """
        return EdgeRows(self.labels, locate_endpoints(self, pairs, vertices, group), len(vertices), group)

    def trace(self, rank: int, width: int, itemsize: int) -> Trace:
        """Return the exchanges of the task in a training step, in addition to those of model and decoder.

        Args:
            rank: The rank whose bytes are counted.
            width: Width of the model's output rows.
            itemsize: Bytes of each number.
        """
        if self.size == 1:
            return Trace(operations=())
        received = [self.missing(self.train(other), other)[1] for other in range(self.size)]
        rows = halo_operation(received, rank, width * itemsize)
        return Trace(operations=(rows, rows.adjoint()))


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
        self.vertices, self.num_vertices = torch.arange(num_vertices)[rows], num_vertices
        self.of_edges = NodeTask(labels, slice(0), group, loss=loss, metrics=metrics)
        """Loss and metrics, given the logits of edges."""
        self._rows: dict[bool, EdgeRows] = {}
        """Training edges (True) and all edges (False) of this rank."""

    def rows_of(self, z: Tensor, step: Step) -> EdgeRows:
        """Return the edges that this rank scores in a step, with the rows of their endpoints. All ranks must call it.

        Args:
            z: Output rows of the model, [n, D]: of all vertices, of a receptive field, or of a mini-batch.
            step: The step.
        """
        if step.links is not None:
            return EdgeRows(self.labels, step.links, len(z), self.group)
        if step.training not in self._rows:
            rank, vertices = self.group.rank, self.vertices if step.vertices is None else step.vertices
            owner = owner_of_vertices(vertices, self.num_vertices, self.group)
            assignment = EdgeAssignment(owner=owner, size=self.group.size, labels=self.labels)
            pairs = assignment.train(rank) if step.training else self.labels.pairs(assignment.edges(rank))
            self._rows[step.training] = assignment.rows_of(pairs, vertices, self.group)
        return self._rows[step.training]

    def loss(self, z: Tensor, step: Step, span: slice | None = None) -> tuple[Tensor, Tensor]:
        """Compute loss and gradient of a step, and set the gradients of the decoder's parameters.

        Args:
            z: Output rows of the model, [n, D].
            step: The step.
            span: None, for all rows of the rank.

        Returns:
            This rank's part of the loss, [], and its gradient with respect to z, [n, D].
        """
        assert span is None
        with self.group.meter.timer("decode"):
            edge_rows = self.rows_of(z, step)

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
        edge_rows = self.rows_of(z, step)
        logits = edge_rows.logits(z, self.decoder)
        return self.of_edges.counts(logits, replace(step, vertices=torch.cat(edge_rows.edges)))

    def scores(self, counts: list[MetricCounts]) -> dict[str, float | None]:
        """Return the score of each metric and split; see `NodeTask.scores`."""
        return self.of_edges.scores(counts)

    def details(self, counts: list[MetricCounts]) -> dict[str, dict[str, Any]]:
        """Return the results for a report; see `Task.details`."""
        return self.of_edges.details(counts)
