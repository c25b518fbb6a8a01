"""`Graph`: topology, features, labels and splits of one graph, immutable and checked on entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.edges import build
from weft.data.fields import GraphFields
from weft.data.io.graph_parts import gathered
from weft.data.io.other_libraries import NODE, SOURCE, TARGET, dgl_fields, matrix_edges, network_tables
from weft.data.io.pyg import PygGraph, from_pyg, to_pyg
from weft.data.rules import check_kinds, check_shapes, check_values
from weft.data.splits import SHARES, random_split, split_by_time
from weft.data.store.store import read_store, save
from weft.data.tables.table_graph import ColumnRoles, table_parts
from weft.data.tensor_checks import (
    LINKS,
    MASKS,
    Numbers,
    cast,
    check_vector,
    has_label,
    label_dtype,
    label_kind,
    located,
    plain,
)
from weft.data.vertex_types import TypedShape, relation_edges, type_range
from weft.storage.unnamed_files import release
from weft.utils.errors import InputError, printable, require_word
from weft.utils.notebook import facts_table

SAMPLE = 1 << 16  # vertices whose features `density` looks at


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph(GraphFields):
    """A graph of N vertices and E edges with what is known of its vertices. Free of any rank, device or model.

    Directed graphs, self loops, duplicate edges, isolated vertices and no edges at all are legal.

    Other dtypes than those of GraphFields are cast where every value survives; otherwise, and for every other mistake,
    InputError says where. Masks that overlap are legal, with a DataWarning.
    """

    path: Path | None = dataclasses.field(init=False, default=None)
    """The store folder whose content this is, or None. A changed copy (dataclasses.replace) has none."""
    trusted: InitVar[bool] = False
    """Leaves the values unread (sizes are always compared); for arrays that were checked before."""

    def __post_init__(self, trusted: bool) -> None:
        check_kinds(self)
        y_dtype = torch.int64 if self.y is None else label_dtype(plain("y", self.y))
        type_dtype = torch.int16 if len(self.relations) < 1 << 15 else torch.int32
        dtypes = {"x": torch.float32, "edge_features": torch.float32, "y": y_dtype, "edge_type": type_dtype}
        dtypes |= {"ids": torch.int64} | dict.fromkeys(LINKS, torch.int64)
        dtypes |= dict.fromkeys(MASKS, torch.bool)
        for name, dtype in dtypes.items():
            tensor = getattr(self, name)
            if tensor is not None:
                object.__setattr__(self, name, cast(name, tensor, dtype))
        features = {n: cast(f"features['{n}']", t, torch.float32) for n, t in self.features.items()}
        object.__setattr__(self, "features", MappingProxyType(features))
        check_shapes(self)
        if not trusted:
            check_values(self)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{number} {what}" for what, number in self._sizes().items())
        return f"<Graph {printable(self.name)}: {sizes}>"

    def _repr_html_(self) -> str:
        """What a notebook shows; unlike `repr`, it reads labels and masks."""
        facts = self._sizes()
        if self.features:
            facts["features by type"] = ", ".join(f"{x.shape[1]:,} of {name}" for name, x in self.features.items())
        if self.label_kind:
            facts[self.label_kind] = f"{self.num_classes:,}"
        for split in ("train", "val", "test"):
            if (labelled := self.labelled(split)) is not None:
                facts[f"{split} vertices"] = f"{int(labelled.sum()):,}"
        if self.in_edges.weight is not None:
            facts["edge weights"] = "yes"
        if self.path is not None:
            facts["stored in"] = str(self.path)
        return facts_table(f"Graph {self.name}", facts)

    def _sizes(self) -> dict[str, str]:
        """How many there are of what the graph has, by what it is called. Reads no array."""
        parts = {
            "features": self.num_features,
            "edge features": self.num_edge_features,
            "relations": len(self.relations),
            "vertex types": len(self.vertex_types),
        }
        numbers = {"vertices": self.num_vertices, "edges": self.num_edges} | {n: k for n, k in parts.items() if k}
        return {what: f"{number:,}" for what, number in numbers.items()}

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

    @cached_property
    def label_kind(self) -> str:
        """What y holds: 'classes', 'labels' (several of them), 'values' of a regression; '' without y."""
        return "" if self.y is None else label_kind(self.y)

    @property
    def multilabel(self) -> bool:
        return self.label_kind == "labels"

    @cached_property
    def num_classes(self) -> int:
        """C: one more than the largest label, or the columns of y (1 for values [N]); 0 without labels."""
        if self.y is None or not len(self.y):
            return 0
        if self.y.dim() == 2:
            return self.y.shape[1]
        return int(self.y.max()) + 1 if self.label_kind == "classes" else 1

    def labelled(self, split: str) -> Tensor | None:
        """The vertices of a split, 'train', 'val' or 'test', that have a label: bool [N]; None: not known."""
        require_word("split", split, ("train", "val", "test"))
        mask: Tensor | None = getattr(self, f"{split}_mask")
        if mask is None or self.y is None:
            return None
        return mask & has_label(self.y)

    @cached_property
    def density(self) -> float:
        """The share of x that is not zero, among the first vertices; the same on every rank. 0 without x."""
        sample = torch.empty(0) if self.x is None else self.x[:SAMPLE]
        return int(sample.count_nonzero()) / max(sample.numel(), 1)

    @property
    def fingerprint(self) -> str:
        """Names the topology: 64 hex digits; see Adjacency.fingerprint."""
        return self.in_edges.fingerprint

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
        return type_range(self, name)

    def relation(self, name: str) -> Adjacency:
        """The in-edges of one relation, targets and sources numbered within their own type. Made anew at each call."""
        return relation_edges(self, name)

    def by_type(self) -> Graph:
        """With the features of each vertex type apart, also where all are of one width; itself if they are."""
        if self.x is None or not self.vertex_types:
            return self
        spans = {name: self.type_range(name) for name in self.vertex_types}
        return dataclasses.replace(
            self, x=None, features={name: self.x[one.start : one.stop] for name, one in spans.items()}
        )

    @classmethod
    def of(cls, known: GraphFields, *, trusted: bool = False) -> Graph:
        """The graph that has these fields, checked; `trusted` as above."""
        fields = {field.name: getattr(known, field.name) for field in dataclasses.fields(GraphFields)}
        return cls(**fields, trusted=trusted)

    @classmethod
    def from_edges(
        cls,
        source: Numbers,
        target: Numbers | None = None,
        *,
        num_vertices: int | None = None,
        weight: Numbers | None = None,
        edge_features: Numbers | None = None,
        x: Numbers | None = None,
        y: Numbers | None = None,
        train_mask: Numbers | None = None,
        val_mask: Numbers | None = None,
        test_mask: Numbers | None = None,
        undirected: bool = False,
        name: str = "graph",
        edge_type: Numbers | None = None,
        relations: tuple[str, ...] = (),
        vertex_types: tuple[str, ...] = (),
        type_offsets: tuple[int, ...] = (),
        features: Mapping[str, Numbers] | None = None,
        val_links: Numbers | None = None,
        test_links: Numbers | None = None,
    ) -> Graph:
        """A graph from edges source[e] -> target[e], integer [E] each, or from one edge_index [2, E] in their place.

        All numbers may be tensors, NumPy arrays, columns of pandas or lists. `weight` and `edge_type` [E] and
        `edge_features` [E, K] are in the order of the edges. Without `num_vertices` it is the length of x, y or
        type_offsets, else one more than the largest id. `undirected` joins the ends of each edge in both directions,
        once: of several edges from one vertex to another the first stays, and one as given before one turned round.
        """
        if target is None:
            pair = plain("edge_index", source)
            if pair.dim() != 2 or len(pair) != 2:
                raise InputError(
                    f"edge_index has shape {list(pair.shape)}: give edges as [2, E], source row first, or give target"
                )
            source, target = pair
        if num_vertices is None:
            num_vertices = known_size(x, y, type_offsets)
        edges = build(
            source,
            target,
            num_vertices=num_vertices,
            weight=weight,
            edge_features=edge_features,
            edge_type=edge_type,
            undirected=undirected,
        )
        numbers: dict[str, Any] = {  # tensors as of the cast
            "x": x,
            "y": y,
            "train_mask": train_mask,
            "val_mask": val_mask,
            "test_mask": test_mask,
            "features": {} if features is None else features,
            "val_links": val_links,
            "test_links": test_links,
        }
        return cls(
            in_edges=edges.in_edges,
            name=name,
            edge_type=edges.edge_type,
            relations=relations,
            edge_features=edges.edge_features,
            vertex_types=vertex_types,
            type_offsets=type_offsets,
            **numbers,
        )

    @classmethod
    def from_tables(
        cls,
        vertices: Any,
        edges: Any,
        *,
        id: str | None = None,
        source: str = "source",
        target: str = "target",
        features: str | Sequence[str] = (),
        label: str | Sequence[str] = (),
        split: str | Sequence[float] | None = None,
        split_time: str | None = None,
        weight: str | None = None,
        edge_features: str | Sequence[str] = (),
        undirected: bool = False,
        seed: int = 0,
        name: str | None = None,
    ) -> Graph:
        """A graph from a table of vertices (or None) and one of edges; docs/data.md says what columns may hold.

        A table is a pandas DataFrame, a pyarrow.Table, arrays by name, or a Parquet, Arrow or CSV file or folder.
        `id`: the vertices' column of ids, whole numbers or text, by which source and target of an edge name them; None:
        they are rows, from 0 on. `split`: a column of train, val and test, or three shares of a split that `seed`
        draws; `split_time`: a column, whose earliest train and latest test. `undirected` adds each edge's reverse.

        Raises InputError that names table, column and row.
        """
        columns = ColumnRoles(
            id=id,
            source=source,
            target=target,
            features=named(features),
            label=named(label),
            split=split if isinstance(split, str) else None,
            split_time=split_time,
            weight=weight,
            edge_features=named(edge_features),
        )
        shares = None if isinstance(split, str) else split
        parts = table_parts(vertices, edges, columns, name=name, undirected=undirected, shares=shares, seed=seed)
        return cls.of(gathered(parts))

    @classmethod
    def from_networkx(
        cls,
        graph: Any,
        *,
        features: str | Sequence[str] = (),
        label: str | Sequence[str] = (),
        split: str | Sequence[float] | None = None,
        weight: str | None = None,
        edge_features: str | Sequence[str] = (),
        seed: int = 0,
        name: str = "graph",
    ) -> Graph:
        """A graph from one of NetworkX, whose nodes are whole numbers or text; an undirected edge leads both ways.

        All but `split`'s shares are names of attributes, and mean what they mean in `from_tables`. A vertex's name is
        its node. Raises InputError that names attribute and row.
        """
        features, label, edge_features = named(features), named(label), named(edge_features)
        of_nodes = (*features, *label, *named(split if isinstance(split, str) else ()))
        vertices, edges = network_tables(graph, of_nodes, (*named(weight or ()), *edge_features))
        return cls.from_tables(
            vertices,
            edges,
            id=NODE,
            source=SOURCE,
            target=TARGET,
            features=features,
            label=label,
            split=split,
            weight=weight,
            edge_features=edge_features,
            seed=seed,
            name=name,
        )

    @classmethod
    def from_scipy(cls, matrix: Any, **fields: Any) -> Graph:
        """A graph from a sparse matrix [N, N] of SciPy, whose entry [u, v] is an edge u -> v.

        Entries are weights, unless all are 1. fields: what `from_edges` takes beside edges, such as x and y.
        """
        return cls.from_edges(**matrix_edges(matrix) | fields)

    @classmethod
    def from_dgl(
        cls,
        graph: Any,
        *,
        features: str = "feat",
        label: str = "label",
        weight: str | None = None,
        edge_features: str | None = None,
        name: str = "graph",
    ) -> Graph:
        """A graph from one of DGL with one type of nodes and of edges; names of its ndata and edata.

        Masks are ndata's train_mask, val_mask and test_mask.
        """
        return cls.from_edges(**dgl_fields(graph, features, label, weight, edge_features), name=name)

    def with_split(self, ratio: Sequence[float] = SHARES, *, seed: int = 0, time: Tensor | None = None) -> Graph:
        """The same graph with another split of its labelled vertices (of all, where it has no labels).

        ratio: the shares to train, validate and test on. Drawn by `seed`; or by `time`, a number for each vertex by
        its original id: the earliest train, the latest test.
        """
        labelled = torch.ones(self.num_vertices, dtype=torch.bool) if self.y is None else has_label(self.y)
        place = slice(None) if self.ids is None else self.ids
        labelled = torch.empty_like(labelled).index_copy_(0, self.ids, labelled) if self.ids is not None else labelled
        if time is None:
            masks = random_split(labelled, seed, ratio)
        else:
            check_vector("time", plain("time", time), self.num_vertices, "vertices")
            masks = split_by_time(plain("time", time), labelled, ratio)
        fields: dict[str, Any] = {field: mask[place] for field, mask in masks._asdict().items()}
        return dataclasses.replace(self, **fields, trusted=True)

    @classmethod
    def from_pyg(cls, data: PygGraph, *, name: str = "graph") -> Graph:
        """A graph from PyG's Data or HeteroData; see weft.data.io.pyg."""
        return cls.of(from_pyg(data, name=name))

    def to_pyg(self) -> PygGraph:
        """PyG's HeteroData for several vertex types, else its Data; see weft.data.io.pyg."""
        return to_pyg(self)

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool | None = True) -> Graph:
        """A graph from a store folder, memory-mapped; see weft.data.store.store.

        `verify` reads every file once, compares checksums and checks the values; without it the files are trusted.
        None: checksums of the files alone whose size or modification time is not as when they were written.
        """
        stored = read_store(folder, verify=verify)
        with located(stored.folder):
            graph = cls.of(stored.fields, trusted=verify is False)
        object.__setattr__(graph, "path", stored.folder)
        for array in stored.arrays:
            release(array)  # verifying has read them all
        return graph

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Writes the graph as a store folder; see weft.data.store.store."""
        save(self, folder, overwrite=overwrite)


def named(columns: str | Sequence[str]) -> tuple[str, ...]:
    """One column or several, as several."""
    return (columns,) if isinstance(columns, str) else tuple(columns)


def known_size(x: object, y: object, type_offsets: object) -> int | None:
    """The number of vertices that features, labels or offsets show, else None. They are not checked any further yet."""
    for field, value in (("x", x), ("y", y)):
        if value is not None and (tensor := plain(field, value)).dim():
            return len(tensor)
    return type_offsets[-1] if isinstance(type_offsets, tuple | list) and type_offsets else None
