"""The edges that products run on, with the scalings that their degrees define."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.data import Adjacency
from weft.kernels import EdgeFeatures, Scale
from weft.nn.pairs import Pairs

Reduce = Literal["sum", "mean", "max"]
Norm = Literal["gcn"] | None


class Product(NamedTuple):
    """One kind of product with the adjacency, `steps` times."""

    reduce: Reduce
    norm: Norm
    weighted: bool
    steps: int


class Topology:
    """An adjacency with the scalings that its degrees define, each made once per dtype.

    ids: int64 [n], what each vertex was called first, where the graph was reordered.
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

    def scale(self, product: Product, dtype: torch.dtype) -> Scale:
        """The vertex scalings of a normalised sum, so that the product needs no float per edge."""
        name = product._replace(steps=1), dtype
        if name not in self._scales:
            self._scales[name] = self._scale(product, dtype)
        return self._scales[name]

    @cached_property
    def ids(self) -> Tensor:
        """By which vertices dropout masks are keyed: int64 [n]."""
        return (
            torch.arange(self.adjacency.num_targets, device=self.adjacency.device) if self._ids is None else self._ids
        )

    @cached_property
    def loop(self) -> Tensor:
        """Where an edge v -> v is missing: bool [n]."""
        return ~self.adjacency.has_loop

    @cached_property
    def edge_index(self) -> Tensor:
        """Sources and targets of the edges: int64 [2, E]."""
        return torch.stack(self.adjacency.edges())

    @cached_property
    def edge_features(self) -> Tensor | None:
        """What is known of the edges, in their order: [E, K]."""
        return self.edge_features_at(None)

    @cached_property
    def known_edges(self) -> EdgeFeatures | None:
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
    def pairs(self) -> Pairs:
        """The targets by relation; InputError where edges have no types."""
        return self.pairs_of(())

    def pairs_of(self, bounds: Sequence[int], home: int = 0) -> Pairs:
        """The pairs of targets in parts with these bounds, of which part `home` is at home."""
        if self.edge_type is None:
            raise InputError(
                "the graph's edges have no types, as a relational layer needs: give edge_type and relations"
            )
        return Pairs.of(self.adjacency, self.edge_type, self.num_relations, bounds, home)

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

    def _scale(self, product: Product, dtype: torch.dtype) -> Scale:
        if product.norm == "gcn":
            loop = self.loop.double()
            root = (self.degree(product.weighted) + loop).rsqrt()
            root[root.isinf()] = 0
            return Scale(source=root.to(dtype), target=root.to(dtype), loop=(loop * root * root).to(dtype))
        if product.reduce == "mean":
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
        """What the sources were called first."""
        return self.whole.ids[self.sources].to(self.adjacency.device)

    @cached_property
    def edge_features(self) -> Tensor | None:
        features = self.whole.edge_features
        return None if features is None else features[self.edges].to(self.adjacency.device)

    @cached_property
    def loop(self) -> Tensor:
        return self.whole.loop[self.targets].to(self.adjacency.device)

    def _scale(self, product: Product, dtype: torch.dtype) -> Scale:
        scale = self.whole.scale(product, dtype)
        taken = zip(scale, (self.sources, self.targets, self.targets), strict=True)
        return Scale(*(None if vector is None else vector[rows].to(self.adjacency.device) for vector, rows in taken))
