"""What the columns of a table of vertices and a table of edges mean: ids, features, labels, splits, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    open_table,
    raise_at_first,
    require_columns,
)
from weft.data.tensor_checks import MASKS, has_label
from weft.data.vertex_names import Ids, NameCollector, NameIndex, Texts, VertexNames, concatenate_ids
from weft.utils.errors import InputError

SPLIT_WORDS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "": -1, "none": -1}
SPLIT_WORDS |= {str(number): number for number in range(-1, 3)} | {f"{number}.0": number for number in range(-1, 3)}

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ColumnRoles:
    """Which columns of the two tables mean what."""

    id: str | None = None
    """Of the vertices: what the edges call them. None: their row, from 0 on."""
    source: str = "source"
    """Of the edges: the id that each leaves."""
    target: str = "target"
    """Of the edges: the id that each enters."""
    features: tuple[str, ...] = ()
    """Of the vertices: numbers, or lists of numbers of one length, side by side."""
    label: tuple[str, ...] = ()
    """Of the vertices: one column of classes or values, or one of 0 and 1 for each class. Missing: unlabelled."""
    split: str | None = None
    """Of the vertices: train, val or test; missing or empty: none of them."""
    split_time: str | None = None
    """Of the vertices: the earliest train, the latest test."""
    weight: str | None = None
    """Of the edges: one number."""
    edge_features: tuple[str, ...] = ()
    """Of the edges: as `features`."""


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
    """A graph of two tables (see weft.data.tables.table.open_table), or of `edges` alone.

    Without `vertices` they are the ids in the edges, in the order in which they first appear. `shares`: of a split into
    train, val and test that is drawn by `seed`, or by time; labels without a split get one of 60, 20 and 20 %.

    Raises InputError that names table, column and row, and what helps.
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
            asked = getattr(columns, flag)
            given = (asked,) if isinstance(asked, str) else asked or ()
            require_columns(table, given, "--" + flag.replace("_", "-"))
        index, names, num_vertices = named_by_vertices(table, columns.id)
        y = read_label(table, columns.label)
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
    """InputError for a column of vertices where there is no table of them."""
    for flag in ("id", "features", "label", "split", "split_time"):
        if getattr(columns, flag):
            raise InputError(f"--{flag.replace('_', '-')} names a column of vertices: give their table, --vertices")


def named_by_edges(table: InputTable, columns: ColumnRoles) -> tuple[NameIndex | None, VertexNames | None, int]:
    """The ids that edges have, and how many."""
    found, row = NameCollector(), 0
    for part in table.parts({columns.source: ID, columns.target: ID}):
        ends = [ids_of(part[end], f"{table.place}: column '{end}'", row) for end in (columns.source, columns.target)]
        found.add(interleaved(ends[0], ends[1]))
        row += len(part[columns.source].missing)
    ids = found.ids()
    return NameIndex(ids, f"{table.place}: id"), VertexNames.of(ids, "id"), len(ids)


def interleaved(left: Ids, right: Ids) -> Ids:
    """One of these, one of those, and so on."""
    both = concatenate_ids([left, right])
    places = np.arange(len(both)).reshape(2, -1).T.reshape(-1)
    return both.take(places) if isinstance(both, Texts) else both[places]


def named_by_vertices(table: InputTable, column: str | None) -> tuple[NameIndex | None, VertexNames | None, int]:
    """The ids of a table of vertices, and how many rows it has; no ids where rows are counted."""
    if column is None:
        some = table.columns[0]
        return None, None, sum(len(part[some].missing) for part in table.parts({some: TIME}))
    place, row, parts = f"{table.place}: column '{column}'", 0, []
    for part in table.parts({column: ID}):
        parts.append(ids_of(part[column], place, row))
        row += len(parts[-1])
    if len({isinstance(part, Texts) for part in parts}) > 1:
        raise InputError(f"{place}: holds numbers and texts: give all as text")
    ids = concatenate_ids(parts)
    return NameIndex(ids, place), VertexNames.of(ids, column), len(ids)


def read_edges(
    table: InputTable, columns: ColumnRoles, index: NameIndex | None, num_vertices: int
) -> Iterator[EdgesOfPart]:
    """The edges between vertices by number. InputError at the first id that no vertex has."""
    kinds = {columns.source: ID, columns.target: ID}
    kinds |= dict.fromkeys([*filter(None, [columns.weight]), *columns.edge_features], NUMBER)
    row = 0
    for part in table.parts(kinds):
        ends = []
        for end in (columns.source, columns.target):
            place = f"{table.place}: column '{end}'"
            ids = ids_of(part[end], place, row)
            if index is None:
                if isinstance(ids, Texts):
                    raise InputError(f"{place}: holds texts, and no --id names the vertices' column of them: give it")
                found = np.where((ids >= 0) & (ids < num_vertices), ids, -1)
            else:
                found = index.find(ids)
            if (found < 0).any():
                unknown_id = int((found < 0).argmax())
                raise InputError(
                    f"{place}, row {row + unknown_id}: {id_text(ids, unknown_id)} is no vertex's id: give it a row in "
                    "the table of vertices, or leave its edges out"
                )
            ends.append(torch.from_numpy(found))
        weight = None
        if columns.weight:
            weights = matrix_of(part[columns.weight], f"{table.place}: column '{columns.weight}'", row)
            if weights.shape[1] != 1:
                raise InputError(f"{table.place}: column '{columns.weight}' holds lists: a weight is one number")
            weight = torch.from_numpy(weights)[:, 0]
        features = side_by_side(table, columns.edge_features, part, row)
        yield EdgesOfPart(source=ends[0], target=ends[1], weight=weight, features=features)
        row += len(ends[0])


def feature_reader(table: InputTable, names: Sequence[str]) -> Callable[[], Iterator[Tensor]] | None:
    """What reads columns of numbers as rows; None for no columns."""

    def read() -> Iterator[Tensor]:
        row = 0
        for part in table.parts(dict.fromkeys(names, NUMBER)):
            rows = side_by_side(table, names, part, row)
            assert rows is not None
            yield rows
            row += len(rows)

    return read if names else None


def side_by_side(table: InputTable, names: Sequence[str], part: dict[str, Column], first_row: int) -> Tensor | None:
    """Columns of numbers as one matrix, float32 [n, F]; None for no columns."""
    found = [matrix_of(part[name], f"{table.place}: column '{name}'", first_row) for name in names]
    return torch.from_numpy(np.concatenate(found, 1)) if found else None


def read_label(table: InputTable, names: Sequence[str]) -> Tensor | None:
    """Labels, as in GraphFields; None for no columns."""
    found: list[NDArray[np.float64]] = []
    row = 0
    for part in table.parts(dict.fromkeys(names, NUMBER)) if names else ():
        found.append(np.concatenate([label_part(part[name], table, name, row) for name in names], 1))
        row += len(found[-1])
    if not names:
        return None
    return labels_of(np.concatenate([np.empty((0, len(names))), *found]))


def label_part(column: Column, table: InputTable, name: str, first_row: int) -> NDArray[np.float64]:
    """Some rows of labels as float64 [n, C], NaN where there is none."""
    values, missing = column
    if isinstance(values, Texts) or values.dtype.kind not in "biuf":
        raise InputError(
            f"{table.place}: column '{name}', row {first_row}: is no number: number the classes from 0 on, as "
            "pandas.factorize(column)[0] does"
        )
    rows = values.reshape(len(values), -1).astype(np.float64)
    raise_at_first(any_of_row(np.isinf(rows)), f"{table.place}: column '{name}'", first_row, "is infinite: correct it")
    rows[missing] = np.nan
    return rows


def labels_of(rows: NDArray[np.float64]) -> Tensor:
    """Labels float64 [n, C], NaN where there is none; one column of whole numbers is of classes."""
    y = torch.from_numpy(rows)
    y = y[:, 0] if y.shape[1] == 1 else y
    known = ~y.isnan()
    if y.dim() == 1 and bool((y[known] == y[known].round()).all()):
        return torch.where(known, y, -1.0).long()
    return y.float()


def read_masks(
    table: InputTable,
    columns: ColumnRoles,
    y: Tensor | None,
    num_vertices: int,
    shares: Sequence[float] | None,
    seed: int,
) -> Masks:
    """The split that a column tells, or that is drawn or cut of the labelled vertices."""
    if columns.split and (shares is not None or columns.split_time):
        raise InputError(f"--split {columns.split} is a column: leave out the shares, and --split-time")
    if columns.split:
        return split_column(table, columns.split)
    labelled = torch.ones(num_vertices, dtype=torch.bool) if y is None else has_label(y)
    if columns.split_time:
        return split_by_time(read_time(table, columns.split_time), labelled, shares or SHARES)
    return Masks() if y is None and shares is None else random_split(labelled, seed, shares or SHARES)


def split_column(table: InputTable, name: str) -> Masks:
    """The masks that a column of words tells."""
    place, row, found = f"{table.place}: column '{name}'", 0, []
    for part in table.parts({name: TEXT}):
        values, missing = part[name]
        words = ["" if gone else str(one).lower() for one, gone in zip(values.tolist(), missing, strict=True)]
        for number, word in enumerate(words):
            if word not in SPLIT_WORDS:
                raise InputError(f"{place}, row {row + number}: '{word}' is not train, val, test, or nothing")
        found += [SPLIT_WORDS[word] for word in words]
        row += len(words)
    which = torch.tensor(found, dtype=torch.int64)
    return Masks(*(which == number for number in range(len(MASKS))))


def read_time(table: InputTable, name: str) -> Tensor:
    """A column of numbers or points in time, float64 [N]. InputError at the first row without one."""
    place, row, found = f"{table.place}: column '{name}'", 0, [np.empty(0)]
    for part in table.parts({name: TIME}):
        values, missing = part[name]
        if isinstance(values, Texts) or values.dtype.kind not in "iufM" or values.ndim != 1:
            raise InputError(f"{place}: is text: give numbers or points in time, as pandas.to_datetime makes them")
        raise_at_first(missing, place, row, "is missing: fill it in, or leave out --split-time")
        found.append(values.astype("datetime64[us]").astype(np.int64) if values.dtype.kind == "M" else values)
        row += len(values)
    return torch.from_numpy(np.concatenate(found).astype(np.float64))
