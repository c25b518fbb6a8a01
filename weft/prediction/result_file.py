"""Files of predictions: rows of the model's output as arrays, or as a table with ids and names of classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.data import EdgeLabels, Graph
from weft.data.tables.table import ID, ids_of, open_table
from weft.data.vertex_names import Ids, take_ids
from weft.runtime.processes.temporary_folder import temporary_folder
from weft.storage.table_file import HEADERS, TableFile
from weft.training.launch.torchrun import on_first_host
from weft.training.tasks.row_batching import row_blocks
from weft.utils.errors import InputError, RunError, unknown
from weft.utils.files.file_writing import draft_in, new_file, sync
from weft.utils.optional_packages import check_extra

WHAT = ("logits", "classes", "probabilities", "embeddings")
"""Kinds of results, the values of `--what`."""
SINGULAR = {"logits": "logit", "classes": "class", "probabilities": "probability", "embeddings": "embedding"}
TABLE_SUFFIXES = (".parquet", ".csv")
SUFFIXES = (*HEADERS, *TABLE_SUFFIXES)
"""File formats of `--out`."""

IdColumns = dict[str, Callable[[Tensor], list[Any]]]
"""Columns that identify the rows of a table, by name: each returns the ids of some rows, int or str."""


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Kinds of results, which are computed from the model's output rows."""

    names: tuple[str, ...]
    """Values of WHAT. Several are computed from logits when the file is written."""
    multi_label: bool
    """True if a vertex may have several classes, each with its own logit."""

    @property
    def stored(self) -> str:
        """Kind of the rows that ranks write."""
        return self.names[0] if len(self.names) == 1 else "logits"

    def values(self, rows: Tensor, name: str) -> Tensor:
        """Return a kind of result.

        Args:
            rows: Output rows of the model, [n, C].
            name: A value of WHAT.
        """
        if name == "probabilities":
            return rows.sigmoid() if self.multi_label else rows.softmax(1)
        if name == "classes":
            return rows > 0 if self.multi_label else rows.argmax(1)
        return rows


def parse_what(what: str, path: Path | None) -> tuple[str, ...]:
    """Return the requested kinds of results.

    Args:
        what: One of WHAT, or several separated by commas.
        path: File to write, or None.

    Raises:
        InputError: If a kind is unknown, or several are requested that do not fit into one file.
    """
    names = tuple(what.split(","))
    for name in names:
        if name not in WHAT:
            raise unknown("--what", name, WHAT)
    if len(names) > 1 and ("embeddings" in names or len(set(names)) < len(names)):
        raise InputError(
            f"--what {what}: give different ones of logits, classes and probabilities, or embeddings alone"
        )
    if len(names) > 1 and (path is None or path.suffix not in TABLE_SUFFIXES):
        raise InputError(f"--what {what}: only a .parquet or .csv file can hold several: give one by --out")
    return names


def selected_rows(graph: Graph, vertex_type: str | None, ids: Any, *, of_vertices: bool) -> Tensor | None:
    """Return the rows to return and to write, int64 [n]; None for all.

    Args:
        graph: The graph.
        vertex_type: Name of a vertex type, or None.
        ids: A file whose first column contains names of vertices, or a sequence of names, or None.
        of_vertices: True if rows belong to vertices.

    Raises:
        InputError: If the graph has no such type or id.
    """
    if vertex_type is None and ids is None:
        return None
    if not of_vertices:
        raise InputError("--vertex-type and --ids select vertices, but rows belong to edges: leave them out")
    if vertex_type is not None and not graph.vertex_types:
        raise InputError(f"--vertex-type {vertex_type}: {graph.name} has no vertex types: leave it out")
    of_type = range(graph.num_vertices) if vertex_type is None else graph.type_range(vertex_type)
    vertices = torch.arange(of_type.start, of_type.stop)  # original ids: --order keeps the ids of several types
    if ids is None:
        return vertices
    names = read_ids(ids) if isinstance(ids, str | Path) else list(ids)
    if graph.vertex_names is not None:
        try:
            return torch.tensor(graph.vertex_names.find(names, vertices), dtype=torch.int64)
        except InputError as error:
            several = " (if types share ids, give --vertex-type too)" if len(graph.vertex_types) > 1 else ""
            raise InputError(f"--ids: {error}{several if vertex_type is None else ''}") from None
    rows = torch.tensor(names, dtype=torch.int64)
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= graph.num_vertices):
        raise InputError(f"--ids: vertices are numbered from 0 to {graph.num_vertices - 1}: correct the numbers")
    return rows


def read_ids(path: str | Path) -> list[Any]:
    """Return the ids in the first column of a table."""
    table, row = open_table(path, str(path)), 0
    column, ids = table.columns[0], list[Any]()
    for part in table.parts({column: ID}):
        ids += ids_of(part[column], f"{table.place}: column '{column}'", row).tolist()
        row = len(ids)
    return ids


def id_columns(graph: Graph, labels: EdgeLabels | None) -> IdColumns:
    """Return the columns that identify rows: ids of vertices with their types, or the endpoints of edges.

    Args:
        graph: The graph.
        labels: The edges of the table; None: its rows are vertices, whose numbers are left out if they have no names.
    """
    names = None if graph.vertex_names is None else graph.vertex_names.ids
    if labels is not None:
        endpoints = labels.edges[:, :2] if graph.ids is None else graph.ids[labels.edges[:, :2]]
        sides = {name: endpoints[:, side] for side, name in enumerate(("source", "target"))}
        return {name: partial(names_of, names, vertices) for name, vertices in sides.items()}
    columns: IdColumns = {}
    if len(graph.vertex_types) > 1:
        columns["type"] = partial(types_of, graph)
    if names is not None:
        assert graph.vertex_names is not None
        columns[graph.vertex_names.column] = partial(names_of, names, None)
    return columns


def names_of(names: Ids | None, vertices: Tensor | None, rows: Tensor) -> list[Any]:
    """Return the names of the vertices of some rows.

    Args:
        names: Names of all vertices, or None: their numbers.
        vertices: Vertex of each row of the table; None: rows are vertices.
        rows: Numbers of rows, int64 [n].
    """
    ids = (rows if vertices is None else vertices[rows]).numpy()
    return list((ids if names is None else take_ids(names, ids)).tolist())


def types_of(graph: Graph, rows: Tensor) -> list[str]:
    """Return the names of the types of some vertices.

    Args:
        graph: The graph, whose types have consecutive original ids.
        rows: Original ids of the vertices, int64 [n].
    """
    numbers = torch.bucketize(rows, torch.tensor(graph.type_offsets[1:]), right=True)
    return [graph.vertex_types[number] for number in numbers.tolist()]


def check_new_file(path: Path | None, suffixes: Sequence[str], *, overwrite: bool) -> None:
    """Check that the result can be written to a file.

    Args:
        path: The file. None: nothing is checked.
        suffixes: File formats of the result.
        overwrite: Allow an existing file.

    Raises:
        InputError: The format is unknown, the folder cannot be written, or the file exists.
    """
    if path is None or not on_first_host():
        return
    if path.suffix not in suffixes:
        raise unknown("format of --out", path.suffix, suffixes)
    if path.suffix in TABLE_SUFFIXES:
        check_extra("pyarrow", f"--out {path}")
    if not path.parent.is_dir():
        raise InputError(f"--out {path}: the folder {path.parent} does not exist: create it or choose another")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"--out {path}: no permission to write to {path.parent}: choose another folder")
    if path.is_dir() or (path.exists() and not overwrite):
        raise InputError(
            f"--out {path} exists already: choose another name{'' if path.is_dir() else ' or add --overwrite'}"
        )


@contextmanager
def draft_of(path: Path | None) -> Iterator[Path]:
    """Yield a temporary path for a file while it is written, and remove what is left there in the end."""
    if path is None:
        with temporary_folder() as folder:
            yield folder / "table"
        return
    draft = draft_in(path.parent)
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class ResultFile:
    """File to which the rows of a prediction are written."""

    path: Path
    """The file."""
    kinds: Kinds
    """Kinds of results to write."""
    class_names: Sequence[str]
    """Names of the classes; empty: numbers."""
    ids: IdColumns
    """Columns that identify the rows."""

    def publish(self, rows: Tensor, selection: Tensor | None, draft: Path) -> None:
        """Give the finished file its name; convert or select rows first if needed.

        Args:
            rows: The table, mapped from `draft`.
            selection: Rows to write, int64 [n]; None: all.
            draft: Temporary path of the table.

        Raises:
            RunError: The file cannot be written.
        """
        try:
            if self.path.suffix in TABLE_SUFFIXES or selection is not None:
                draft.unlink()  # rows stay readable, since they are mapped
                with new_file(self.path, flush=True) as path:
                    self._write(rows, selection, path)
                return
            sync(draft)
            draft.replace(self.path)
        except OSError as error:
            raise RunError(f"{self.path}: {error.strerror}: choose a folder with enough space") from error

    def _write(self, rows: Tensor, selection: Tensor | None, path: Path) -> None:
        """Write the selected rows to a new file."""
        if self.path.suffix in TABLE_SUFFIXES:
            numbers = torch.arange(len(rows)) if selection is None else selection
            blocks = [block for block, _ in row_blocks([], rows if selection is None else selection)] or [slice(0)]
            write_columns((self._columns(rows, numbers[block]) for block in blocks), path, self.path.suffix)
            return
        assert selection is not None
        path.unlink()
        shape = (len(selection), *rows.shape[1:])
        table = TableFile.create(path, self.kinds.stored, shape, rows.dtype, self.path.suffix)
        table.put(torch.arange(len(selection)), rows[selection])

    def _columns(self, rows: Tensor, numbers: Tensor) -> dict[str, Any]:
        """Return pyarrow arrays by column for some rows of the table."""
        import pyarrow

        values: dict[str, Any] = {}
        for name in self.kinds.names:
            block = rows[numbers]
            block = self.kinds.values(block, name) if len(self.kinds.names) > 1 else block
            if name == "classes" and block.dim() == 1 and self.class_names:
                values["class"] = pyarrow.array([self.class_names[number] for number in block.long().tolist()])
                continue
            columns = [block] if block.dim() == 1 else list(block.t().contiguous())
            labels = self.class_names if name != "embeddings" and len(self.class_names) == len(columns) else ()
            for number, column in enumerate(columns):
                label = "" if block.dim() == 1 else f"_{labels[number] if labels else number}"
                values[f"{SINGULAR[name]}{label}"] = pyarrow.array(column.numpy())
        ids = {name: pyarrow.array(column(numbers)) for name, column in self.ids.items()}
        return {f"{name}_of_vertex" if name in values else name: column for name, column in ids.items()} | values


def publish_columns(parts: Iterator[dict[str, Any]], path: Path) -> None:
    """Write columns to the file that was requested.

    Args:
        parts: Consecutive rows of the file, by column.
        path: Path of the result, with one of TABLE_SUFFIXES.

    Raises:
        RunError: The file cannot be written.
    """
    try:
        with new_file(path, flush=True) as draft:
            write_columns(parts, draft, path.suffix)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}: choose a folder with enough space") from error


def write_columns(parts: Iterator[dict[str, Any]], path: Path, suffix: str) -> None:
    """Write columns to a table file.

    Args:
        parts: Consecutive rows by column, as lists or arrays of pyarrow; at least one part, which may be empty.
        path: The file.
        suffix: Its format, one of TABLE_SUFFIXES.
    """
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    first = pyarrow.table(next(parts))
    writer = pyarrow.parquet.ParquetWriter if suffix == ".parquet" else pyarrow.csv.CSVWriter
    with writer(path, first.schema) as file:
        file.write_table(first)
        for part in parts:
            file.write_table(pyarrow.table(part, schema=first.schema))
