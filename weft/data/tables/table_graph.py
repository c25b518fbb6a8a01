"""Interpretation of tables of vertices and edges by a schema: a graph in parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data.checks.tensor_checks import has_label, no_label
from weft.data.fields import EdgeLabels
from weft.data.io.graph_parts import EdgesOfPart, GraphParts
from weft.data.splits import Masks
from weft.data.tables.fit_transforms import fit_transforms
from weft.data.tables.schema import EdgeColumns, Schema, TableColumns, VertexColumns
from weft.data.tables.table import ID, InputTable, ids_of, num_rows, open_table, require_columns
from weft.data.tables.table_labels import TableLabels
from weft.data.tables.table_vertices import TypeOfVertices, joined_names
from weft.data.tables.transforms import FeatureColumn, FeatureReader, NumberTransform, RowsOfColumns, Transform
from weft.data.vertex_types import put_rows
from weft.utils.errors import InputError


def table_parts(schema: Schema, *, name: str | None = None, undirected: bool = False, seed: int = 0) -> GraphParts:
    """Return the graph of some tables.

    Columns of all tables are checked, and transforms are fitted on the training rows, before any edge is sorted.
    Without a table of vertices, the vertices are the ids in the edges, in the order of their first occurrence.

    Args:
        schema: The tables and the meaning of their columns. Features that are fitted already are not fitted again.
        name: Name of the graph. Default: that of the first file of edges.
        undirected: Add the reverse of each edge and merge duplicates.
        seed: Seed of a random split.

    Raises:
        InputError: A table is wrong. The message names table, column, row and remedy.
    """
    if undirected and schema.typed:
        raise InputError("--undirected cannot be used with relations: leave it out, and train with --inverse-relations")
    tables = GraphTables.open(schema, seed)
    schema, offsets = tables.schema, tables.offsets
    readers = {
        n: FeatureReader(tables.vertex_tables[n], transforms_of(c)) for n, c in schema.vertices.items() if c.features
    }
    same_width = len(readers) == len(tables.types) and len({reader.num_columns for reader in readers.values()}) == 1
    first_edges = next(iter(schema.edges.values())).table
    stem = Path(first_edges).name.split(".")[0] if isinstance(first_edges, str | Path) else "graph"
    y, masks = tables.vertex_labels()
    return GraphParts(
        name=stem if name is None else name,
        edges=tables.read_edges,
        num_vertices=offsets[-1],
        x=(lambda: itertools.chain.from_iterable(read() for read in readers.values())) if same_width else None,
        features={} if same_width else readers,
        y=y,
        masks=masks,
        edge_labels=tables.read_labelled_edges if schema.predicts_edges else None,
        vertex_names=joined_names(tables.types),
        vertex_types=tuple(tables.types) if schema.typed else (),
        type_offsets=offsets if schema.typed else (),
        relations=tuple(schema.relation(n) for n in schema.edges) if schema.typed else (),
        schema=schema,
        undirected=undirected,
    )


@dataclass(frozen=True, kw_only=True)
class GraphTables:
    """Tables of a graph, whose columns are checked, with their vertices, labels and fitted transforms."""

    schema: Schema
    """Meaning of the columns, with fitted features."""
    vertex_tables: Mapping[str, InputTable]
    """Tables of vertices by type."""
    edge_tables: Mapping[str, InputTable]
    """Tables of edges by relation."""
    types: Mapping[str, TypeOfVertices]
    """Vertices by type."""
    labels: TableLabels
    """Labels and splits of the rows of the table to predict."""

    @classmethod
    def open(cls, schema: Schema, seed: int) -> GraphTables:
        """Open and check the tables of a schema, and fit its features.

        Args:
            schema: The schema.
            seed: Seed of a random split.

        Raises:
            InputError: A table is wrong.
        """
        vertex_tables = {name: open_table(c.table, f"vertices {name}".strip()) for name, c in schema.vertices.items()}
        edge_tables = {name: open_table(c.table, f"edges {name}".strip()) for name, c in schema.edges.items()}
        for name, vertex_columns in schema.vertices.items():
            check_vertex_columns(vertex_tables[name], vertex_columns)
        for name, edge_columns in schema.edges.items():
            check_edge_columns(edge_tables[name], edge_columns)
        if schema.vertices:
            types = {name: TypeOfVertices.of(vertex_tables[name], c) for name, c in schema.vertices.items()}
        else:
            types = {"": TypeOfVertices.named_by_edges(edge_tables[""], schema.edges[""])}
        for name, columns_of in [*schema.vertices.items(), *schema.edges.items()]:
            if columns_of is not schema.labelled and (reason := columns_of.labels_or_splits):
                raise InputError(f"{reason} of {name or 'vertices'} has no effect: only the table to predict has one")
        labels = TableLabels()
        if (columns := schema.labelled) is not None:
            table = (edge_tables if schema.predicts_edges else vertex_tables)[schema.predict]
            labels = TableLabels.read(table, columns, seed)
            labels = labels.of_edges(num_rows(table)) if schema.predicts_edges else labels

        def fitted(columns: TableColumns, table: InputTable) -> tuple[Transform, ...]:
            return fitted_features(table, columns, labels.training if columns is schema.labelled else None)

        schema = replace(
            schema,
            vertices={n: replace(c, features=fitted(c, vertex_tables[n])) for n, c in schema.vertices.items()},
            edges={n: replace(c, features=fitted(c, edge_tables[n])) for n, c in schema.edges.items()},
            class_names=labels.class_names or schema.class_names,
        )
        return cls(schema=schema, vertex_tables=vertex_tables, edge_tables=edge_tables, types=types, labels=labels)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Id ranges of the vertex types, as in GraphFields.type_offsets."""
        return (0, *itertools.accumulate(vertices.count for vertices in self.types.values()))

    def first_vertex(self, vertex_type: str) -> int:
        """Return the number of the first vertex of a type."""
        return self.offsets[list(self.types).index(vertex_type)]

    def vertex_labels(self) -> tuple[Tensor | None, Masks]:
        """Return the labels and splits of all vertices, of which only those of one type have some."""
        labels = self.labels
        if self.schema.predicts_edges or not self.schema.typed or labels.y is None:
            return (None, Masks()) if self.schema.predicts_edges else (labels.y, labels.masks)
        first, count = self.first_vertex(self.schema.predict), self.offsets[-1]
        masks = (None if mask is None else put_rows({first: mask}, count, 0) for mask in labels.masks)
        return put_rows({first: labels.y}, count, no_label(labels.y)), Masks(*masks)

    def read_edges(self) -> Iterator[EdgesOfPart]:
        """Yield the edges that carry messages in parts, one relation after the other.

        If only some relations have weights, other edges weigh 1; narrower edge features are filled up with zeros.

        Raises:
            InputError: At the first id that no vertex has.
        """
        columns = self.schema.edges.values()
        weighted = any(c.weight for c in columns)
        width = max(sum(transform.num_columns for transform in transforms_of(c)) for c in columns)
        for number, name in enumerate(self.schema.edges):
            row = 0
            for part in self._read_relation(name):
                count = len(part.source)
                features = torch.zeros(count, width)
                if part.features is not None:
                    features[:, : part.features.shape[1]] = part.features
                whole = replace(
                    part,
                    weight=(torch.ones(count) if part.weight is None else part.weight) if weighted else None,
                    features=features if width else None,
                    relation=torch.full((count,), number, dtype=torch.int16) if self.schema.typed else None,
                )
                held_out = self.labels.held_out if self.schema.predicts_edges else None
                of_part = slice(row, row + count)
                yield whole if held_out is None or name != self.schema.predict else whole.select(~held_out[of_part])
                row += count

    def read_labelled_edges(self) -> EdgeLabels:
        """Return the edges with labels, and those to validate, test or predict, in the order of their table."""
        name, y, held_out = self.schema.predict, self.labels.y, self.labels.held_out
        assert y is not None
        assert held_out is not None
        listed = has_label(y) | held_out
        row, edges, features = 0, [], []
        relation = list(self.schema.edges).index(name)
        for part in self._read_relation(name, warns=False):
            chosen = listed[row : row + len(part.source)]
            row += len(part.source)
            part = part.select(chosen)
            edges.append(torch.stack([part.source, part.target, torch.full_like(part.source, relation)], 1))
            features += [] if part.features is None else [part.features]
        splits = {name: mask[listed] for name, mask in self.labels.masks._asdict().items()}
        return EdgeLabels(
            edges=torch.cat(edges), y=y[listed], features=torch.cat(features) if features else None, **splits
        )

    def _read_relation(self, name: str, *, warns: bool = True) -> Iterator[EdgesOfPart]:
        """Yield all edges of a relation in parts, with the weights and features of its own table.

        Args:
            name: Name of the relation.
            warns: Warn about values that no training row has, and about numbers that become equal.
        """
        columns, table = self.schema.edges[name], self.edge_tables[name]
        transforms = RowsOfColumns(table, transforms_of(columns))
        weights = RowsOfColumns(table, [weight_transform(columns.weight)] if columns.weight else [])
        row = 0
        for part in table.parts({columns.source: ID, columns.target: ID} | weights.read_as | transforms.read_as):
            endpoints = []
            for column, end in ((columns.source, columns.source_type), (columns.target, columns.target_type)):
                place = f"{table.place}: column '{column}'"
                vertices = self.types[end].find(ids_of(part[column], place, row), place, row)
                endpoints.append(torch.from_numpy(vertices + self.first_vertex(end)))
            yield EdgesOfPart(
                source=endpoints[0],
                target=endpoints[1],
                weight=weights.rows(part, row)[:, 0] if columns.weight else None,
                features=transforms.rows(part, row) if columns.features else None,
            )
            row += len(endpoints[0])
        if warns:
            weights.warn()
            transforms.warn()


def check_vertex_columns(table: InputTable, columns: VertexColumns) -> None:
    """Check that a table of vertices has all columns of its schema, once each.

    Args:
        table: The table.
        columns: Meaning of its columns.

    Raises:
        InputError: If it does not.
    """
    require_columns(table, [*filter(None, [columns.id])], "--id")
    check_labels(table, columns)
    require_features(table, columns.features, "--features")


def check_edge_columns(table: InputTable, columns: EdgeColumns) -> None:
    """Check that a table of edges has all columns of its schema, once each.

    Args:
        table: The table.
        columns: Meaning of its columns.

    Raises:
        InputError: If it does not.
    """
    require_columns(table, [columns.source], "--source")
    require_columns(table, [columns.target], "--target")
    require_columns(table, [*filter(None, [columns.weight])], "--weight")
    check_labels(table, columns)
    require_features(table, columns.features, "--edge-features")


def check_labels(table: InputTable, columns: TableColumns) -> None:
    """Check that a table has the columns of its labels and splits, once each.

    Args:
        table: The table.
        columns: Meaning of its columns.

    Raises:
        InputError: If it does not.
    """
    flag = "--edge-label" if isinstance(columns, EdgeColumns) else "--label"
    require_columns(table, columns.label, flag)
    names = {f if f in table.columns else f.rpartition(":")[0] for f in columns.features if isinstance(f, str)}
    for meaning, answers in (("label", columns.label), ("split", (columns.split,))):
        if leaked := [name for name in answers if name in names]:
            raise InputError(f"{table.place}: column '{leaked[0]}' is the {meaning}: leave it out of the features")
    require_columns(table, [*filter(None, [columns.split])], "--split")
    require_columns(table, [*filter(None, [columns.split_time])], "--split-time")


def require_features(table: InputTable, features: Sequence[str | Transform], flag: str) -> None:
    """Check that a table has the columns of some features, once each. Raises InputError if it does not.

    Args:
        table: The table.
        features: Requested columns, or fitted transforms.
        flag: Flag that names them, for errors.
    """
    names = [FeatureColumn.parse(f, table, flag).name if isinstance(f, str) else f.name for f in features]
    require_columns(table, names, flag)


def fitted_features(
    table: InputTable, columns: TableColumns, training: NDArray[np.bool_] | None = None
) -> tuple[Transform, ...]:
    """Return the transforms of a table's features, which are fitted unless they are already.

    Args:
        table: The table.
        columns: Meaning of its columns.
        training: Rows to fit on; None: all.
    """
    transforms = tuple(f for f in columns.features if not isinstance(f, str))
    if transforms:
        return transforms
    flag = "--features" if isinstance(columns, VertexColumns) else "--edge-features"
    return fit_transforms(
        table, [FeatureColumn.parse(f, table, flag) for f in columns.features if isinstance(f, str)], training
    )


def transforms_of(columns: TableColumns) -> list[Transform]:
    """Return the fitted features of some columns."""
    return [transform for transform in columns.features if not isinstance(transform, str)]


def weight_transform(name: str) -> NumberTransform:
    """Return the transform of a column of edge weights: one number, unchanged."""
    unchanged: dict[str, Any] = {"center": (0.0,), "scale": (1.0,), "fill": (0.0,), "flags_missing": False}
    return NumberTransform(name=name, kind="raw", reason="edge weight", **unchanged)
