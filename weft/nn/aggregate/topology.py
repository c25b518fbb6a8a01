"""The edges that aggregates go over, with the scalings that their degrees define."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.kernels import EdgeFeatures, Scale
from weft.nn.aggregate.relations import RelationRows
from weft.utils.dtypes import sum_dtype
from weft.utils.errors import InputError

Norm = Literal["gcn", "mean"] | None
"""How a sum over in-edges is scaled: by the roots of both ends' degrees, by the target's, or not."""


class Topology:
    """An adjacency with the scalings that its degrees define, each made once per dtype.

    ids: int64 [n], original ids, where the graph was reordered.
    edge_features: [E, K], where the graph has them; taken to the edges' device, as `dtype`, when first asked for.
    edge_type: integer [E] on the host, the relation of each edge, where the graph has `num_relations` of them.
    """

    def __init__(
        self,
        adjacency: Adjacency,
        ids: Tensor | None = None,
        edge_features: Tensor | None = None,
        dtype: torch.dtype | None = None,
        edge_type: Tensor | None = None,
        num_relations: int = 0,
    ) -> None:
        self.adjacency = adjacency
        self._ids = ids
        self._edge_features, self._dtype = edge_features, dtype
        self._edge_type, self.num_relations = edge_type, num_relations
        self._scales: dict[object, Scale] = {}
        self.target_parts: tuple[Sequence[int], int] = (), 0
        """Bounds of ranges of targets, and which range is local: relation rows stand by these. No bounds: all are."""

    def scale(self, norm: Norm, weighted: bool, dtype: torch.dtype) -> Scale:
        """The vertex scalings of a normalised sum over rows of a dtype, so that it needs no float per edge."""
        name = norm, weighted, sum_dtype(dtype)
        if name not in self._scales:
            self._scales[name] = self._scale(*name)
        return self._scales[name]

    @property
    def has_weight(self) -> bool:
        """Whether the edges have weights, into targets or, where only those are here, out of sources."""
        known = self.adjacency.known_transpose
        return self.adjacency.weight is not None or (known is not None and known.weight is not None)

    @cached_property
    def ids(self) -> Tensor:
        """By which vertices dropout masks are keyed: those of sources, int64 [s]."""
        return (
            torch.arange(self.adjacency.num_sources, device=self.adjacency.device) if self._ids is None else self._ids
        )

    @cached_property
    def target_ids(self) -> Tensor:
        """Those of targets, int64 [n]."""
        return self.ids[: self.adjacency.num_targets]

    @cached_property
    def lacks_loop(self) -> Tensor:
        """Where an edge v -> v is missing, which some aggregates add: bool [n]."""
        return ~self.adjacency.has_loop

    @property
    def loop(self) -> Tensor | None:
        """Where these aggregates are to add it; None: it is among the edges."""
        return self.lacks_loop

    @cached_property
    def edge_index(self) -> Tensor:
        """Sources and targets of the edges: int64 [2, E]."""
        return torch.stack(self.adjacency.edges())

    @cached_property
    def edge_features(self) -> Tensor | None:
        """What is known of the edges, in their order: [E, K]."""
        return self.edge_features_at(None)

    @cached_property
    def features_with_loops(self) -> EdgeFeatures | None:
        """The features of the edges, and for the loops that are missing the mean of those of v's in-edges."""
        if self.edge_features is None:
            return None
        sums = torch.segment_reduce(self.edge_features, "sum", offsets=self.adjacency.indptr, initial=0)
        return EdgeFeatures(self.edge_features, sums / self.adjacency.degree.clamp(min=1)[:, None])

    @cached_property
    def edge_type(self) -> Tensor | None:
        """The relation of every edge, in their order: [E], on the host."""
        return self._edge_type

    @cached_property
    def relation_rows(self) -> RelationRows:
        """The targets by relation; InputError where edges have no types."""
        if self.edge_type is None:
            raise InputError(
                "the graph's edges have no types, as a relational layer needs: give edge_type and relations"
            )
        return RelationRows.of(self.adjacency, self.edge_type, self.num_relations, *self.target_parts)

    @property
    def relation_edges(self) -> Adjacency:
        """The same edges into the rows of targets and relations."""
        return self.relation_rows.in_edges

    def relation_scale(self, dtype: torch.dtype) -> Scale:
        """That of a mean over them."""
        name = "relations", dtype
        if name not in self._scales:
            self._scales[name] = Scale(target=self.relation_edges.degree.to(dtype).reciprocal())
        return self._scales[name]

    def edge_features_at(self, edge_ids: Tensor | None) -> Tensor | None:
        """The rows [e, K] of the edges at these positions, int64 [e] on the CPU; None: of all."""
        if self._edge_features is None:
            return None
        found = self._edge_features if edge_ids is None else self._edge_features.index_select(0, edge_ids)
        return found.to(self.adjacency.device, self._dtype)

    def degree(self, weighted: bool) -> Tensor:
        """In-degree, or the sum of the weights of the in-edges: float64 [n]."""
        adjacency = self.adjacency
        if not weighted or adjacency.weight is None:
            return adjacency.degree.double()
        return torch.segment_reduce(adjacency.weight.double(), "sum", offsets=adjacency.indptr, initial=0)

    def _scale(self, norm: Norm, weighted: bool, dtype: torch.dtype) -> Scale:
        if norm == "gcn":
            loop = self.lacks_loop.double()
            degree = self.degree(weighted) + loop
            if (degree < 0).any():
                vertex = int((degree < 0).nonzero()[0])
                raise InputError(
                    f"the edge weights into vertex {vertex} sum to {float(degree[vertex] - loop[vertex]):g}, and gcn "
                    "divides by the square root of such sums: give weights from 0 on, or choose another model"
                )
            root = degree.rsqrt()
            root[root.isinf()] = 0
            return Scale(source=root.to(dtype), target=root.to(dtype), loop=(loop * root * root).to(dtype))
        if norm == "mean":
            return Scale(target=self.degree(False).clamp(min=1).reciprocal().to(dtype))
        return Scale()


class SubTopology(Topology):
    """Some of a graph's in-edges, with the scalings of the whole graph's degrees.

    adjacency: on the device to be. sources, targets: the vertices of its columns and rows, int64 or, of rows, a range;
    on the whole topology's device. edges: where the in-edges stand among the whole graph's.
    """

    def __init__(
        self,
        adjacency: Adjacency,
        sources: Tensor,
        targets: Tensor | slice,
        whole: Topology,
        edges: slice = slice(0),
    ) -> None:
        super().__init__(adjacency)
        self.sources, self.targets, self.whole, self.edges = sources, targets, whole, edges

    @cached_property
    def ids(self) -> Tensor:
        return self.whole.ids[self.sources].to(self.adjacency.device)

    @cached_property
    def target_ids(self) -> Tensor:
        return self.whole.ids[self.targets].to(self.adjacency.device)

    @cached_property
    def edge_features(self) -> Tensor | None:
        features = self.whole.edge_features
        return None if features is None else features[self.edges].to(self.adjacency.device)

    @cached_property
    def lacks_loop(self) -> Tensor:
        return self.whole.lacks_loop[self.targets].to(self.adjacency.device)

    def _scale(self, norm: Norm, weighted: bool, dtype: torch.dtype) -> Scale:
        scale = self.whole.scale(norm, weighted, dtype)
        taken = zip(scale, (self.sources, self.targets, self.targets), strict=True)
        return Scale(*(None if vector is None else vector[rows].to(self.adjacency.device) for vector, rows in taken))


class EdgeSubset(Topology):
    """Some of a topology's in-edges, between all of its sources and targets.

    Under dropout of attention, edges that join the same ends must be of one part: masks tell them apart by their order.

    edges: int64 [e], ascending, where they stand among all. loops: bool [n], the targets whose missing loop, where an
    aggregate adds it, belongs to this part.
    """

    def __init__(self, whole: Topology, edges: Tensor, loops: Tensor) -> None:
        adjacency, num_targets = whole.adjacency, whole.adjacency.num_targets
        targets = adjacency.edges()[1][edges]
        indptr = torch.searchsorted(targets, torch.arange(num_targets + 1, device=adjacency.device))
        weight = None if adjacency.weight is None else adjacency.weight[edges]
        super().__init__(
            Adjacency(
                indptr=indptr, indices=adjacency.indices[edges], num_sources=adjacency.num_sources, weight=weight
            ),
            whole.ids,
        )
        self.whole, self.edges, self._loops = whole, edges, loops

    def edge_numbers(self, places: Tensor) -> Tensor:
        """Of places [n, F] among the in-edges of each row, where the edges stand among all; -1 where it has none."""
        some = self.adjacency.degree > 0
        found = torch.full(places.shape, -1, device=places.device)
        found[some] = self.edges[self.adjacency.indptr[:-1, None][some] + places[some]]
        return found

    @cached_property
    def target_ids(self) -> Tensor:
        return self.whole.target_ids

    @cached_property
    def lacks_loop(self) -> Tensor:
        return self.whole.lacks_loop & self._loops

    @cached_property
    def features_with_loops(self) -> EdgeFeatures | None:
        known = self.whole.features_with_loops
        return None if known is None else known._replace(edges=known.edges[self.edges])

    @cached_property
    def relation_edges(self) -> Adjacency:
        """Into the relation rows of all edges, some of which may have none of these."""
        rows, types, num_targets = self.whole.relation_rows, self.whole.edge_type, self.adjacency.num_targets
        assert types is not None
        source, target = self.adjacency.edges()
        relation = torch.arange(len(rows.counts), device=source.device)
        relation = relation.repeat_interleave(torch.tensor(rows.counts, device=source.device))
        number = types.to(source.device)[self.edges] * num_targets + target
        row = torch.searchsorted(relation * num_targets + rows.targets, number)
        return Adjacency.from_edges(source, row, num_sources=self.adjacency.num_sources, num_targets=len(relation))

    def _scale(self, norm: Norm, weighted: bool, dtype: torch.dtype) -> Scale:
        scale = self.whole.scale(norm, weighted, dtype)
        return scale if scale.loop is None else scale._replace(loop=scale.loop * self._loops)
