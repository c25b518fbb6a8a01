"""`weft data schema`: drafts the schema file of some tables, for a person to edit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weft.data.tables.table import ANY, ID, ColumnPart, InputTable, ids_of, open_table
from weft.data.tables.transforms import categories_of
from weft.data.vertex_names import NameCollector, NameIndex, Texts
from weft.utils.errors import InputError

MAX_LABELS = 20
"""Largest number of different values of a column that the draft suggests as a label."""


@dataclass
class DraftTable:
    """A table with what its columns seem to mean."""

    name: str
    """Name of the table: its file's name."""
    path: Path
    """The file."""
    table: InputTable
    """Contents of the file."""
    key: str | None = None
    """Column that identifies the rows; None: no column does."""
    index: NameIndex | None = None
    """Look-up of the ids in `key`."""
    is_text: bool = False
    """True if the ids in `key` are text."""
    references: dict[str, str] = field(default_factory=dict)
    """Name of the table whose key each column refers to, by column."""


def draft_schema(paths: Sequence[str | Path], folder: Path) -> str:
    """Return the draft of a schema file: keys and references are recognised, every other column becomes a feature.

    A key is the first column of ids without duplicates. A column refers to it if its values occur there, and, for
    numbers, if it has its name. A table with two references or more is one of edges, from the first to each other one.

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
        find_key(table)
    for table in tables:
        for column in table.table.columns:
            for other in tables:
                if other is not table and column not in table.references and refers(table, column, other):
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
            lines += [f"id = {quoted(table.key)}"] if table.key else []
            lines += features(table, {table.key})
            lines += [f"# label = {quoted(name)}" for name in possible_labels(table)]
    for table in edges:
        columns = list(table.references)
        for number, target in enumerate(columns[1:]):
            name = table.name if len(columns) == 2 else f"{table.name}_{table.references[target]}"
            lines += ["", f"[edges.{name}]", f"table = {quoted(table.path)}"]
            for end, column in (("source", columns[0]), ("target", target)):
                lines += [f"{end} = {quoted(f'{table.references[column]}.{column}')}"]
            lines += [] if number else features(table, {table.key, *columns})
            lines += [] if number else [f"# label = {quoted(label)}" for label in possible_labels(table)]
    return "\n".join(lines) + "\n"


def name_of(path: Path) -> str:
    """Return the name of a table's vertices or edges, from its file's name, that TOML can have without quotes."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", path.name.split(".")[0]).strip("_") or "table"


def find_key(table: DraftTable) -> None:
    """Find the first column of ids, whole numbers or texts, without duplicates."""
    for column in table.table.columns:
        collector, row = NameCollector(), 0
        try:
            for part in table.table.parts({column: ID}):
                collector.add(ids_of(part[column], column, row))
                row += len(part[column].missing)
                if collector.count < row:
                    break
        except InputError:  # a missing value, or no ids
            continue
        if row and collector.count == row:
            ids = collector.ids()
            table.key, table.index, table.is_text = column, NameIndex(ids, column), isinstance(ids, Texts)
            return


def refers(table: DraftTable, column: str, other: DraftTable) -> bool:
    """Return whether a column seems to refer to the key of another table, judged by its first rows.

    Args:
        table: The table.
        column: The column.
        other: The other table.
    """
    if other.index is None or not (other.is_text or column == other.key):
        return False
    try:
        part = next(iter(table.table.parts({column: ID})), None)
        return part is not None and bool((other.index.find(ids_of(part[column], column, 0)) >= 0).all())
    except InputError:
        return False


def features(table: DraftTable, excluded: set[str | None]) -> list[str]:
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
    names = [name for name in table.table.columns if name != table.key and name not in table.references]
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
