"""Interpretation of the columns of vertex and edge tables: ids, features, labels, splits, weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data.checks.tensor_checks import (
    MASKS,
    DataWarning,
    Float32Rounding,
    cast,
    has_label,
    located,
    warn_whole_values,
)
from weft.data.io.graph_parts import EdgesOfPart, GraphParts
from weft.data.splits import SHARES, Masks, random_split, split_by_time
from weft.data.tables.table import (
    ID,
    NUMBER,
    TEXT,
    TIME,
    Column,
    InputTable,
    any_of_row,
    ids_of,
    matrix_of,
    odd_value,
    open_table,
    raise_at_first,
    require_columns,
)
from weft.data.vertex_names import Ids, NameCollector, NameIndex, Texts, VertexNames, concatenate_ids, id_text
from weft.utils.errors import InputError, check_word

SPLIT_WORDS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "": -1, "none": -1}
"""Number of the split that each word of a split column means; -1: none."""
SPLIT_WORDS |= {str(number): number for number in range(-1, 3)} | {f"{number}.0": number for number in range(-1, 3)}


MAX_SURE_CLASSES = 100
"""Number of different whole numbers in a column of floats from which a user has to confirm that they are classes."""


@dataclass(frozen=True, kw_only=True)
class ColumnRoles:
    """Meaning of the columns of a vertex table and an edge table."""

    id: str | None = None
    """Vertex column with the ids that edges refer to. None: row numbers from 0."""
    source: str = "source"
    """Edge column with the id of each edge's source."""
    target: str = "target"
    """Edge column with the id of each edge's target."""
    features: tuple[str, ...] = ()
    """Vertex columns with numbers, or lists of numbers of one length, to concatenate."""
    label: tuple[str, ...] = ()
    """Vertex column with classes or values, or one column of 0 and 1 for each class. Missing values: unlabelled."""
    label_kind: str = ""
    """'classes' or 'values', the meaning of a single label column; '': classes if all numbers are whole."""
    split: str | None = None
    """Vertex column with train, val or test; missing or empty: no split."""
    split_time: str | None = None
    """Vertex column with a time; the earliest vertices train, the latest test."""
    weight: str | None = None
    """Edge column with one number."""
    edge_features: tuple[str, ...] = ()
    """Edge columns with numbers, or lists of numbers of one length, to concatenate."""


def table_parts(
    vertices: Any,
    edges: Any,
    columns: ColumnRoles,
    *,
    name: str | None = None,
    undirected: bool = False,
    shares: Sequence[float] | None = None,
    seed: int = 0,
) -> GraphParts:
    """Return a graph from a vertex table and an edge table, or from an edge table alone.

    Without `vertices`, the vertices are the ids in the edges, in the order of their first occurrence.

    Args:
        vertices: The vertex table (see weft.data.tables.table.open_table), or None.
        edges: The edge table.
        columns: Meaning of the columns.
        name: Name of the graph. Default: the edge file's name.
        undirected: Add the reverse of each edge and merge duplicates.
        shares: Fractions of a random split or a split by time; labels without a split get 60, 20 and 20 %.
        seed: Seed of a random split.

    Raises:
        InputError: A table is wrong. The message names table, column, row and remedy.
    """
    edge_table = open_table(edges, "edges")
    require_columns(edge_table, [columns.source], "--source")
    require_columns(edge_table, [columns.target], "--target")
    require_columns(edge_table, [*filter(None, [columns.weight])], "--weight")
    require_columns(edge_table, columns.edge_features, "--edge-features")
    if vertices is None:
        refuse_vertex_columns(columns)
        index, names, num_vertices = named_by_edges(edge_table, columns)
        y, masks, x = None, Masks(), None
    else:
        table = open_table(vertices, "vertices")
        for flag in ("id", "features", "label", "split", "split_time"):
            requested = getattr(columns, flag)
            names_of_flag = (requested,) if isinstance(requested, str) else requested or ()
            require_columns(table, names_of_flag, "--" + flag.replace("_", "-"))
        index, names, num_vertices = named_by_vertices(table, columns.id)
        y = read_label(table, columns.label, columns.label_kind)
        masks = read_masks(table, columns, y, num_vertices, shares, seed)
        x = feature_reader(table, columns.features)
    stem = Path(edge_table.place).name.split(".")[0] if isinstance(edges, str | Path) else "graph"
    return GraphParts(
        name=stem if name is None else name,
        edges=lambda: read_edges(edge_table, columns, index, num_vertices),
        num_vertices=num_vertices,
        x=x,
        y=y,
        masks=masks,
        vertex_names=names,
        undirected=undirected,
    )


def refuse_vertex_columns(columns: ColumnRoles) -> None:
    """Raise InputError if a vertex column is requested although there is no vertex table."""
    for flag in ("id", "features", "label", "split", "split_time"):
        if getattr(columns, flag):
            raise InputError(f"--{flag.replace('_', '-')} names a column of vertices: give --vertices, their table")


def named_by_edges(table: InputTable, columns: ColumnRoles) -> tuple[NameIndex | None, VertexNames | None, int]:
    """Collect the distinct vertex ids in an edge table: return an index from id to vertex, the names and the count.

    Args:
        table: The edge table.
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
    return NameIndex(ids, f"{table.place}: id"), VertexNames.of(ids, "id"), len(ids)


def interleaved(left: Ids, right: Ids) -> Ids:
    """Return two columns of ids alternately: first of `left`, first of `right`, second of `left`, and so on.

    Args:
        left: Ids.
        right: As many ids.
    """
    both = concatenate_ids([left, right])
    order = np.arange(len(both)).reshape(2, -1).T.reshape(-1)
    return both.take(order) if isinstance(both, Texts) else both[order]


def named_by_vertices(table: InputTable, column: str | None) -> tuple[NameIndex | None, VertexNames | None, int]:
    """Return an index of the ids of a vertex table, the ids as names, and the number of rows.

    Args:
        table: The vertex table.
        column: Column of the ids; None: vertices are row numbers, and there is no index and no name.

    Raises:
        InputError: If an id is missing or occurs twice.
    """
    if column is None:
        any_column = table.columns[0]
        return None, None, sum(len(part[any_column].missing) for part in table.parts({any_column: TIME}))
    place, row, parts = f"{table.place}: column '{column}'", 0, []
    for part in table.parts({column: ID}):
        parts.append(ids_of(part[column], place, row))
        row += len(parts[-1])
    if len({isinstance(part, Texts) for part in parts}) > 1:
        raise InputError(f"{place}: contains numbers and texts: give all as text")
    ids = concatenate_ids(parts)
    return NameIndex(ids, place), VertexNames.of(ids, column), len(ids)


def read_edges(
    table: InputTable, columns: ColumnRoles, index: NameIndex | None, num_vertices: int
) -> Iterator[EdgesOfPart]:
    """Yield the edges between vertex numbers in parts.

    Args:
        table: The edge table.
        columns: Meaning of its columns.
        index: Index of the vertices' ids; None: ids are row numbers.
        num_vertices: Number of vertices.

    Raises:
        InputError: At the first id that no vertex has.
    """
    kinds = {columns.source: ID, columns.target: ID}
    kinds |= dict.fromkeys([*filter(None, [columns.weight]), *columns.edge_features], NUMBER)
    row, rounding = 0, Float32Rounding()
    for part in table.parts(kinds):
        endpoints = []
        for column in (columns.source, columns.target):
            place = f"{table.place}: column '{column}'"
            ids = ids_of(part[column], place, row)
            if index is None:
                if isinstance(ids, Texts):
                    raise InputError(f"{place}: contains texts, but no --id is given: name the vertices' column of ids")
                vertices = np.where((ids >= 0) & (ids < num_vertices), ids, -1)
            else:
                vertices = index.find(ids)
            if (vertices < 0).any():
                unknown_id = int((vertices < 0).argmax())
                raise InputError(
                    f"{place}, row {row + unknown_id}: {id_text(ids, unknown_id)} is no vertex's id: give it a row in "
                    "the table of vertices, or leave its edges out"
                )
            endpoints.append(torch.from_numpy(vertices))
        weight = None
        if columns.weight:
            weights = matrix_of(part[columns.weight], f"{table.place}: column '{columns.weight}'", row, rounding)
            if weights.shape[1] != 1:
                raise InputError(f"{table.place}: column '{columns.weight}' contains lists: a weight is one number")
            weight = torch.from_numpy(weights)[:, 0]
        features = side_by_side(table, columns.edge_features, part, row, rounding)
        yield EdgesOfPart(source=endpoints[0], target=endpoints[1], weight=weight, features=features)
        row += len(endpoints[0])
    rounding.warn()


def feature_reader(table: InputTable, names: Sequence[str]) -> Callable[[], Iterator[Tensor]] | None:
    """Return a function that yields columns of numbers as rows, in parts; None for no columns.

    Args:
        table: The table.
        names: Names of the columns.
    """

    def read() -> Iterator[Tensor]:
        row, rounding = 0, Float32Rounding()
        for part in table.parts(dict.fromkeys(names, NUMBER)):
            rows = side_by_side(table, names, part, row, rounding)
            assert rows is not None
            yield rows
            row += len(rows)
        rounding.warn()

    return read if names else None


def side_by_side(
    table: InputTable, names: Sequence[str], part: dict[str, Column], first_row: int, rounding: Float32Rounding
) -> Tensor | None:
    """Return columns of numbers as one matrix, float32 [n, F]; None for no columns.

    Args:
        table: The table, for errors.
        names: Names of the columns.
        part: Some rows of the columns.
        first_row: Number of the first row, for errors.
        rounding: Counts the numbers that become equal.
    """
    matrices = [matrix_of(part[name], f"{table.place}: column '{name}'", first_row, rounding) for name in names]
    return torch.from_numpy(np.concatenate(matrices, 1)) if matrices else None


def read_label(table: InputTable, names: Sequence[str], kind: str = "") -> Tensor | None:
    """Return labels as in GraphFields; None for no columns.

    Args:
        table: The vertex table.
        names: Names of the columns.
        kind: 'classes' or 'values', the meaning of a single column; '': unknown.

    Raises:
        InputError: If the kind is unknown, or has no effect.
    """
    if kind:
        check_word("--label-kind", kind, ("classes", "values"))
        if len(names) != 1:
            raise InputError(f"--label-kind {kind} needs one column of --label, not {len(names)}: leave it out")
    if not names:
        return None
    label_parts: list[NDArray[np.float64]] = []
    row, integral = 0, True
    for part in table.parts(dict.fromkeys(names, NUMBER)):
        label_parts.append(np.concatenate([label_part(part[name], table, name, row) for name in names], 1))
        row += len(label_parts[-1])
        integral &= all(getattr(part[name].values, "dtype", np.dtype("f8")).kind in "biu" for name in names)
    rows = np.concatenate([np.empty((0, len(names))), *label_parts])
    place = f"{table.place}: column '{names[0]}'"
    with located(place):
        y = labels_of(rows, kind)
    if y.dtype == torch.int64 and not kind and not integral and (count := len(y.unique())) > MAX_SURE_CLASSES:
        warnings.warn(
            f"{place} contains {count} different whole numbers, which are read as classes: confirm it by --label-kind "
            "classes, or give --label-kind values for a regression (label_kind in Python)",
            DataWarning,
            stacklevel=4,
        )
    return y


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
    columns: ColumnRoles,
    y: Tensor | None,
    num_vertices: int,
    shares: Sequence[float] | None,
    seed: int,
) -> Masks:
    """Return the split of a column, or a split by time, or a random split of the labelled vertices.

    Args:
        table: The vertex table.
        columns: Meaning of its columns.
        y: Labels, or None.
        num_vertices: Number of vertices.
        shares: Fractions of the split, or None.
        seed: Seed of a random split.

    Raises:
        InputError: If several kinds of splits are requested.
    """
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
