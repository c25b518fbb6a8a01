"""Interpretation of the columns of vertex and edge tables: ids, features, labels, splits, weights."""

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

from weft.data.checks.tensor_checks import (
    MASKS,
    cast,
    has_label,
    located,
    no_label,
    warn_whole_values,
)
from weft.data.io.graph_parts import EdgesOfPart, GraphParts
from weft.data.splits import SHARES, Masks, random_split, split_by_time
from weft.data.tables.fit_transforms import fit_transforms
from weft.data.tables.schema import EdgeColumns, Schema, VertexColumns
from weft.data.tables.table import (
    ID,
    LABEL,
    TEXT,
    TIME,
    Column,
    ColumnPart,
    InputTable,
    any_of_row,
    ids_of,
    odd_value,
    open_table,
    raise_at_first,
    require_columns,
)
from weft.data.tables.transforms import (
    FeatureColumn,
    FeatureReader,
    NumberTransform,
    RowsOfColumns,
    Transform,
    categories_of,
    require_texts,
)
from weft.data.vertex_names import (
    Ids,
    NameCollector,
    NameIndex,
    Texts,
    VertexNames,
    concatenate_ids,
    convert_ids_like,
    id_text,
)
from weft.data.vertex_types import put_rows
from weft.utils.errors import InputError, check_word

SPLIT_WORDS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "": -1, "none": -1}
"""Number of the split that each word of a split column means; -1: none."""
SPLIT_WORDS |= {str(number): number for number in range(-1, 3)} | {f"{number}.0": number for number in range(-1, 3)}


def table_parts(schema: Schema, *, name: str | None = None, undirected: bool = False, seed: int = 0) -> GraphParts:
    """Return the graph of some tables.

    Columns of all tables are checked, and transforms are fitted on the training vertices, before any edge is sorted.
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
    vertex_tables = {name: open_table(c.table, f"vertices {name}".strip()) for name, c in schema.vertices.items()}
    edge_tables = {name: open_table(c.table, f"edges {name}".strip()) for name, c in schema.edges.items()}
    for vertex_type, columns in schema.vertices.items():
        check_vertex_columns(vertex_tables[vertex_type], columns)
    for edge_columns, table in zip(schema.edges.values(), edge_tables.values(), strict=True):
        check_edge_columns(table, edge_columns)
    if schema.vertices:
        types = {n: TypeOfVertices.of(vertex_tables[n], columns) for n, columns in schema.vertices.items()}
    else:
        types = {"": TypeOfVertices.named_by_edges(edge_tables[""], schema.edges[""])}
    offsets = (0, *itertools.accumulate(vertices.count for vertices in types.values()))
    firsts = dict(zip(types, offsets, strict=False))
    y, masks, class_names = read_labels(schema, vertex_tables, types, seed)
    training = None if masks.train_mask is None or not masks.train_mask.any() else masks.train_mask.numpy()
    schema = replace(
        schema,
        vertices={
            n: replace(c, features=fitted_features(vertex_tables[n], c, training if n == schema.predict else None))
            for n, c in schema.vertices.items()
        },
        edges={n: replace(c, features=fitted_features(edge_tables[n], c)) for n, c in schema.edges.items()},
        class_names=class_names,
    )
    if schema.typed and y is not None:
        y, *moved = (
            None if rows is None else put_rows({firsts[schema.predict]: rows}, offsets[-1], fill)
            for rows, fill in [(y, no_label(y)), *((mask, 0) for mask in masks)]
        )
        masks = Masks(*moved)
    readers = {n: FeatureReader(vertex_tables[n], transforms_of(c)) for n, c in schema.vertices.items() if c.features}
    same_width = len(readers) == len(types) and len({reader.num_columns for reader in readers.values()}) == 1
    first_edges = next(iter(schema.edges.values())).table
    stem = Path(first_edges).name.split(".")[0] if isinstance(first_edges, str | Path) else "graph"
    return GraphParts(
        name=stem if name is None else name,
        edges=lambda: read_edges(schema, edge_tables, types, firsts),
        num_vertices=offsets[-1],
        x=(lambda: itertools.chain.from_iterable(read() for read in readers.values())) if same_width else None,
        features={} if same_width else readers,
        y=y,
        masks=masks,
        vertex_names=joined_names(types),
        vertex_types=tuple(types) if schema.typed else (),
        type_offsets=offsets if schema.typed else (),
        relations=tuple(schema.relation(n) for n in schema.edges) if schema.typed else (),
        schema=schema,
        undirected=undirected,
    )


def read_labels(
    schema: Schema, tables: Mapping[str, InputTable], types: Mapping[str, TypeOfVertices], seed: int
) -> tuple[Tensor | None, Masks, tuple[str, ...]]:
    """Return the labels and splits of the vertices to predict, and the names of the classes.

    Args:
        schema: Meaning of the columns.
        tables: Tables of vertices by type.
        types: Vertices by type.
        seed: Seed of a random split.
    """
    columns = schema.vertices.get(schema.predict)
    if columns is None or not (columns.label or columns.split or columns.split_time or columns.shares):
        return None, Masks(), schema.class_names
    table = tables[schema.predict]
    y, class_names = read_label(table, columns.label, columns.label_kind)
    return y, read_masks(table, columns, y, types[schema.predict].count, seed), class_names


def check_vertex_columns(table: InputTable, columns: VertexColumns) -> None:
    """Check that a table of vertices has all columns of its schema, once each.

    Args:
        table: The table.
        columns: Meaning of its columns.

    Raises:
        InputError: If it does not.
    """
    names = {"id": columns.id, "label": columns.label, "split": columns.split, "split-time": columns.split_time}
    for flag, requested in names.items():
        require_columns(table, (requested,) if isinstance(requested, str) else requested or (), f"--{flag}")
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
    require_features(table, columns.features, "--edge-features")


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
    table: InputTable, columns: VertexColumns | EdgeColumns, training: NDArray[np.bool_] | None = None
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


@dataclass(frozen=True, kw_only=True)
class TypeOfVertices:
    """Vertices of one type, numbered by the rows of their table."""

    count: int
    """Number of vertices."""
    index: NameIndex | None = None
    """Look-up of vertices by id; None: ids are row numbers."""
    ids: Ids | None = None
    """Id of each vertex; None: row numbers."""
    column: str = ""
    """Name of the ids."""

    @classmethod
    def of(cls, table: InputTable, columns: VertexColumns) -> TypeOfVertices:
        """Return the vertices of a table.

        Args:
            table: The table.
            columns: Meaning of its columns.

        Raises:
            InputError: If an id is missing or occurs twice.
        """
        if columns.id is None:
            any_column = table.columns[0]
            return cls(count=sum(len(part[any_column].missing) for part in table.parts({any_column: TIME})))
        place, row, parts = f"{table.place}: column '{columns.id}'", 0, []
        for part in table.parts({columns.id: ID}):
            parts.append(ids_of(part[columns.id], place, row))
            row += len(parts[-1])
        if len({isinstance(part, Texts) for part in parts}) > 1:
            raise InputError(f"{place}: contains numbers and texts: give all as text")
        ids = concatenate_ids(parts)
        return cls(count=len(ids), index=NameIndex(ids, place), ids=ids, column=columns.id)

    @classmethod
    def named_by_edges(cls, table: InputTable, columns: EdgeColumns) -> TypeOfVertices:
        """Return the distinct ids in a table of edges.

        Args:
            table: The table.
            columns: Meaning of its columns.
        """
        collector, row = NameCollector(), 0
        for part in table.parts({columns.source: ID, columns.target: ID}):
            endpoints = [
                ids_of(part[column], f"{table.place}: column '{column}'", row)
                for column in (columns.source, columns.target)
            ]
            collector.add(interleaved(endpoints[0], endpoints[1]))
            row += len(part[columns.source].missing)
        ids = collector.ids()
        return cls(count=len(ids), index=NameIndex(ids, f"{table.place}: id"), ids=ids, column="id")

    def find(self, ids: Ids, place: str, first_row: int) -> NDArray[np.int64]:
        """Return the vertices with some ids.

        Args:
            ids: The ids, [n].
            place: Table and column, for errors.
            first_row: Number of the first row, for errors.

        Raises:
            InputError: At the first id that no vertex has.
        """
        if self.index is not None:
            vertices = self.index.find(ids)
        elif isinstance(ids, Texts):
            raise InputError(f"{place}: contains texts, but no --id is given: name the vertices' column of ids")
        else:
            vertices = np.where((ids >= 0) & (ids < self.count), ids, -1)
        if (vertices < 0).any():
            unknown_id = int((vertices < 0).argmax())
            raise InputError(
                f"{place}, row {first_row + unknown_id}: {id_text(ids, unknown_id)} is no vertex's id: give it a row "
                "in the table of vertices, or leave its edges out"
            )
        return vertices


def joined_names(types: Mapping[str, TypeOfVertices]) -> VertexNames | None:
    """Return the ids of the vertices of all types, in order; None if they are row numbers in all types."""
    if all(vertices.ids is None for vertices in types.values()):
        return None
    ids = [np.arange(vertices.count) if vertices.ids is None else vertices.ids for vertices in types.values()]
    if any(isinstance(part, Texts) for part in ids):
        ids = [convert_ids_like(Texts.of([]), part) for part in ids]
    columns = {vertices.column for vertices in types.values()}
    return VertexNames.of(concatenate_ids(ids), columns.pop() if len(columns) == 1 else "id")


def interleaved(left: Ids, right: Ids) -> Ids:
    """Return two columns of ids alternately: first of `left`, first of `right`, second of `left`, and so on.

    Args:
        left: Ids.
        right: As many ids.
    """
    both = concatenate_ids([left, right])
    order = np.arange(len(both)).reshape(2, -1).T.reshape(-1)
    return both.take(order) if isinstance(both, Texts) else both[order]


def read_edges(
    schema: Schema,
    tables: Mapping[str, InputTable],
    types: Mapping[str, TypeOfVertices],
    firsts: Mapping[str, int],
) -> Iterator[EdgesOfPart]:
    """Yield the edges between vertex numbers in parts, one relation after the other.

    If only some relations have weights, other edges weigh 1; narrower edge features are filled up with zeros.

    Args:
        schema: Meaning of the columns, with fitted features.
        tables: Tables of edges by relation.
        types: Vertices by type.
        firsts: First vertex of each type.

    Raises:
        InputError: At the first id that no vertex has.
    """
    weighted = any(columns.weight for columns in schema.edges.values())
    width = max(sum(t.num_columns for t in transforms_of(columns)) for columns in schema.edges.values())
    for number, (name, columns) in enumerate(schema.edges.items()):
        table, transforms = tables[name], RowsOfColumns(tables[name], transforms_of(columns))
        weights = RowsOfColumns(table, [weight_transform(columns.weight)] if columns.weight else [])
        kinds = {columns.source: ID, columns.target: ID} | weights.read_as | transforms.read_as
        row = 0
        for part in table.parts(kinds):
            endpoints = []
            for column, end in ((columns.source, columns.source_type), (columns.target, columns.target_type)):
                place = f"{table.place}: column '{column}'"
                vertices = types[end].find(ids_of(part[column], place, row), place, row)
                endpoints.append(torch.from_numpy(vertices + firsts[end]))
            count = len(endpoints[0])
            weight = weights.rows(part, row)[:, 0] if columns.weight else torch.ones(count)
            features = torch.zeros(count, width)
            if columns.features:
                rows = transforms.rows(part, row)
                features[:, : rows.shape[1]] = rows
            yield EdgesOfPart(
                source=endpoints[0],
                target=endpoints[1],
                weight=weight if weighted else None,
                features=features if width else None,
                relation=torch.full((count,), number, dtype=torch.int16) if schema.typed else None,
            )
            row += count
        weights.warn()
        transforms.warn()


def transforms_of(columns: VertexColumns | EdgeColumns) -> list[Transform]:
    """Return the fitted features of some columns."""
    return [transform for transform in columns.features if not isinstance(transform, str)]


def weight_transform(name: str) -> NumberTransform:
    """Return the transform of a column of edge weights: one number, unchanged."""
    unchanged: dict[str, Any] = {"center": (0.0,), "scale": (1.0,), "fill": (0.0,), "flags_missing": False}
    return NumberTransform(name=name, kind="raw", reason="edge weight", **unchanged)


def read_label(table: InputTable, names: Sequence[str], kind: str = "") -> tuple[Tensor | None, tuple[str, ...]]:
    """Return labels as in GraphFields, None for no columns, and the names of the classes, () if they are numbers.

    Args:
        table: The vertex table.
        names: Names of the columns.
        kind: 'classes' or 'values', the meaning of a single column of numbers; '': its type decides.

    Raises:
        InputError: If the kind is unknown, or has no effect; or if it is needed, because all floats are whole numbers.
    """
    if kind:
        check_word("--label-kind", kind, ("classes", "values"))
        if len(names) != 1:
            raise InputError(f"--label-kind {kind} needs one column of --label, not {len(names)}: leave it out")
    if not names:
        return None, ()
    place = f"{table.place}: column '{names[0]}'"
    if len(names) == 1 and (texts := read_texts(table, names[0])) is not None:
        if kind == "values":
            raise InputError(f"{place}: contains text: leave out --label-kind values, or turn the column into numbers")
        return texts
    label_parts: list[NDArray[np.float64]] = []
    row, integral = 0, True
    for part in table.parts(dict.fromkeys(names, LABEL)):
        label_parts.append(np.concatenate([label_part(part[name], table, name, row) for name in names], 1))
        row += len(label_parts[-1])
        integral &= all(getattr(part[name].values, "dtype", np.dtype("f8")).kind in "biu" for name in names)
    rows = np.concatenate([np.empty((0, len(names))), *label_parts])
    with located(place):
        y = labels_of(rows, kind)
    if y.dtype == torch.int64 and not kind and not integral and (y >= 0).any():
        raise InputError(
            f"{place}: contains whole numbers as floats, so it could be classes or values: say --label-kind classes, "
            "or --label-kind values for a regression (label_kind in Python)"
        )
    return y, ()


def read_texts(table: InputTable, name: str) -> tuple[Tensor, tuple[str, ...]] | None:
    """Return the class of each row of a column of texts, -1 if missing or empty, and the sorted names of the classes.

    Args:
        table: The table.
        name: Name of the column.

    Returns:
        None if the column contains no text.
    """
    collector, row, parts = NameCollector(), 0, []
    for part in table.parts({name: LABEL}):
        if not isinstance(part[name].values, Texts) and not part[name].missing.all():
            return None
        texts, missing = categories_of(ColumnPart(part[name], f"{table.place}: column '{name}'", row))
        row += len(missing)
        collector.add(texts.take(np.flatnonzero(~missing)))
        parts.append(texts)
    if not collector.count:
        return None
    names = sorted(collector.ids().tolist())
    require_texts(names, f"{table.place}: column '{name}'")
    index = NameIndex(Texts.of(names), name)
    return torch.from_numpy(np.concatenate([index.find(texts) for texts in parts])), tuple(names)


def label_part(column: Column, table: InputTable, name: str, first_row: int) -> NDArray[np.float64]:
    """Return some rows of labels as float64 [n, C], NaN if unlabelled.

    Args:
        column: Some rows of a column.
        table: The table, for errors.
        name: Name of the column, for errors.
        first_row: Number of the first row, for errors.

    Raises:
        InputError: If they are no finite numbers.
    """
    values, missing = column
    if isinstance(values, Texts) or values.dtype.kind not in "biuf":
        row, text = odd_value(column)
        raise InputError(
            f"{table.place}: column '{name}', row {first_row + row}: {text} is no number: give class numbers from 0, "
            "such as pandas.factorize(column)[0]"
        )
    rows = values.reshape(len(values), -1).astype(np.float64)
    raise_at_first(any_of_row(np.isinf(rows)), f"{table.place}: column '{name}'", first_row, "is infinite: correct it")
    rows[missing] = np.nan
    return rows


def labels_of(rows: NDArray[np.float64], kind: str = "") -> Tensor:
    """Return labels in the form of GraphFields from float64 [n, C] with NaN for none.

    Args:
        rows: The labels.
        kind: 'classes' or 'values', the meaning of one column; '': one column of whole numbers contains classes.

    Raises:
        InputError: If classes are requested, and a number has a fraction.
    """
    y = torch.from_numpy(rows)
    y = y[:, 0] if y.shape[1] == 1 else y
    fraction = ~y.isnan() & (y != y.round())
    if kind == "classes" and fraction.any():
        raise_at_first(fraction.numpy(), "labels", 0, "has a fraction: leave out --label-kind classes, or correct it")
    if y.dim() == 1 and kind != "values" and not fraction.any():
        return torch.where(y.isnan(), -1.0, y).long()
    if not kind:
        warn_whole_values(y)
    return cast("y", y, torch.float32)


def read_masks(
    table: InputTable,
    columns: VertexColumns,
    y: Tensor | None,
    num_vertices: int,
    seed: int,
) -> Masks:
    """Return the split of a column, or a split by time, or a random split of the labelled vertices.

    Args:
        table: The vertex table.
        columns: Meaning of its columns.
        y: Labels, or None.
        num_vertices: Number of vertices.
        seed: Seed of a random split.

    Raises:
        InputError: If several kinds of splits are requested.
    """
    shares = columns.shares
    if columns.split and (shares is not None or columns.split_time):
        raise InputError(f"--split {columns.split} is a column: leave out --split-time, and fractions of a split")
    if columns.split:
        return split_column(table, columns.split)
    labelled = torch.ones(num_vertices, dtype=torch.bool) if y is None else has_label(y)
    if columns.split_time:
        return split_by_time(read_time(table, columns.split_time), labelled, shares or SHARES)
    return Masks() if y is None and shares is None else random_split(labelled, seed, shares or SHARES)


def split_column(table: InputTable, name: str) -> Masks:
    """Return the split of a column of words.

    Args:
        table: The table.
        name: Name of the column.

    Raises:
        InputError: At the first word that means no split.
    """
    place, row, splits = f"{table.place}: column '{name}'", 0, []
    for part in table.parts({name: TEXT}):
        values, missing = part[name]
        words = ["" if absent else str(value).lower() for value, absent in zip(values.tolist(), missing, strict=True)]
        for number, word in enumerate(words):
            if word not in SPLIT_WORDS:
                raise InputError(f"{place}, row {row + number}: '{word}' is not train, val, test, or nothing")
        splits += [SPLIT_WORDS[word] for word in words]
        row += len(words)
    split_of_vertex = torch.tensor(splits, dtype=torch.int64)
    return Masks(*(split_of_vertex == number for number in range(len(MASKS))))


def read_time(table: InputTable, name: str) -> Tensor:
    """Return a column of numbers or points in time, float64 [N].

    Args:
        table: The table.
        name: Name of the column.

    Raises:
        InputError: At the first row without a value.
    """
    place, row, parts = f"{table.place}: column '{name}'", 0, [np.empty(0)]
    for part in table.parts({name: TIME}):
        values, missing = part[name]
        if isinstance(values, Texts) or values.dtype.kind not in "iufM" or values.ndim != 1:
            raise InputError(f"{place}: is text: give numbers or points in time, as pandas.to_datetime makes them")
        raise_at_first(missing, place, row, "is missing: fill it in, or leave out --split-time")
        parts.append(values.astype("datetime64[us]").astype(np.int64) if values.dtype.kind == "M" else values)
        row += len(values)
    return torch.from_numpy(np.concatenate(parts).astype(np.float64))
