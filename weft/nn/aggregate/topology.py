"""Edges of an aggregate: adjacency, original ids, edge features and types, and scalings by degree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from weft.data import Adjacency
from weft.kernels import EdgeFeatures, Scale
from weft.nn.aggregate.relations import RelationRows
from weft.nn.aggregate.typed_block import RelationEdges, TypedBlock, TypeOrder, split_by_relation
from weft.utils.dtypes import sum_dtype
from weft.utils.errors import InputError

BLOCK_TARGETS = 1 << 22
"""Number of targets whose scalings are computed at once."""
Norm = Literal["gcn", "symmetric", "mean", "laplacian"] | None
"""Normalization of a sum over in-edges: by the square roots of both endpoints' in-degrees ("laplacian": out-degrees
without self-loops), by the target's degree, or none."""


class Topology:
    """Adjacency with edge features, edge types, and cached scalings by degree.

    Args:
        adjacency: The edges.
        ids: Original id of each vertex, int64 [n], if the graph was reordered.
        edge_features: [E, K]; copied to the device of the edges, as `dtype`, on first use.
        dtype: Type of the edge features on the device; None: unchanged.
        edge_type: Relation of each edge, integer [E] on the host.
        num_relations: Number of relations of the graph.
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
        self._laplacians: dict[tuple[bool, torch.dtype], Adjacency] = {}
        self._typed_block: TypedBlock | None = None
        self._type_orders: dict[int, TypeOrder] = {}
        self.target_parts: tuple[Sequence[int], int] = (), 0
        """Bounds of the parts of the targets by which relation rows are sorted, and the number of the local part.
        Without bounds, all targets are local."""

    def scale(self, norm: Norm, weighted: bool, dtype: torch.dtype, *, keep: bool = True) -> Scale:
        """Return the vertex scalings of a normalized sum, computed once; they replace a coefficient for each edge.

        Args:
            norm: The normalization.
            weighted: True if degrees are sums of edge weights.
            dtype: Type of the rows that are summed.
            keep: False to compute them again at the next call.
        """
        name = norm, weighted, sum_dtype(dtype)
        if name in self._scales:
            return self._scales[name]
        result = self._scale(*name)
        if keep:
            self._scales[name] = result
        return result

    def laplacian(self, weighted: bool, dtype: torch.dtype) -> Adjacency:
        """Return the edges with the coefficients of `LaplacianSum` as weights, computed once.

        Args:
            weighted: True if they are multiplied by the edge weights.
            dtype: Type of the rows that are summed.
        """
        name = weighted, sum_dtype(dtype)
        if name not in self._laplacians:
            edges, back = self.adjacency, self.adjacency.known_transpose
            if back is not None and len(back.indices) > edges.num_edges:  # a chunk that has only the transpose
                weight = self._laplacian_weight(back.entry_rows, back.indices, back.weight, *name)
                self._laplacians[name] = replace(edges, known_transpose=replace(back, weight=weight))
            else:
                weight = self._laplacian_weight(edges.indices, edges.entry_rows, edges.weight, *name)
                self._laplacians[name] = edges.with_weight(weight)
        return self._laplacians[name]

    def _laplacian_weight(
        self, source: Tensor, target: Tensor, weight: Tensor | None, weighted: bool, dtype: torch.dtype
    ) -> Tensor:
        """Return the product of both endpoints' scalings and of the weight of each edge, [E]; 0 for self-loops."""
        source_scale, target_scale, _ = self.scale("laplacian", weighted, dtype)
        assert source_scale is not None
        assert target_scale is not None
        source, target = source.long(), target.long()
        result = source_scale[source] * target_scale[target]
        if weighted and weight is not None:
            result *= weight
        return result.masked_fill(self.ids[source] == self.target_ids[target], 0)

    @property
    def has_weight(self) -> bool:
        """True if the edges have weights, in the adjacency or only in its transpose."""
        transpose = self.adjacency.known_transpose
        return self.adjacency.weight is not None or (transpose is not None and transpose.weight is not None)

    @cached_property
    def ids(self) -> Tensor:
        """Original ids of the sources, int64 [s], which key dropout masks."""
        return (
            torch.arange(self.adjacency.num_sources, device=self.adjacency.device) if self._ids is None else self._ids
        )

    def ids_of(self, sources: Tensor) -> Tensor:
        """Return the original ids of some sources, int64 [k], without those of all others."""
        return sources if self._ids is None else self.ids[sources]

    @cached_property
    def target_ids(self) -> Tensor:
        """Original ids of the targets, int64 [n]."""
        return self.ids[: self.adjacency.num_targets]

    @cached_property
    def lacks_loop(self) -> Tensor:
        """Mask of the targets v without an edge v -> v, bool [n]; some aggregates add these self-loops."""
        return ~self.adjacency.has_loop

    @property
    def loop(self) -> Tensor | None:
        """Mask of the targets to which such aggregates add a self-loop, bool [n]; None: all are among the edges."""
        return self.lacks_loop

    @cached_property
    def edge_index(self) -> Tensor:
        """Sources and targets of the edges, int64 [2, E]."""
        return torch.stack(self.adjacency.edges())

    @cached_property
    def edge_features(self) -> Tensor | None:
        """Features of the edges, [E, K], in their order; None if they have none."""
        return self.edge_features_at(None)

    @cached_property
    def features_with_loops(self) -> EdgeFeatures | None:
        """Features of the edges and of added self-loops; None without any.

        A self-loop, added or among the edges, has the mean features of the target's other in-edges, as in PyG.
        """
        features, count = self.edge_features, self.adjacency.degree
        if features is None:
            return None
        loops, vertices = None, None
        if not self.lacks_loop.all():
            loops = self.is_loop
            vertices = self.adjacency.edges()[1][loops]
            features = features.masked_fill(loops[:, None], 0)
            count = count - torch.bincount(vertices, minlength=len(count))
        sums = torch.segment_reduce(features, "sum", offsets=self.adjacency.indptr, initial=0)
        means = sums / count.clamp(min=1)[:, None]
        if loops is not None:
            features[loops] = means[vertices]
        return EdgeFeatures(features, means)

    @property
    def is_loop(self) -> Tensor:
        """Mask of the edges from a vertex to itself, bool [E]."""
        source, target = self.adjacency.edges()
        return self.ids[source] == self.target_ids[target]

    @cached_property
    def edge_type(self) -> Tensor | None:
        """Relation of each edge, integer [E] on the host; None if edges have no types."""
        return self._edge_type

    @cached_property
    def relation_rows(self) -> RelationRows:
        """Relation rows of the targets.

        Raises:
            InputError: The edges have no types.
        """
        return RelationRows.of(self.adjacency, self._types(), self.num_relations, *self.target_parts)

    def typed_block(self, vertex_type: Tensor, num_targets: int, num_types: int, *, divided: bool = True) -> TypedBlock:
        """Return the edges by relation, computed once, with rows numbered by type.

        Args:
            vertex_type: Number of each source's vertex type, [s, 1], always the same.
            num_targets: Number of targets.
            num_types: Number of vertex types.
            divided: False if rows of all types are to be computed together.

        Raises:
            InputError: The edges have no types.
        """
        if self._typed_block is None:
            types = self._types().to(self.adjacency.device)
            edges = split_by_relation(self.edge_index, types, self.num_relations)
            self._typed_block = (
                TypedBlock.divide(edges, vertex_type, num_targets, num_types)
                if divided
                else TypedBlock(tuple(map(RelationEdges, edges)), num_targets)
            )
        return self._typed_block

    def type_order(self, vertex_type: Tensor, num_types: int) -> TypeOrder:
        """Return the order by type of the sources, or of the targets, computed once.

        Args:
            vertex_type: Number of each row's vertex type, [n, 1]. Targets are the first sources, so that their number
                tells them apart.
            num_types: Number of vertex types.
        """
        if len(vertex_type) not in self._type_orders:
            self._type_orders[len(vertex_type)] = TypeOrder.of(vertex_type, num_types)
        return self._type_orders[len(vertex_type)]

    def _types(self) -> Tensor:
        if self.edge_type is None:
            raise InputError(
                "the graph's edges have no types, but a relational layer needs them: add edge_type and relations to "
                "the graph"
            )
        return self.edge_type

    @property
    def relation_edges(self) -> Adjacency:
        """Edges with relation rows as targets."""
        return self.relation_rows.in_edges

    def relation_scale(self, dtype: torch.dtype) -> Scale:
        """Return the scaling of a mean over the edges of each relation row, computed once for each type."""
        name = "relations", dtype
        if name not in self._scales:
            self._scales[name] = Scale(target=self.relation_edges.degree.to(dtype).reciprocal())
        return self._scales[name]

    def edge_features_at(self, edge_ids: Tensor | None) -> Tensor | None:
        """Return features [e, K] of edges, on the device; None if the edges have none.

        Args:
            edge_ids: Positions of the edges, int64 [e] on the CPU; None: all edges.
        """
        if self._edge_features is None:
            return None
        features = self._edge_features if edge_ids is None else self._edge_features.index_select(0, edge_ids)
        return features.to(self.adjacency.device, self._dtype)

    def degree(self, first: int, last: int, *, weighted: bool) -> Tensor:
        """Return the in-degree of a range of targets, or if `weighted` the sum of their edge weights: float64 [n].

        Args:
            first: First target.
            last: Target after the last one.
            weighted: Sum edge weights, if there are any.
        """
        indptr, weight = self.adjacency.indptr[first : last + 1], self.adjacency.weight
        if not weighted or weight is None:
            return indptr.diff().double()
        begin, end = int(indptr[0]), int(indptr[-1])
        return torch.segment_reduce(weight[begin:end].double(), "sum", offsets=indptr - begin, initial=0)

    def _scale(self, norm: Norm, weighted: bool, dtype: torch.dtype) -> Scale:
        if norm in ("gcn", "symmetric"):
            return self._root_scale(weighted, dtype, adds_loops=norm == "gcn")
        if norm == "laplacian":
            return self._out_root_scale(weighted, dtype)
        if norm == "mean":
            target = self._by_target(dtype)
            for part, first in self._blocks(target):
                part.copy_(self.degree(first, first + len(part), weighted=False).clamp(min=1).reciprocal())
            return Scale(target=target)
        return Scale()

    def _root_scale(self, weighted: bool, dtype: torch.dtype, *, adds_loops: bool) -> Scale:
        # D^-1/2 (A + I) D^-1/2, or without I: each endpoint contributes the root of its degree, in which a self-loop
        # that is added counts 1. Self-loops among the edges are in A already. Vertices of degree 0 get the factor 0.
        roots, loops = self._by_target(dtype), self._by_target(dtype)
        for part, first in self._blocks(roots):
            last = first + len(part)
            loop = self.lacks_loop[first:last].double() * adds_loops
            degree = self.degree(first, last, weighted=weighted) + loop
            if (degree < 0).any():
                vertex = int((degree < 0).nonzero()[0])
                raise InputError(
                    f"the edge weights into vertex {first + vertex} sum to {float(degree[vertex] - loop[vertex]):g}, "
                    "and the normalization divides by the square root of this sum: give weights of at least 0, or "
                    "choose another model"
                )
            root = degree.rsqrt()
            root[root.isinf()] = 0
            part.copy_(root)
            loops[first:last] = loop * root * root
        return Scale(source=roots, target=roots, loop=loops if adds_loops else None)

    def _out_root_scale(self, weighted: bool, dtype: torch.dtype) -> Scale:
        adjacency = self.adjacency
        weight = adjacency.weight.double() if weighted and adjacency.weight is not None else torch.ones(1).double()
        if (weight < 0).any():
            raise InputError(
                f"an edge weight is {float(weight.min()):g}, and a Laplacian needs weights of at least 0: change the "
                "weights, or choose another model"
            )
        degree = torch.zeros(adjacency.num_sources, dtype=torch.float64, device=adjacency.device)
        weight = weight.to(adjacency.device).expand(adjacency.num_edges).masked_fill(self.is_loop, 0)
        degree.index_add_(0, adjacency.indices, weight)
        root = degree.rsqrt()
        root[root.isinf()] = 0
        root = root.to(dtype)
        return Scale(source=root, target=root[: adjacency.num_targets])

    def _by_target(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.adjacency.num_targets, dtype=dtype, device=self.adjacency.device)

    def _blocks(self, values: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield views of a few values at a time, with the number of the first; float64 copies of all would be large."""
        for first in range(0, len(values), BLOCK_TARGETS):
            yield values[first : first + BLOCK_TARGETS], first


class SubTopology(Topology):
    """Block of a larger graph, with scalings by the degrees of the larger graph.

    Attributes: `keeps_whole_scale` is True if many blocks of the larger graph follow, so that its scalings are worth
    their memory.

    Args:
        adjacency: The edges of the block, on the device on which they are used.
        sources: Vertex of each source in `whole`, int64, on its device.
        targets: Vertex of each target in `whole`, int64 or a range, on its device.
        whole: Topology of the larger graph.
        edges: Range of the block's edges among those of `whole`.
    """

    keeps_whole_scale = True

    def __init__(
        self,
        adjacency: Adjacency,
        sources: Tensor,
        targets: Tensor | slice,
        whole: Topology,
        edges: slice = slice(0),
    ) -> None:
        super().__init__(adjacency, num_relations=whole.num_relations)
        self.sources, self.targets, self.whole, self.edges = sources, targets, whole, edges

    @cached_property
    def ids(self) -> Tensor:
        return self.whole.ids_of(self.sources).to(self.adjacency.device)

    def ids_of(self, sources: Tensor) -> Tensor:
        return self.ids[sources]

    @cached_property
    def target_ids(self) -> Tensor:
        targets, whole = self.targets, self.whole
        ids = whole.ids[targets] if isinstance(targets, slice) else whole.ids_of(targets)
        return ids.to(self.adjacency.device)

    @cached_property
    def edge_type(self) -> Tensor | None:
        types = self.whole.edge_type
        return None if types is None else types[self.edges]

    @cached_property
    def edge_features(self) -> Tensor | None:
        features = self.whole.edge_features
        return None if features is None else features[self.edges].to(self.adjacency.device)

    @cached_property
    def lacks_loop(self) -> Tensor:
        return self.whole.lacks_loop[self.targets].to(self.adjacency.device)

    def _scale(self, norm: Norm, weighted: bool, dtype: torch.dtype) -> Scale:
        scale = self.whole.scale(norm, weighted, dtype, keep=self.keeps_whole_scale)
        vectors = zip(scale, (self.sources, self.targets, self.targets), strict=True)
        return Scale(*(None if vector is None else vector[rows].to(self.adjacency.device) for vector, rows in vectors))


class EdgeSubset(Topology):
    """Subset of the edges of a topology, with all of its sources and targets.

    With attention dropout, parallel edges (of the same source and target) must be in one subset, because their masks
    depend on their order.

    Args:
        whole: The topology.
        edges: Positions of the edges, int64 [e], ascending.
        loops: Mask of the targets whose added self-loop belongs to this subset, bool [n].
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

    def edge_numbers(self, positions: Tensor) -> Tensor:
        """Convert positions [n, F] among each target's edges of this subset to positions among all edges.

        Targets without an edge in the subset get -1.
        """
        nonempty = self.adjacency.degree > 0
        numbers = torch.full(positions.shape, -1, device=positions.device)
        numbers[nonempty] = self.edges[self.adjacency.indptr[:-1, None][nonempty] + positions[nonempty]]
        return numbers

    @cached_property
    def target_ids(self) -> Tensor:
        return self.whole.target_ids

    @cached_property
    def lacks_loop(self) -> Tensor:
        return self.whole.lacks_loop & self._loops

    @cached_property
    def features_with_loops(self) -> EdgeFeatures | None:
        features = self.whole.features_with_loops
        return None if features is None else features._replace(edges=features.edges[self.edges])

    @cached_property
    def relation_edges(self) -> Adjacency:
        """Edges of this subset, from sources to the relation rows of `whole`; a relation row may have no edge here."""
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
