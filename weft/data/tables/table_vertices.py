"""Vertices of tables: their numbers, and look-up by the ids in a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.data.tables.schema import EdgeColumns, VertexColumns
from weft.data.tables.table import ID, InputTable, ids_of, num_rows, raise_at_first
from weft.data.vertex_names import (
    Ids,
    NameCollector,
    NameIndex,
    Texts,
    VertexNames,
    concatenate_ids,
    convert_ids_like,
    id_text,
    is_number,
)
from weft.utils.errors import InputError


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
    place: str = ""
    """Table and column of the ids, for errors."""

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
            return cls(count=num_rows(table))
        place, row, parts = f"{table.place}: column '{columns.id}'", 0, []
        for part in table.parts({columns.id: ID}):
            parts.append(ids_of(part[columns.id], place, row))
            row += len(parts[-1])
        if len({isinstance(part, Texts) for part in parts}) > 1:
            raise InputError(f"{place}: contains numbers and texts: give all as text")
        ids = concatenate_ids(parts)
        if not len(ids):
            raise InputError(f"{table.place}: has no rows: give the vertices a table with one row each")
        return cls(count=len(ids), index=NameIndex(ids, place), ids=ids, column=columns.id, place=place)

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
            if isinstance(endpoints[0], Texts) != isinstance(endpoints[1], Texts):
                raise InputError(
                    f"{table.place}: of the columns '{columns.source}' and '{columns.target}', one contains text and "
                    "the other numbers: save both as text, or both as numbers"
                )
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
        if isinstance(ids, Texts) and not isinstance(self.ids, Texts):
            texts = ids.tolist()
            odd = np.array([not is_number(text) for text in texts])
            reason = f"is text, and {self.place} contains whole numbers: save both as text, or both as numbers"
            if self.index is None:
                reason = "is text, but no --id is given: name the vertices' column of ids"
            raise_at_first(odd, place, first_row, f"{texts[int(odd.argmax())]!r} {reason}" if odd.any() else "")
        if self.index is not None:
            vertices = self.index.find(ids)
        else:
            numbers = np.asarray(convert_ids_like(np.empty(0, np.int64), ids))
            vertices = np.where((numbers >= 0) & (numbers < self.count), numbers, -1)
        if (vertices < 0).any():
            unknown_id = int((vertices < 0).argmax())
            reason = "is no vertex's id: give it a row in the table of vertices, or leave its edges out"
            if isinstance(self.ids, Texts) and not isinstance(ids, Texts):
                reason = (
                    f"is a number, and {self.place} contains text, such as {id_text(self.ids, 0)}: save both as text, "
                    "or both as numbers"
                )
            raise_at_first(vertices < 0, place, first_row, f"{id_text(ids, unknown_id)} {reason}")
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
