"""Meaning of the columns of tables: which hold ids, features, labels and splits of which vertex type or relation.

A schema comes from flags or from a TOML file, and a graph keeps it with fitted transforms, for later tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from weft.data.checks.tensor_checks import located
from weft.data.tables.table import open_table
from weft.data.tables.transforms import Transform, transform_from
from weft.utils.errors import InputError, check_word, readable, unknown
from weft.utils.files.file_reading import MAX_JSON_BYTES, read_text
from weft.utils.user_folders import expand_user


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    """Meaning of the columns of a table of vertices or edges."""

    table: Any = None
    """The table: a path, a data frame, or arrays by name."""
    features: tuple[str | Transform, ...] = ()
    """Columns that become features, each as 'name' or 'name:kind' (weft.data.tables.transforms), or fitted."""
    label: tuple[str, ...] = ()
    """Column with classes, class names or values, or one column of 0 and 1 for each class. Missing: unlabelled."""
    label_kind: str = ""
    """'classes' or 'values', the meaning of a single label column of numbers; '': the column's type decides."""
    split: str | None = None
    """Column with train, val or test; missing or empty: no split."""
    split_time: str | None = None
    """Column with a time; the earliest rows train, the latest test."""
    shares: tuple[float, ...] | None = None
    """Fractions of a random split or a split by time; labels without a split get 60, 20 and 20 %."""

    @property
    def labels_or_splits(self) -> str:
        """Name of the first option of labels or splits that is given; '' if none is."""
        split: Any = self.split or self.shares
        names = {"label": self.label, "label_kind": self.label_kind, "split": split, "split_time": self.split_time}
        return next((name for name, value in names.items() if value), "")


@dataclass(frozen=True, kw_only=True)
class VertexColumns(TableColumns):
    """Meaning of the columns of a table of vertices of one type."""

    id: str | None = None
    """Column with the ids that edges refer to. None: row numbers from 0."""


@dataclass(frozen=True, kw_only=True)
class EdgeColumns(TableColumns):
    """Meaning of the columns of a table of edges of one relation."""

    source: str = "source"
    """Column with the id of each edge's source."""
    target: str = "target"
    """Column with the id of each edge's target."""
    source_type: str = ""
    """Vertex type of the sources; '' in a graph without types."""
    target_type: str = ""
    """Vertex type of the targets; '' in a graph without types."""
    weight: str | None = None
    """Column with one number."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Meaning of the columns of all tables of a graph."""

    vertices: Mapping[str, VertexColumns] = field(default_factory=dict)
    """Tables of vertices by type. A graph without types has one, named '', or none: its edges name the vertices."""
    edges: Mapping[str, EdgeColumns]
    """Tables of edges by name of the relation; '' in a graph without types."""
    predict: str = ""
    """Vertex type or relation whose labels are learned; '' in a graph without types, or without labels."""
    predicts_edges: bool = False
    """True if `predict` is a relation, whose edges have labels."""
    class_names: tuple[str, ...] = ()
    """Name of each class, if labels are text; () before the tables are read."""

    @classmethod
    def untyped(cls, vertices: VertexColumns, edges: EdgeColumns) -> Schema:
        """Return the schema of a graph without types.

        Args:
            vertices: Columns of the vertices; their table is None if there are only edges.
            edges: Columns of the edges.

        Raises:
            InputError: If a column of vertices is requested without a table.
        """
        if vertices.table is None:
            for name in ("id", "features", "label", "split", "split_time"):
                if getattr(vertices, name):
                    flag = name.replace("_", "-")
                    raise InputError(f"--{flag} names a column of vertices: give --vertices, their table")
        tables = {} if vertices.table is None else {"": vertices}
        return cls(vertices=tables, edges={"": edges}, predicts_edges=bool(edges.label))

    @property
    def labelled(self) -> TableColumns | None:
        """Columns of the table with labels or splits; None if there is none."""
        tables: Mapping[str, TableColumns] = self.edges if self.predicts_edges else self.vertices
        columns = tables.get(self.predict)
        return columns if columns is not None and (self.predicts_edges or columns.labels_or_splits) else None

    @property
    def typed(self) -> bool:
        """True if vertices and edges have types."""
        return "" not in self.edges

    def relation(self, name: str) -> str:
        """Return the full name of a relation, as in GraphFields.relations."""
        edges = self.edges[name]
        return f"{edges.source_type}|{name}|{edges.target_type}"

    def record(self) -> dict[str, Any]:
        """Return what later tables need, as JSON values; all features must be fitted."""
        return {
            "vertices": {name: columns_record(columns, ("id",)) for name, columns in self.vertices.items()},
            "edges": {
                name: columns_record(columns, ("source", "target", "source_type", "target_type", "weight", "split"))
                for name, columns in self.edges.items()
            },
            "predict": self.predict,
            "predicts_edges": self.predicts_edges,
            "class_names": list(self.class_names),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], place: str | Path) -> Schema:
        """Return the schema of a record, without tables, labels and splits.

        Args:
            record: Result of `record`.
            place: File that contains the record, for errors.

        Raises:
            InputError: If the record is damaged.
        """
        try:
            return cls(
                vertices={name: VertexColumns(**fitted(values)) for name, values in record["vertices"].items()},
                edges={name: EdgeColumns(**fitted(values)) for name, values in record["edges"].items()},
                predict=record["predict"],
                predicts_edges=record["predicts_edges"],
                class_names=tuple(record["class_names"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{place}: field 'schema' is damaged ({error}): import the graph again") from None

    def transforms(self) -> Iterator[tuple[str, Transform]]:
        """Yield the name of each column of features, with its type or relation, and its fitted transform."""
        features = [(name, columns.features) for name, columns in self.vertices.items()]
        features += [(name, columns.features) for name, columns in self.edges.items()]
        for type_name, requested in features:
            for transform in requested:
                if not isinstance(transform, str):
                    yield f"{type_name}.{transform.name}".lstrip("."), transform

    def with_tables(self, others: Schema) -> Schema:
        """Return the schema for other tables, with the meaning and the transforms of these columns.

        A column of splits has the name that `others` gives, or else the same name as here if the table has it.

        Args:
            others: Schema whose tables, and whose columns with splits, to use.

        Raises:
            InputError: If a table is missing, or this schema has no such table.
        """
        for section in ("vertices", "edges"):
            expected, actual = (getattr(schema, section) for schema in (self, others))
            if missing := [name for name in expected if name not in actual or actual[name].table is None]:
                remedy = "give a schema file (.toml) with all tables" if self.typed else "give --vertices and --edges"
                raise InputError(f"table of {section} {missing[0]}".rstrip() + f" is missing: {remedy}")
            if more := [name for name in actual if name not in expected]:
                raise unknown(f"table of {section}", more[0], expected)

        def moved(columns: Any, other: TableColumns) -> Any:
            split = other.split
            if columns.split and not split and columns.split in open_table(other.table, "table").columns:
                split = columns.split
            return replace(columns, table=other.table, split=split)

        return replace(
            self,
            vertices={name: moved(columns, others.vertices[name]) for name, columns in self.vertices.items()},
            edges={name: moved(columns, others.edges[name]) for name, columns in self.edges.items()},
        )


def columns_record(columns: TableColumns, names: tuple[str, ...]) -> dict[str, Any]:
    """Return some fields and the fitted features as JSON values.

    Args:
        columns: The columns.
        names: Names of the fields.
    """
    features = [asdict(transform) for transform in columns.features if not isinstance(transform, str)]
    return {name: getattr(columns, name) for name in names} | {"features": features}


def fitted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in a record of `columns_record`."""
    return {**values, "features": tuple(transform_from(record) for record in values["features"])}


def read_schema(path: str | Path, *, labels: bool = True) -> Schema:
    """Return the schema in a TOML file; paths of tables are relative to its folder. See docs/data.md.

    Args:
        path: The file.
        labels: False: the tables need no labels, since a run predicts them; `predict` has no effect.

    Raises:
        InputError: If the file cannot be read, or contains an unknown name.
    """
    path = expand_user(path)
    with readable(path, "correct the file"):
        content = tomllib.loads(read_text(path, MAX_JSON_BYTES))
    require_keys(content, ("predict", "vertices", "edges"), str(path))
    tables: dict[str, dict[str, Any]] = {"vertices": {}, "edges": {}}
    for section, cls in (("vertices", VertexColumns), ("edges", EdgeColumns)):
        for name, values in mapping(content.get(section, {}), f"{path}: [{section}]").items():
            tables[section][name] = read_columns(mapping(values, f"{path}: [{section}.{name}]"), cls, name, path)
        if not tables[section]:
            raise InputError(f"{path}: has no table [{section}.NAME]: add one for each table of {section}")
    types = tuple(tables["vertices"])
    if both := [name for name in types if name in tables["edges"]]:
        raise InputError(f"{path}: vertices and edges are both named {both[0]}: rename one")
    for name, columns in tables["edges"].items():
        for end in (columns.source_type, columns.target_type):
            with located(f"{path}: [edges.{name}]"):
                check_word("vertex type", end, types)
    predict = labelled_table(content.get("predict"), tables, path) if labels else ""
    edges = tables["edges"]
    return Schema(vertices=tables["vertices"], edges=edges, predict=predict, predicts_edges=predict in edges)


def read_columns(values: Mapping[str, Any], cls: type[Any], name: str, path: Path) -> Any:
    """Return the VertexColumns or EdgeColumns that a table of a schema file describes.

    Args:
        values: Content of the table.
        cls: VertexColumns or EdgeColumns.
        name: Name of the vertex type or relation.
        path: The schema file.

    Raises:
        InputError: If a key is unknown or a value has another type.
    """
    section = "vertices" if cls is VertexColumns else "edges"
    place = f"{path}: [{section}.{name}]"
    if not name or "|" in name:
        raise InputError(f"{place}: a name must not be empty or contain '|': choose another one")
    keys = [f.name for f in fields(cls) if f.name not in ("shares", "source_type", "target_type")]
    require_keys(values, keys, place)
    result: dict[str, Any] = {}
    for key, value in values.items():
        as_list = key in ("features", "label") and isinstance(value, list)
        if not all(isinstance(item, str) for item in (value if as_list else [value])):
            raise InputError(f"{place}: {key} = {value!r}: give {'a list of' if key == 'features' else 'a'} text")
        result[key] = tuple(value) if as_list else (value,) if key in ("features", "label") else value
    if "table" not in result:
        raise InputError(f'{place}: has no table: add table = "FILE"')
    result["table"] = path.parent / expand_user(result["table"])
    shares = [share.strip() for share in result.get("split", "").split(",")]
    if len(shares) > 1:
        try:
            result |= {"split": None, "shares": tuple(float(share) / 100 for share in shares)}
        except ValueError:
            raise InputError(f"{place}: split = {values['split']!r}: give a column, or 60,20,20") from None
    if cls is VertexColumns:
        return VertexColumns(**result)
    for end in ("source", "target"):
        vertex_type, dot, column = result.get(end, "").partition(".")
        if end not in result:
            raise InputError(f'{place}: {end} is missing: give the vertex type and the column, as "user.id"')
        if not dot:
            raise InputError(f'{place}: {end} = {values.get(end)!r}: give the vertex type and the column, as "user.id"')
        result |= {f"{end}_type": vertex_type, end: column}
    return EdgeColumns(**result)


def labelled_table(predict: Any, tables: Mapping[str, Mapping[str, Any]], path: Path) -> str:
    """Return the vertex type or relation whose labels are learned; '' if there are no labels.

    Args:
        predict: Value of the key `predict`, or None.
        tables: VertexColumns and EdgeColumns by name, under 'vertices' and 'edges'.
        path: The schema file, for errors.

    Raises:
        InputError: If it is unclear, or has no label.
    """
    columns = {**tables["vertices"], **tables["edges"]}
    labelled = [name for name in columns if columns[name].label]
    if predict is None:
        if len(labelled) > 1:
            raise InputError(f'{path}: {" and ".join(labelled)} have labels: add predict = "{labelled[0]}"')
        return labelled[0] if labelled else ""
    if predict not in columns:
        raise InputError(f"{path}: {unknown('table of predict', str(predict), tuple(columns))}")
    if predict not in labelled:
        raise InputError(f"{path}: {predict} has no label, but is to be predicted: correct predict, or add a label")
    if more := [name for name in labelled if name != predict]:
        raise InputError(f"{path}: {more[0]} has a label without effect: correct predict, or leave the label out")
    return str(predict)


def mapping(value: Any, place: str) -> Mapping[str, Any]:
    """Return a table of a TOML file.

    Args:
        value: Content of the file where the table should be.
        place: File and name of the table, for errors.

    Raises:
        InputError: If it is something else.
    """
    if not isinstance(value, Mapping):
        raise InputError(f"{place}: is {value!r}: give a table of keys and values")
    return value


def require_keys(values: Mapping[str, Any], names: Any, place: str) -> None:
    """Check the keys of a table of a TOML file.

    Args:
        values: The table.
        names: Allowed keys.
        place: File and name of the table, for errors.

    Raises:
        InputError: If there is another key. The message suggests the nearest name.
    """
    for key in values:
        if key not in names:
            raise InputError(f"{place}: {unknown('key', key, names)}")
