"""`Graph`: topology, features, labels and splits of one graph, immutable and checked on entry."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import unknown
from weft.data import validate
from weft.data.adjacency import Adjacency
from weft.data.edges import build
from weft.data.typed import TypedShape
from weft.store.host import release

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

SAMPLE = 1 << 16  # vertices whose features `density` looks at


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """A graph of N vertices and E edges with what is known of its vertices. Free of any rank, device or model.

    Directed graphs, self loops, duplicate edges, isolated vertices and no edges at all are legal.

    in_edges: over all N vertices; of a typed graph, all relations merged. Holds the constant edge weights.
    x: float32 [N, F]. y: int64 [N] classes, -1 where unlabelled, or float32 [N, C] of 0 and 1 (several labels).
    train_mask, val_mask, test_mask: bool [N].
    edge_type: int16 (int32 from 32,768 relations on) [E] in stored order, positions in `relations`.
    relations: "source type|name|target type" each.
    edge_features: float32 [E, K] in stored order.
    vertex_types, type_offsets: type t has the ids from type_offsets[t] to type_offsets[t + 1].
    features: per vertex type, float32 [n_t, F_t], where types differ in width or lack any; x is None then.
    val_links, test_links: int64 [m, 3], edges held out for link prediction: source, target, relation (or 0).
    ids: int64 [N], what each vertex was called before the graph was reordered (see weft.data.order); None: the same.
    path: the store folder whose content this is, or None. A changed copy (dataclasses.replace) has none.
    trusted: leaves the values unread (sizes are always compared); for arrays that were checked before.

    Other dtypes are cast where every value survives; otherwise, and for every other mistake, InputError says where.
    Masks that overlap are legal, with a DataWarning.
    """

    in_edges: Adjacency
    x: Tensor | None = None
    y: Tensor | None = None
    train_mask: Tensor | None = None
    val_mask: Tensor | None = None
    test_mask: Tensor | None = None
    name: str = "graph"
    edge_type: Tensor | None = None
    relations: tuple[str, ...] = ()
    edge_features: Tensor | None = None
    vertex_types: tuple[str, ...] = ()
    type_offsets: tuple[int, ...] = ()
    features: Mapping[str, Tensor] = field(default_factory=dict)
    val_links: Tensor | None = None
    test_links: Tensor | None = None
    ids: Tensor | None = None
    path: Path | None = field(init=False, default=None)
    trusted: InitVar[bool] = False

    def __post_init__(self, trusted: bool) -> None:
        y_dtype = torch.int64 if self.y is None or self.y.dim() == 1 else torch.float32
        type_dtype = torch.int16 if len(self.relations) < 1 << 15 else torch.int32
        dtypes = {"x": torch.float32, "edge_features": torch.float32, "y": y_dtype, "edge_type": type_dtype}
        dtypes |= {"ids": torch.int64} | dict.fromkeys(validate.LINKS, torch.int64)
        dtypes |= dict.fromkeys(validate.MASKS, torch.bool)
        for name, dtype in dtypes.items():
            tensor = getattr(self, name)
            if tensor is not None:
                object.__setattr__(self, name, validate.cast(name, tensor, dtype))
        features = {n: validate.cast(f"features['{n}']", t, torch.float32) for n, t in self.features.items()}
        object.__setattr__(self, "features", MappingProxyType(features))
        validate.check_shapes(self)
        if not trusted:
            validate.check_values(self)

    @property
    def num_vertices(self) -> int:
        return self.in_edges.num_targets

    @property
    def num_edges(self) -> int:
        return self.in_edges.num_edges

    @property
    def num_features(self) -> int:
        """F, the columns of x; 0 without x (types with features of their own have a width each)."""
        return 0 if self.x is None else self.x.shape[1]

    @property
    def num_edge_features(self) -> int:
        """K, the columns of edge_features; 0 without them."""
        return 0 if self.edge_features is None else self.edge_features.shape[1]

    @property
    def multilabel(self) -> bool:
        return self.y is not None and self.y.dim() == 2

    @cached_property
    def num_classes(self) -> int:
        """C: one more than the largest label, or the columns of y; 0 without labels."""
        if self.y is None or not len(self.y):
            return 0
        return self.y.shape[1] if self.multilabel else int(self.y.max()) + 1

    @cached_property
    def density(self) -> float:
        """The share of x that is not zero, among the first vertices; the same on every rank. 0 without x."""
        sample = torch.empty(0) if self.x is None else self.x[:SAMPLE]
        return int(sample.count_nonzero()) / max(sample.numel(), 1)

    @cached_property
    def fingerprint(self) -> str:
        """Names the topology: sha256 over vertex and edge count, row pointers and source ids; 64 hex digits."""
        digest = hashlib.sha256(f"weft topology {self.num_vertices} {self.num_edges}\n".encode())
        for tensor in (self.in_edges.indptr, self.in_edges.indices):
            digest.update(tensor.numpy().view(np.uint8).data)
            release(tensor)
        return digest.hexdigest()

    @property
    def typed(self) -> TypedShape:
        """What a model needs to know of the types of edges and, where there is no x, of vertices."""
        if self.x is not None:
            return TypedShape(len(self.relations))
        known = [self.features[name] for name in self.vertex_types if name in self.features]
        featured = tuple((len(x), x.shape[1]) for x in known)
        return TypedShape(len(self.relations), featured, self.num_vertices - sum(count for count, _ in featured))

    @cached_property
    def num_relations_in(self) -> Tensor:
        """By how many relations each vertex has an in-edge: int64 [N]; 0 in a graph without relations."""
        if self.edge_type is None:
            return torch.zeros(self.num_vertices, dtype=torch.int64)
        _, target = self.in_edges.edges()
        pairs = (target * len(self.relations) + self.edge_type).unique()
        return torch.bincount(pairs // len(self.relations), minlength=self.num_vertices)

    def type_range(self, name: str) -> range:
        """The vertex ids of one type; InputError if there is no such type."""
        if name not in self.vertex_types:
            raise unknown("vertex type", name, self.vertex_types)
        i = self.vertex_types.index(name)
        return range(self.type_offsets[i], self.type_offsets[i + 1])

    def relation(self, name: str) -> Adjacency:
        """The in-edges of one relation, targets and sources numbered within their own type. Made anew at each call."""
        if self.edge_type is None or name not in self.relations:
            raise unknown("relation", name, self.relations)
        source_type, _, target_type = name.split("|")
        sources, targets = self.type_range(source_type), self.type_range(target_type)
        chosen = self.edge_type == self.relations.index(name)
        before = torch.zeros(self.num_edges + 1, dtype=torch.int64)
        torch.cumsum(chosen, 0, out=before[1:])
        indptr = before[self.in_edges.indptr[targets.start : targets.stop + 1]]
        weight = self.in_edges.weight
        return Adjacency(
            indptr=indptr - indptr[0],
            indices=self.in_edges.indices[chosen] - sources.start,
            num_sources=len(sources),
            weight=None if weight is None else weight[chosen],
        )

    @classmethod
    def from_edges(
        cls,
        source: Tensor,
        target: Tensor,
        *,
        num_vertices: int | None = None,
        weight: Tensor | None = None,
        edge_features: Tensor | None = None,
        x: Tensor | None = None,
        y: Tensor | None = None,
        train_mask: Tensor | None = None,
        val_mask: Tensor | None = None,
        test_mask: Tensor | None = None,
        name: str = "graph",
        edge_type: Tensor | None = None,
        relations: tuple[str, ...] = (),
        vertex_types: tuple[str, ...] = (),
        type_offsets: tuple[int, ...] = (),
        features: Mapping[str, Tensor] | None = None,
        val_links: Tensor | None = None,
        test_links: Tensor | None = None,
    ) -> Graph:
        """A graph from edges source[e] -> target[e], integer [E].

        `weight` and `edge_type` [E] and `edge_features` [E, K] are in the same order. Without `num_vertices` it is the
        length of x, y or type_offsets, else one more than the largest id.
        """
        if num_vertices is None:
            known = [len(tensor) for tensor in (x, y) if tensor is not None] + list(type_offsets[-1:])
            num_vertices = known[0] if known else None
        edges = build(
            source,
            target,
            num_vertices=num_vertices,
            weight=weight,
            edge_features=edge_features,
            edge_type=edge_type,
        )
        return cls(
            in_edges=edges.in_edges,
            x=x,
            y=y,
            train_mask=train_mask,
            val_mask=val_mask,
            test_mask=test_mask,
            name=name,
            edge_type=edges.edge_type,
            relations=relations,
            edge_features=edges.edge_features,
            vertex_types=vertex_types,
            type_offsets=type_offsets,
            features=features or {},
            val_links=val_links,
            test_links=test_links,
        )

    @classmethod
    def from_pyg(cls, data: Data | HeteroData, *, name: str = "graph") -> Graph:
        """A graph from PyG's Data or HeteroData; see weft.data.convert."""
        from weft.data.convert import from_pyg

        return from_pyg(data, name=name)

    def to_pyg(self) -> Data | HeteroData:
        """PyG's HeteroData for several vertex types, else its Data; see weft.data.convert."""
        from weft.data.convert import to_pyg

        return to_pyg(self)

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> Graph:
        """A graph from a store folder, memory-mapped; see weft.data.store."""
        from weft.data.store import open_store

        return open_store(folder, verify=verify)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Writes the graph as a store folder; see weft.data.store."""
        from weft.data.store import save

        save(self, folder, overwrite=overwrite)
