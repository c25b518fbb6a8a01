"""Aggregates that reduce in-neighbours to a sum, a mean, or a maximum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.kernels import Scale, spmm, spmm_max, spmm_max_positions, spmm_transposed
from weft.nn.aggregate.aggregate import SLOT_BYTES, TARGET_BYTES, Aggregate, Rows, WorkingSet
from weft.nn.aggregate.partial import Partial, add, merge_maxima
from weft.nn.aggregate.topology import EdgeSubset, Norm, Topology
from weft.runtime import native
from weft.utils.errors import check_word


@dataclass(frozen=True)
class Sum(Aggregate):
    """Sum over in-neighbours, optionally normalized; zero for vertices without in-edges."""

    norm: Norm = None
    """'gcn': D^-1/2 (A + I) D^-1/2 (Kipf and Welling 2017, eq. 2). 'symmetric': D^-1/2 A D^-1/2, without self-loops.
    'mean': divided by the in-degree. None: a plain sum."""
    weighted: bool = False
    """True if messages are multiplied by the edge weights, if the graph has any."""
    linear = can_save = True

    def __post_init__(self) -> None:
        if self.norm is not None:
            # The scalings of "laplacian" are those of a sum without self-loops, which `LaplacianSum` computes.
            check_word("norm", self.norm, ("gcn", "symmetric", "mean"))

    @property
    def loops(self) -> bool:
        return self.norm == "gcn"

    @property
    def reads_weight(self) -> bool:
        return self.weighted

    def run(self, topology: Topology, prepared: Rows, steps: int = 1) -> Tensor:
        x, adjacency = prepared["x"], topology.adjacency
        scale, weighted = topology.scale(self.norm, self.weighted, x.dtype), self.weighted and topology.has_weight
        for _ in range(steps):
            x = spmm(adjacency, x, scale=scale, weighted=weighted)
        return x

    def transposed(self, topology: Topology, grad: Tensor, into: Tensor | None = None) -> Tensor:
        scale, weighted = topology.scale(self.norm, self.weighted, grad.dtype), self.weighted and topology.has_weight
        return spmm_transposed(topology.adjacency, grad, scale=scale, weighted=weighted, into=into)

    def working_set(
        self, adjacency: Adjacency, width: int, *, itemsize: int, size: int = 1, num_edge_features: int = 0
    ) -> WorkingSet:
        del num_edge_features
        row = -(-width // size) * itemsize
        edge = adjacency.indices.itemsize + (itemsize if adjacency.weight is not None else 0)
        # Target: ids, two scalings, its result, and a self-loop. Source: ids, a scaling, its row. Edge: id and weight.
        return WorkingSet(TARGET_BYTES + 2 * itemsize + row + edge * self.loops, SLOT_BYTES + itemsize + row, edge)

    def partial(self, part: EdgeSubset, rows: Rows) -> Partial:
        return Partial(self.apply(part, rows))

    def combine(self, partials: Sequence[Partial]) -> Tensor:
        return add(partials)


@dataclass(frozen=True)
class LaplacianSum(Aggregate):
    """Sum over in-neighbours by the matrix I - L, where L is the Laplacian of PyG's `get_laplacian`.

    The matrix is D^-1/2 A D^-1/2, where D are the out-degrees. A and D lack self-loops. Edges have a coefficient each,
    since scalings of the vertices alone would count self-loops.
    """

    weighted: bool = False
    """True if messages, and the degrees, are multiplied by the edge weights, if the graph has any."""
    linear = can_save = True

    @property
    def reads_weight(self) -> bool:
        return self.weighted

    def run(self, topology: Topology, prepared: Rows, steps: int = 1) -> Tensor:
        x = prepared["x"]
        edges = topology.laplacian(self.weighted, x.dtype)
        for _ in range(steps):
            x = spmm(edges, x, weighted=True)
        return x

    def transposed(self, topology: Topology, grad: Tensor, into: Tensor | None = None) -> Tensor:
        return spmm_transposed(topology.laplacian(self.weighted, grad.dtype), grad, weighted=True, into=into)

    def working_set(
        self, adjacency: Adjacency, width: int, *, itemsize: int, size: int = 1, num_edge_features: int = 0
    ) -> WorkingSet:
        del num_edge_features
        row, edge = -(-width // size) * itemsize, adjacency.indices.itemsize + 2 * itemsize
        # Target: ids, a scaling, its result. Source: ids, a scaling, its row. Edge: ids, weight and coefficient, also
        # of the transpose; endpoints while coefficients are computed.
        return WorkingSet(TARGET_BYTES + itemsize + row, SLOT_BYTES + itemsize + row, 2 * edge + 16)

    def partial(self, part: EdgeSubset, rows: Rows) -> Partial:
        return Partial(self.apply(part, rows))

    def combine(self, partials: Sequence[Partial]) -> Tensor:
        return add(partials)


@dataclass(frozen=True)
class Max(Aggregate):
    """Maximum over in-neighbours, column by column; zero for vertices without in-edges.

    Among equal values, the first in-edge gets the gradient.
    """

    def run(self, topology: Topology, prepared: Rows, steps: int = 1) -> Tensor:
        x = prepared["x"]
        for _ in range(steps):
            x = spmm_max(topology.adjacency, x)
        return x

    def working_set(
        self, adjacency: Adjacency, width: int, *, itemsize: int, size: int = 1, num_edge_features: int = 0
    ) -> WorkingSet:
        del num_edge_features
        row, edge_id = -(-width // size) * itemsize, native.id_dtype(adjacency.num_edges).itemsize
        weight = itemsize if adjacency.weight is not None else 0
        # Target: its result, the result's gradient, the positions of the maxima. Source: its row, the row's gradient,
        # and that gradient again before it is accumulated. Edge: source id and weight, also of the transpose; edge id.
        per_edge = 2 * (adjacency.indices.itemsize + weight) + edge_id
        return WorkingSet(TARGET_BYTES + 3 * row, SLOT_BYTES + 3 * row, per_edge)

    def partial(self, part: EdgeSubset, rows: Rows) -> Partial:
        values, positions = spmm_max_positions(part.adjacency, rows["x"])
        return Partial(values, part.edge_numbers(positions))

    def combine(self, partials: Sequence[Partial]) -> Tensor:
        return merge_maxima(partials)


@dataclass(frozen=True)
class ByRelation(Aggregate):
    """Mean or sum over the in-edges of each relation.

    The result [M, F] has a relation row for each pair of a target and a relation by which it has an in-edge.
    `Topology.relation_rows` transforms these by relation and sums them to rows of the targets.
    """

    mean: bool = True
    """True for a mean, False for a sum."""
    linear = can_save = True

    @classmethod
    def reducing(cls, reduce: str) -> ByRelation:
        """Return the aggregate for `reduce`, "mean" or "sum".

        Raises:
            InputError: `reduce` is another word.
        """
        check_word("reduce", reduce, ("sum", "mean"))
        return cls(mean=reduce == "mean")

    def run(self, topology: Topology, prepared: Rows, steps: int = 1) -> Tensor:
        assert steps == 1, "relation rows cannot be aggregated again"
        x = prepared["x"]
        return spmm(topology.relation_edges, x, scale=self._scale(topology, x.dtype))

    def transposed(self, topology: Topology, grad: Tensor, into: Tensor | None = None) -> Tensor:
        scale = self._scale(topology, grad.dtype)
        return spmm_transposed(topology.relation_edges, grad, scale=scale, into=into)

    def working_set(
        self, adjacency: Adjacency, width: int, *, itemsize: int, size: int = 1, num_edge_features: int = 0
    ) -> WorkingSet:
        del num_edge_features
        row = -(-width // size) * itemsize  # a block may have as many relation rows as edges: count a result per edge
        return WorkingSet(TARGET_BYTES, SLOT_BYTES + row, adjacency.indices.itemsize + 8 + itemsize + row)

    def partial(self, part: EdgeSubset, rows: Rows) -> Partial:
        edges = part.relation_edges
        return Partial(spmm(edges, rows["x"]), edges.degree[:, None])

    def combine(self, partials: Sequence[Partial]) -> Tensor:
        if not self.mean:
            return add(partials)
        counts = torch.stack([partial.merge_state for partial in partials if partial.merge_state is not None]).sum(0)
        return add(partials) / counts

    def _scale(self, topology: Topology, dtype: torch.dtype) -> Scale:
        return topology.relation_scale(dtype) if self.mean else Scale()
