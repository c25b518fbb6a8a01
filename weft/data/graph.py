"""`Graph`: topology, features, labels and splits of one graph, immutable and checked on construction."""

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
from weft.data.checks.rules import check_kinds, check_shapes, check_stored_transpose, check_values, warn_doubtful
from weft.data.checks.tensor_checks import (
    FEATURE_DTYPES,
    LINKS,
    MASKS,
    Numbers,
    as_features,
    as_labels,
    cast,
    check_vector,
    dense_cpu_tensor,
    has_label,
    located,
    user_labels,
)
from weft.data.edges import build
from weft.data.fields import GraphFields, Labels
from weft.data.io.graph_parts import concatenate_tables, converted, gather_parts
from weft.data.io.other_libraries import NODE, SOURCE, TARGET, dgl_fields, matrix_edges, network_tables
from weft.data.io.pyg import PygGraph, from_pyg, to_pyg
from weft.data.io.pyg_links import with_split_labels, with_split_links
from weft.data.splits import SHARES, random_split, split_by_time
from weft.data.store.check_record import record_check
from weft.data.store.store import read_store, save
from weft.data.tables.schema import EdgeColumns, Schema, VertexColumns, read_schema
from weft.data.tables.table_graph import table_parts
from weft.data.vertex_types import TypedShape, relation_edges, type_range
from weft.storage.quantized_table import FeatureTable, stored_rows
from weft.storage.unnamed_files import release
from weft.utils.errors import InputError, printable
from weft.utils.notebook import facts_table

DENSITY_SAMPLE = 1 << 16
"""Number of vertices whose features `Graph.density` reads."""


def density_of(x: Tensor) -> float:
    """Return the fraction of nonzero entries of x."""
    return int(x.count_nonzero()) / max(x.numel(), 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph(GraphFields, Labels):
    """A graph of N vertices and E edges with features, labels and splits; independent of ranks, devices and models.

    Directed graphs, self-loops, duplicate edges, isolated vertices and graphs without edges are legal.

    The constructor casts other dtypes than those of `GraphFields` if every value survives. Otherwise, and for every
    other mistake, it raises InputError with the position. Overlapping masks are legal, with a DataWarning.
    """

    path: Path | None = dataclasses.field(init=False, default=None)
    """Folder from which this graph was opened; None for other graphs and for changed copies (dataclasses.replace)."""
    trusted: InitVar[bool] = False
    """If True, values are not read (sizes are always compared); for arrays that were checked before."""

    def __post_init__(self, trusted: bool) -> None:
        check_kinds(self)
        if self.y is not None:
            object.__setattr__(self, "y", as_labels(self.y))
        type_dtype = torch.int16 if len(self.relations) < 1 << 15 else torch.int32
        dtypes = {"edge_features": torch.float32, "edge_type": type_dtype}
        dtypes |= {"ids": torch.int64} | dict.fromkeys(LINKS, torch.int64)
        dtypes |= dict.fromkeys(MASKS, torch.bool)
        for name, dtype in dtypes.items():
            tensor = getattr(self, name)
            if tensor is not None:
                object.__setattr__(self, name, cast(name, tensor, dtype))
        if self.x is not None:
            object.__setattr__(self, "x", as_features("x", self.x))
        features = {n: as_features(f"features['{n}']", t) for n, t in self.features.items()}
        object.__setattr__(self, "features", MappingProxyType(features))
        check_shapes(self)
        if not trusted:
            check_values(self)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{size} {unit}" for unit, size in self._sizes().items())
        return f"<Graph {printable(self.name)}: {sizes}>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows; unlike `repr`, this reads labels and masks."""
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
        """Return the sizes of the graph, formatted, by name. Reads no array."""
        optional = {
            "features": self.num_features,
            "edge features": self.num_edge_features,
            "relations": len(self.relations),
            "vertex types": len(self.vertex_types),
            "labelled edges": 0 if self.edge_labels is None else len(self.edge_labels.edges),
        }
        counts = {"vertices": self.num_vertices, "edges": self.num_edges} | {n: k for n, k in optional.items() if k}
        return {unit: f"{count:,}" for unit, count in counts.items()}

    @property
    def num_vertices(self) -> int:
        """Number of vertices, N."""
        return self.in_edges.num_targets

    @property
    def num_edges(self) -> int:
        """Number of stored edges, E."""
        return self.in_edges.num_edges

    @property
    def num_features(self) -> int:
        """F, the number of columns of x; 0 without x (`features` has a width for each vertex type)."""
        return 0 if self.x is None else self.x.shape[1]

    @property
    def num_edge_features(self) -> int:
        """K, the number of columns of edge_features; 0 without them."""
        return 0 if self.edge_features is None else self.edge_features.shape[1]

    @property
    def multilabel(self) -> bool:
        """True if a vertex can have several labels."""
        return self.label_kind == "labels"

    def labels(self, task: str) -> Labels:
        """Return the labels that a task learns: of edges for 'edge', else of vertices."""
        if task != "edge":
            return self
        if self.edge_labels is None:
            raise InputError(f"{self.name} has no labels of edges: give edge_y of Graph.from_edges, or --edge-label")
        return self.edge_labels

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class, if the labels were text in a table; else ()."""
        return () if self.schema is None else self.schema.class_names

    @cached_property
    def density(self) -> float:
        """Fraction of nonzero entries of x among the first vertices, equal on all ranks; 0 without x."""
        return 0.0 if self.x is None else density_of(self.x[:DENSITY_SAMPLE])

    @cached_property
    def typed_densities(self) -> tuple[float, ...]:
        """Fraction of nonzero features of each vertex type with features, in a sample of rows; () in a graph with x."""
        tables = [self.features[name] for name in self.vertex_types if name in self.features]
        return tuple(density_of(table[:: len(table) // DENSITY_SAMPLE + 1]) for table in tables)

    @property
    def fingerprint(self) -> str:
        """Digest that identifies the topology, 64 hex digits; see Adjacency.fingerprint."""
        return self.in_edges.fingerprint

    @property
    def typed(self) -> TypedShape:
        """Number of relations and, without x, the sizes of the vertex types, on which a model's structure depends."""
        if self.x is not None:
            return TypedShape(len(self.relations))
        xs = [self.features[name] for name in self.vertex_types if name in self.features]
        featured = tuple((len(x), x.shape[1]) for x in xs)
        return TypedShape(len(self.relations), featured, self.num_vertices - sum(count for count, _ in featured))

    @cached_property
    def relations_in(self) -> Adjacency:
        """Edges from relations to vertices: (r, v) if v has an in-edge by relation r."""
        assert self.edge_type is not None
        count, (_, target) = len(self.relations), self.in_edges.edges()
        pairs = (target * count + self.edge_type).unique()
        return Adjacency.from_edges(pairs % count, pairs // count, num_sources=count, num_targets=self.num_vertices)

    def count_relation_rows(self, vertices: slice | Tensor = slice(None)) -> tuple[int, ...]:
        """Return the number of vertices with in-edges by each relation; () in a graph without relations.

        Args:
            vertices: Vertices to count: a range, or ids, int64.
        """
        if self.edge_type is None:
            return ()
        selected = torch.zeros(self.num_vertices, dtype=torch.bool)
        selected[vertices] = True
        relation, vertex = self.relations_in.edges()
        return tuple(torch.bincount(relation[selected[vertex]], minlength=len(self.relations)).tolist())

    def type_range(self, name: str) -> range:
        """Return the vertex ids of one type. Raises InputError if there is no such type."""
        return type_range(self, name)

    def relation(self, name: str) -> Adjacency:
        """Return the in-edges of one relation; targets and sources are numbered within their types. Not cached."""
        return relation_edges(self, name)

    def by_type(self) -> Graph:
        """Return the graph with features per vertex type instead of x; the same object if it has no x or no types."""
        if self.x is None or not self.vertex_types:
            return self
        spans = {name: self.type_range(name) for name in self.vertex_types}
        return dataclasses.replace(
            self, x=None, features={n: stored_rows(self.x, slice(s.start, s.stop)) for n, s in spans.items()}
        )

    @classmethod
    def of(cls, unchecked: GraphFields, *, trusted: bool = False) -> Graph:
        """Return the graph that has these fields, checked.

        Args:
            unchecked: Fields from a reader.
            trusted: If True, values are not read; see `Graph.trusted`.
        """
        fields = {field.name: getattr(unchecked, field.name) for field in dataclasses.fields(GraphFields)}
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
        edge_y: Numbers | None = None,
        edge_split: Numbers | None = None,
    ) -> Graph:
        """Return a graph from edges source[e] -> target[e].

        All arrays may be tensors, NumPy arrays, pandas columns or lists.

        Args:
            source: Integer [E]; or, without `target`, an edge_index [2, E].
            target: Integer [E].
            num_vertices: Number of vertices. Default: the length of x, y or type_offsets, else one more than the
                largest id.
            weight: Edge weights [E].
            edge_features: [E, K].
            x: Features [N, F].
            y: Labels; see `GraphFields.y`.
            train_mask: bool [N].
            val_mask: bool [N].
            test_mask: bool [N].
            undirected: Add the reverse of each edge and merge duplicates. The first of several equal edges is kept; an
                edge as given wins over a reversed one.
            name: Name of the graph in messages.
            edge_type: Relation of each edge [E], positions in `relations`.
            relations: Names 'source type|name|target type'.
            vertex_types: Names of the vertex types.
            type_offsets: First id of each vertex type, and N at the end.
            features: Features by vertex type, instead of x.
            val_links: Held-out edges [m, 3] for link prediction; see `GraphFields.val_links`.
            test_links: Held-out edges [m, 3] for link prediction.
            edge_y: Label of each edge, [E] or [E, C], in one of the forms of `GraphFields.y`, for a task on edges.
            edge_split: 0 (train), 1 (validation), 2 (test) or -1 (none) for each edge, [E]; or three fractions of a
                random split of the labelled edges. Default: 60, 20 and 20 %. Edges to validate or test on carry no
                messages; `edge_labels` lists them, and all labelled edges, in the order of the input.

        Raises:
            InputError: At the first value that no graph may contain.
        """
        if target is None:
            pair = dense_cpu_tensor("edge_index", source)
            if pair.dim() != 2 or len(pair) != 2:
                raise InputError(
                    f"edge_index has shape {list(pair.shape)}: give edges as [2, E], source row first, or give target"
                )
            source, target = pair
        y = user_labels(y)
        if num_vertices is None:
            num_vertices = size_from_arrays(x, y, type_offsets)
        edges = build(
            source,
            target,
            num_vertices=num_vertices,
            weight=weight,
            edge_features=edge_features,
            edge_type=edge_type,
            undirected=undirected,
            edge_y=edge_y,
            edge_split=edge_split,
        )
        arrays: dict[str, Any] = {  # the constructor casts them to tensors
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
            edge_labels=edges.edge_labels,
            vertex_types=vertex_types,
            type_offsets=type_offsets,
            **arrays,
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
        label_kind: str = "",
        weight: str | None = None,
        edge_features: str | Sequence[str] = (),
        edge_label: str | Sequence[str] = (),
        undirected: bool = False,
        seed: int = 0,
        name: str | None = None,
    ) -> Graph:
        """Return a graph from a table of vertices and a table of edges; docs/data.md says what columns may contain.

        A table is a pandas DataFrame, a pyarrow.Table, arrays by name, or a Parquet, Arrow or CSV file or folder.

        Args:
            vertices: Table of vertices; None: the vertices are the ids in the edges.
            edges: Table of edges.
            id: Column of `vertices` with the ids that edges refer to, whole numbers or text; None: row numbers from 0.
            source: Column of `edges` with the id of each edge's source.
            target: Column of `edges` with the id of each edge's target.
            features: Columns of `vertices`, each as 'name', or as 'name:kind' with a transform, such as
                'balance:rank'. Without a kind, the column's values decide (weft.data.tables.transforms).
            label: Column of `vertices` with classes, class names or values, or one column of 0 and 1 for each class.
            split: Column of `vertices` with train, val and test; or three fractions of a random split.
            split_time: Column of `vertices`; the earliest vertices train, the latest test.
            label_kind: 'classes' or 'values', the meaning of the column `label`; '': text and integers are classes.
            weight: Column of `edges`.
            edge_features: Columns of `edges`, as in `features`.
            edge_label: Column of `edges` like `label`, for a task on edges. `split`, `split_time` and `label_kind` then
                belong to `edges`, and `edge_features` also are features of the edges to predict.
            undirected: Add the reverse of each edge and merge duplicates.
            seed: Seed of a random split.
            name: Name of the graph in messages. Default: the file's name.

        Raises:
            InputError: A table is wrong. The message names table, column and row.
        """
        labels: dict[str, Any] = {
            "label": as_tuple(edge_label or label),
            "label_kind": label_kind,
            "split": split if isinstance(split, str) else None,
            "split_time": split_time,
            "shares": None if split is None or isinstance(split, str) else tuple(split),
        }
        if label and edge_label:
            raise InputError("label and edge_label: a model learns one of them, so leave the other out")
        ends: dict[str, Any] = {"source": source, "target": target, "weight": weight}
        schema = Schema.untyped(
            VertexColumns(table=vertices, id=id, features=as_tuple(features), **{} if edge_label else labels),
            EdgeColumns(table=edges, features=as_tuple(edge_features), **ends, **labels if edge_label else {}),
        )
        return cls.of(gather_parts(table_parts(schema, name=name, undirected=undirected, seed=seed)))

    @classmethod
    def from_schema(cls, path: str | Path, *, name: str | None = None, seed: int = 0) -> Graph:
        """Return a graph with vertex types and relations from the tables that a TOML file describes; see docs/data.md.

        Args:
            path: The file.
            name: Name of the graph in messages. Default: the file's name.
            seed: Seed of a random split.

        Raises:
            InputError: The file or a table is wrong. The message names table, column and row.
        """
        return cls.of(gather_parts(table_parts(read_schema(path), name=name or Path(path).stem, seed=seed)))

    @classmethod
    def from_networkx(
        cls,
        graph: Any,
        *,
        features: str | Sequence[str] = (),
        label: str | Sequence[str] = (),
        split: str | Sequence[float] | None = None,
        label_kind: str = "",
        weight: str | None = None,
        edge_features: str | Sequence[str] = (),
        seed: int = 0,
        name: str = "graph",
    ) -> Graph:
        """Return a graph from a NetworkX graph whose nodes are whole numbers or text.

        An undirected edge becomes two edges. The names of the vertices are the nodes. Arguments are names of attributes
        and mean the same as in `from_tables`.

        Args:
            graph: A NetworkX graph.
            features: Attributes of nodes: numbers or lists of numbers.
            label: Attributes of nodes: a class or a value, or a 0 or 1 for each class.
            split: Attribute of nodes: train, val or test; or three fractions of a random split.
            label_kind: 'classes' or 'values', the meaning of the attribute `label`; '': whole numbers are classes.
            weight: Attribute of edges.
            edge_features: Attributes of edges.
            seed: Seed of a random split.
            name: Name of the graph in messages.

        Raises:
            InputError: An attribute is wrong. The message names attribute and row.
        """
        features, label, edge_features = as_tuple(features), as_tuple(label), as_tuple(edge_features)
        node_attributes = (*features, *label, *as_tuple(split if isinstance(split, str) else ()))
        vertices, edges = network_tables(graph, node_attributes, (*as_tuple(weight or ()), *edge_features))
        return cls.from_tables(
            vertices,
            edges,
            id=NODE,
            source=SOURCE,
            target=TARGET,
            features=features,
            label=label,
            split=split,
            label_kind=label_kind,
            weight=weight,
            edge_features=edge_features,
            seed=seed,
            name=name,
        )

    @classmethod
    def from_scipy(cls, matrix: Any, **fields: Any) -> Graph:
        """Return a graph from a SciPy sparse matrix [N, N] whose entry [u, v] is an edge u -> v.

        Args:
            matrix: The matrix. Its entries are edge weights, unless all are 1.
            fields: Further arguments of `from_edges`, such as x and y.
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
        """Return a graph from a DGL graph with one type of nodes and one type of edges.

        The masks are train_mask, val_mask and test_mask of ndata.

        Args:
            graph: A DGL graph.
            features: Name of the features in ndata.
            label: Name of the labels in ndata.
            weight: Name of the edge weights in edata.
            edge_features: Name of the edge features in edata.
            name: Name of the graph in messages.
        """
        return cls.from_edges(**dgl_fields(graph, features, label, weight, edge_features), name=name)

    def with_split(self, ratio: Sequence[float] = SHARES, *, seed: int = 0, time: Tensor | None = None) -> Graph:
        """Return this graph with another split of its labelled vertices (of all vertices without labels).

        Args:
            ratio: Fractions of the vertices to train, validate and test on.
            seed: Seed of the random split.
            time: A number for each vertex, by original id: the earliest train and the latest test, instead of a random
                split.
        """
        labelled = torch.ones(self.num_vertices, dtype=torch.bool) if self.y is None else has_label(self.y)
        positions = slice(None) if self.ids is None else self.ids
        labelled = torch.empty_like(labelled).index_copy_(0, self.ids, labelled) if self.ids is not None else labelled
        if time is None:
            masks = random_split(labelled, seed, ratio)
        else:
            check_vector("time", dense_cpu_tensor("time", time), self.num_vertices, "vertices")
            masks = split_by_time(dense_cpu_tensor("time", time), labelled, ratio)
        fields: dict[str, Any] = {field: mask[positions] for field, mask in masks._asdict().items()}
        return dataclasses.replace(self, **fields, trusted=True)

    def with_feature_dtype(self, dtype: torch.dtype) -> Graph:
        """Return this graph with features rounded to a dtype.

        Args:
            dtype: torch.float32, torch.float16, torch.bfloat16, or torch.int8 with a scale for each column, see
                `weft.data.io.graph_parts.converted`.

        Raises:
            InputError: If the graph has no features, or one is beyond the range of the dtype.
        """
        if self.x is None and not self.features:
            raise InputError(f"{self.name} has no features, so they have no type: add some first")
        dtypes = (*FEATURE_DTYPES, torch.int8)
        if dtype not in dtypes:
            raise InputError(f"features cannot be stored as {dtype}: give one of {', '.join(map(str, dtypes))}")

        def convert(field: str, table: FeatureTable) -> FeatureTable:
            if table.dtype == dtype:
                return table
            result = concatenate_tables(converted(field, lambda: [table], dtype))
            assert result is not None
            return result

        features = {name: convert(f"features['{name}']", table) for name, table in self.features.items()}
        x = None if self.x is None else convert("x", self.x)
        return dataclasses.replace(self, x=x, features=features, trusted=True)

    @classmethod
    def from_pyg(
        cls,
        data: PygGraph,
        *,
        name: str = "graph",
        val: PygGraph | None = None,
        test: PygGraph | None = None,
        edge_labels: bool = False,
    ) -> Graph:
        """Return a graph from a PyG Data or HeteroData, or from the three that RandomLinkSplit returns.

        Args:
            data: The PyG graph; weft.data.io.pyg lists the attributes that are read.
            name: Name of the graph in messages.
            val: Second result of RandomLinkSplit, whose positive links become val_links; `data` is the first.
            test: Third result of RandomLinkSplit, whose positive links become test_links.
            edge_labels: True if `edge_label` of the three is a label to predict, such as a rating; the links then
                become `Graph.edge_labels`.

        Raises:
            InputError: An attribute is wrong; the message names it.
        """
        fields = from_pyg(data, name=name)
        if not edge_labels:
            return cls.of(with_split_links(fields, data, val, test))
        if val is None or test is None:
            raise InputError("edge_labels=True needs val and test: give all results of RandomLinkSplit")
        return cls.of(with_split_labels(fields, data, val, test))

    def to_pyg(self) -> PygGraph:
        """Return a PyG HeteroData if there are several vertex types, else a Data; see weft.data.io.pyg."""
        return to_pyg(self)

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool | None = True) -> Graph:
        """Return a graph from a graph folder, memory-mapped; see weft.data.store.store.

        Args:
            folder: The folder.
            verify: True: read every file once, compare checksums and check all values. None: do so at the first
                opening, but compare checksums only of files whose size or modification time has changed since they
                were written; at later openings read nothing, unless a file has changed since the first one. False:
                trust the files.
        """
        stored = read_store(folder, verify=verify)
        trusted = verify is False or (verify is None and stored.checked)
        with located(stored.folder):
            graph = cls.of(stored.fields, trusted=trusted)
            if not trusted:
                check_stored_transpose(graph.in_edges, graph.in_edges.transpose)
                record_check(stored.folder, stored.state)
            elif verify is None:
                warn_doubtful(graph)
        object.__setattr__(graph, "path", stored.folder)
        for array in stored.arrays:
            release(array)  # verifying has read all pages of the files
        return graph

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the graph as a graph folder; see weft.data.store.store.

        Args:
            folder: The new folder.
            overwrite: Replace a graph folder that exists.
        """
        save(self, folder, overwrite=overwrite)


def as_tuple(columns: str | Sequence[str]) -> tuple[str, ...]:
    """Return column names as a tuple; a single name becomes a tuple of one."""
    return (columns,) if isinstance(columns, str) else tuple(columns)


def size_from_arrays(x: object, y: object, type_offsets: object) -> int | None:
    """Return the number of vertices by the length of x or y or by the offsets, else None. Arrays are unchecked.

    Args:
        x: Features, or None.
        y: Labels, or None.
        type_offsets: Offsets of the vertex types, possibly empty.
    """
    for field, value in (("x", x), ("y", y)):
        if value is not None and (tensor := dense_cpu_tensor(field, value)).dim():
            return len(tensor)
    return type_offsets[-1] if isinstance(type_offsets, tuple | list) and type_offsets else None
