"""`weft data schema`: drafts the schema file of some tables, for a person to edit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from weft.data.tables.table import ANY, ID, ColumnPart, InputTable, ids_of, open_table
from weft.data.tables.transforms import categories_of
from weft.data.vertex_names import NameCollector, NameIndex, Texts, concatenate_ids, is_number
from weft.utils.errors import InputError

MAX_LABELS = 20
"""Largest number of different values of a column that the draft suggests as a label."""
MAX_DUPLICATES = 0.01
"""Largest share of the rows of a key that repeat an id: a person has to correct these."""
MIN_REFERRED = 0.1
"""Smallest share of the ids to which a column of numbers with another name refers. An age is no id of a user."""


@dataclass(frozen=True, kw_only=True)
class TableKey:
    """Column whose ids seem to identify the rows of a table."""

    column: str
    """Name of the column."""
    index: NameIndex
    """Look-up of the ids."""
    num_ids: int
    """Number of different ids."""
    is_text: bool
    """True if the ids are text."""
    num_duplicates: int
    """Number of rows whose id an earlier row has."""


@dataclass
class DraftTable:
    """A table with what its columns seem to mean."""

    name: str
    """Name of the table: its file's name."""
    path: Path
    """The file."""
    table: InputTable
    """Contents of the file."""
    key: TableKey | None = None
    """Column that identifies the rows; None: no column does."""
    references: dict[str, str] = field(default_factory=dict)
    """Name of the table whose key each column refers to, by column."""


def draft_schema(paths: Sequence[str | Path], folder: Path) -> str:
    """Return the draft of a schema file: keys and references are recognised, every other column becomes a feature.

    A key is the first column of ids to which another table refers, or else the first one without duplicates. A column
    refers to a key if its values occur there, and it has the key's name or one of the two is text; numbers must then
    refer to many of the ids. A table with two references or more is one of edges, from the first to each other one.

    Args:
        paths: Files or folders of tables.
        folder: Folder of the schema file, to which the paths in it are relative.

    Raises:
        InputError: If a table cannot be read, two have the same name, or none refers to others.
    """
    tables = [
        DraftTable(
            name=name_of(Path(path)), path=Path(os.path.relpath(path, folder)), table=open_table(path, str(path))
        )
        for path in paths
    ]
    if len({table.name for table in tables}) < len(tables):
        raise InputError("two tables have the same file name: rename one, since it names the vertices")
    for table in tables:
        table.key = find_key(table, [other for other in tables if other is not table])
    for table in tables:
        for column in table.table.columns:
            for other in tables:
                if other is not table and column not in table.references and refers(table, column, other.key):
                    table.references[column] = other.name
    edges = [table for table in tables if len(table.references) > 1]
    if not edges:
        raise InputError(
            "no table refers to two keys of others, so none contains edges: give each table of vertices a column of "
            "ids, and the table of edges columns with the same ids"
        )
    lines = [
        "# A draft: check it, and import it with: weft data import FILE --out FOLDER",
        '# To learn a label, say where it is, take it out of the features, and write here: predict = "NAME"',
    ]
    for table in tables:
        if table not in edges:
            lines += ["", f"[vertices.{table.name}]", f"table = {quoted(table.path)}"]
            lines += key_lines(table)
            lines += features(table, id_columns(table))
            lines += [f"# label = {quoted(name)}" for name in possible_labels(table)]
    for table in edges:
        columns = list(table.references)
        for number, target in enumerate(columns[1:]):
            name = table.name if len(columns) == 2 else f"{table.name}_{table.references[target]}"
            lines += ["", f"[edges.{name}]", f"table = {quoted(table.path)}"]
            for end, column in (("source", columns[0]), ("target", target)):
                lines += [f"{end} = {quoted(f'{table.references[column]}.{column}')}"]
            lines += [] if number else features(table, id_columns(table))
            lines += [] if number else [f"# label = {quoted(label)}" for label in possible_labels(table)]
    return "\n".join(lines) + "\n"


def name_of(path: Path) -> str:
    """Return the name of a table's vertices or edges, from its file's name, that TOML can have without quotes."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", path.name.split(".")[0]).strip("_") or "table"


def find_key(table: DraftTable, others: Sequence[DraftTable]) -> TableKey | None:
    """Return the first column of ids to which another table refers, or else the first one without duplicates.

    Args:
        table: The table.
        others: The other tables.
    """
    unique = None
    for key in filter(None, (possible_key(table, column) for column in table.table.columns)):
        if any(refers(other, column, key) for other in others for column in other.table.columns):
            return key
        if unique is None and not key.num_duplicates:
            unique = key
    return unique


def possible_key(table: DraftTable, column: str) -> TableKey | None:
    """Return a column of ids, whole numbers or texts, few of which occur twice; None if it is another column.

    Args:
        table: The table.
        column: The column.
    """
    collector, num_rows = NameCollector(), 0
    try:
        for part in table.table.parts({column: ID}):
            collector.add(ids_of(part[column], column, num_rows))
            num_rows += len(part[column].missing)
            if num_rows - collector.count > max(1, MAX_DUPLICATES * num_rows):
                return None
    except InputError:  # a missing value, or no ids
        return None
    if not num_rows:
        return None
    ids = collector.ids()
    return TableKey(
        column=column,
        index=NameIndex(ids, column),
        num_ids=collector.count,
        is_text=isinstance(ids, Texts),
        num_duplicates=num_rows - collector.count,
    )


def refers(table: DraftTable, column: str, key: TableKey | None) -> bool:
    """Return whether a column seems to refer to a key of another table, judged by its first rows.

    Args:
        table: The table.
        column: The column.
        key: The key of the other table, or None.
    """
    if key is None or not (key.is_text or column == key.column or contains_text(table, column)):
        return False
    try:
        ids = ids_of(next(iter(table.table.parts({column: ID})))[column], column, 0)
        positions = key.index.find(ids)
    except (InputError, StopIteration):  # no ids, or no rows
        return False
    are_numbers = not isinstance(ids, Texts) or all(map(is_number, ids.tolist()))
    num_referred = len(np.unique(positions))
    is_id = column == key.column or not are_numbers or num_referred >= MIN_REFERRED * min(len(ids), key.num_ids)
    return is_id and bool((positions >= 0).all())


def contains_text(table: DraftTable, column: str) -> bool:
    """Return whether the first rows of a column are text, other than numbers in a file without types.

    Args:
        table: The table.
        column: The column.
    """
    part = next(iter(table.table.parts({column: ANY})), None)
    return part is not None and isinstance(part[column].values, Texts)


def key_lines(table: DraftTable) -> list[str]:
    """Return the line with the key of a table, and before it a comment if an id occurs twice; none without a key."""
    if table.key is None:
        return []
    lines, column = [f"id = {quoted(table.key.column)}"], table.key.column
    if table.key.num_duplicates:
        ids = concatenate_ids([ids_of(part[column], column, 0) for part in table.table.parts({column: ID})])
        try:
            NameIndex(ids, column)
        except InputError as error:
            lines.insert(0, f"# Correct the table first: {error}")
    return lines


def id_columns(table: DraftTable) -> set[str]:
    """Return the columns of ids of a table: its key and its references."""
    return {*table.references, *([table.key.column] if table.key else [])}


def features(table: DraftTable, excluded: set[str]) -> list[str]:
    """Return the line with the columns of a table that are no ids and not empty; none if there are no such columns.

    Args:
        table: The table.
        excluded: Columns of ids.
    """
    part = next(iter(table.table.parts(dict.fromkeys(table.table.columns, ANY))), {})
    names = [quoted(name) for name, column in part.items() if name not in excluded and not column.missing.all()]
    return [f"features = [{', '.join(names)}]"] if names else []


def possible_labels(table: DraftTable) -> list[str]:
    """Return the columns with a few different values in the first rows, which could be labels."""
    names = [name for name in table.table.columns if name not in id_columns(table)]
    part = next(iter(table.table.parts(dict.fromkeys(names, ANY))), {}) if names else {}
    labels = []
    for name, column in part.items():
        try:
            texts, missing = categories_of(ColumnPart(column, name, 0))
        except InputError:  # fractions or lists
            continue
        values = set(texts.take((~missing).nonzero()[0]).tolist())
        labels += [name] if 1 < len(values) <= MAX_LABELS else []
    return labels


def quoted(value: object) -> str:
    """Return a value as a text in a TOML file."""
    return json.dumps(str(value), ensure_ascii=False)
