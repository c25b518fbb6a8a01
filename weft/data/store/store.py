"""Graphs as folders of .npy files with a JSON manifest: written completely or not at all, opened memory-mapped."""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency, Transpose
from weft.data.checks.tensor_checks import located
from weft.data.fields import EDGE_ARRAYS, EdgeLabels, GraphFields
from weft.data.store.check_record import folder_state, was_checked
from weft.data.store.digests import FIELDS
from weft.data.store.manifest import (
    ASIDE,
    FORMAT,
    MANIFEST,
    REMEDY,
    array_files,
    entries,
    entry,
    is_store,
    read_array,
    read_manifest,
)
from weft.data.store.npy import array_of
from weft.data.store.npy_writer import write_array
from weft.data.tables.schema import Schema
from weft.data.vertex_names import NUMBER_COLUMN, OFFSET_COLUMN, TEXT_COLUMN, VertexNames
from weft.runtime.processes.temporary_folder import lock_folder, remove_leftovers
from weft.storage.quantized_table import FeatureTable, QuantizedTable, feature_arrays
from weft.storage.unnamed_files import note_mapped
from weft.utils.errors import InputError
from weft.utils.files.file_writing import sync
from weft.utils.files.migrate import versioned

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux's renameat2: paths are relative to the current folder; exchange the two names."""
PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
"""Names of folders of graphs that are being written."""


def save(graph: GraphFields, folder: str | Path, *, overwrite: bool = False) -> None:
    """Write a graph as a graph folder; see new_store.

    Args:
        graph: The graph.
        folder: The new folder.
        overwrite: Replace a graph folder that exists.
    """
    with new_store(folder, overwrite=overwrite) as draft:
        write_store(graph, draft)


@contextmanager
def new_store(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to write a graph to, which becomes `folder` when the block has succeeded.

    The temporary folder is a hidden sibling. It is flushed to disk and then renamed, so no reader sees half of a graph.

    Args:
        folder: The new folder.
        overwrite: Replace a graph folder that exists.

    Raises:
        InputError: If `folder` exists, unless it is a graph folder and `overwrite` is True.
    """
    folder = Path(folder).absolute()
    check_new_store(folder, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent, PARTIAL)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    try:  # also around the creation, behind which a signal may end the command
        partial.mkdir()
        lock = lock_folder(partial)
        try:
            yield partial
            replace_folder(partial, folder)
        finally:
            os.close(lock)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(folder)) from error
        raise


def check_new_store(folder: Path, *, overwrite: bool) -> None:
    """Check that a graph can be written to a folder.

    Args:
        folder: The folder.
        overwrite: Replace a graph folder that exists.

    Raises:
        InputError: If `folder` exists, unless it is a graph folder and `overwrite` is True.
    """
    if folder.exists() or folder.is_symlink():
        if not is_store(folder):
            raise InputError(f"{folder}: exists and is no graph folder: choose another folder")
        if not overwrite:
            raise InputError(f"{folder}: a graph folder exists already: choose another one, or add --overwrite")


def replace_folder(new: Path, folder: Path) -> None:
    """Rename a folder, and remove the one that had the name before.

    The two names are exchanged in one step, so a process that is stopped at any moment leaves the old or the new folder
    under the name. On file systems that cannot do that, the old folder is renamed first; if the process is stopped
    then, a reader's error says where the old folder is.

    Args:
        new: The new folder.
        folder: Name that it gets.
    """
    old = new
    if not folder.exists():
        new.rename(folder)
    elif not exchange(new, folder):
        old = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{ASIDE}")
        folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            old.rename(folder)
            raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one step.

    Args:
        first: A folder.
        second: Another folder.

    Returns:
        Whether the system and the file system can do that.
    """
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second)
    return bool(renameat2(*names, RENAME_EXCHANGE) == 0)


def write_store(graph: GraphFields, folder: Path) -> None:
    """Write arrays and manifest of a graph to an empty folder, and flush them.

    Args:
        graph: The graph.
        folder: The folder.
    """
    in_edges, transpose = graph.in_edges, graph.in_edges.transpose
    features = {feature_key(graph.vertex_types, name): table for name, table in graph.features.items()}
    symmetric = is_symmetric(in_edges)
    arrays: dict[str, Tensor | None] = {
        "indptr": in_edges.indptr,
        "indices": in_edges.indices,
        "weight": in_edges.weight,
        "transpose_indptr": None if symmetric else transpose.indptr,
        "transpose_indices": None if symmetric else transpose.indices,
        "transpose_edge_ids": in_edges.transposed_edge_ids if stores_edge_ids(graph) else None,
        "transpose_weight": transpose.weight,
        **{name: getattr(graph, name) for name in FIELDS},
        **({} if graph.vertex_names is None else graph.vertex_names.arrays()),
        **({} if graph.edge_labels is None else graph.edge_labels.arrays()),
        **feature_arrays({"x": graph.x, **features}),
    }
    files = {key: write_array(folder / f"{key}.npy", array_of(t)) for key, t in arrays.items() if t is not None}
    manifest = {
        "name": graph.name,
        "num_vertices": in_edges.num_targets,
        "num_edges": in_edges.num_edges,
        "symmetric": symmetric,
        "relations": list(graph.relations),
        "vertex_types": list(graph.vertex_types),
        "type_offsets": list(graph.type_offsets),
        "id_column": "" if graph.vertex_names is None else graph.vertex_names.column,
        **schema_entry(graph.schema),
        "fingerprint": in_edges.fingerprint,
    }
    write_manifest(manifest, files, folder)


def is_symmetric(in_edges: Adjacency) -> bool:
    """Return whether the edges and their transpose are equal, so that a graph folder stores them once."""
    transpose = in_edges.transpose
    return torch.equal(in_edges.indptr, transpose.indptr) and torch.equal(in_edges.indices, transpose.indices)


def stores_edge_ids(graph: GraphFields) -> bool:
    """Return whether a graph folder stores the edge of each entry of the transpose: only if edges have data."""
    return any(data is not None for data in (graph.in_edges.weight, graph.edge_type, graph.edge_features))


def schema_entry(schema: Schema | None) -> dict[str, Any]:
    """Return the manifest field of the tables that a graph comes from, if it comes from some."""
    return {} if schema is None else {"schema": schema.record()}


def write_manifest(described: dict[str, Any], files: dict[str, Any], folder: Path) -> None:
    """Write the manifest, and flush it and the folder.

    Args:
        described: Fields of the manifest.
        files: Manifest entries of the arrays, by name.
        folder: The graph folder.
    """
    manifest = {"format": FORMAT, **versioned("graph", described), "files": files}
    with (folder / MANIFEST).open("x", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def feature_key(vertex_types: tuple[str, ...], name: str) -> str:
    """Return the file name of a vertex type's features, by its number, because a type's name need not be a file name.

    Args:
        vertex_types: Names of the vertex types.
        name: Name of the type.
    """
    return f"features_{vertex_types.index(name)}"


class StoreContents(NamedTuple):
    """Content of a graph folder."""

    fields: GraphFields
    """Fields of the graph, as views of the arrays."""
    folder: Path
    """Absolute path of the folder."""
    arrays: tuple[Tensor, ...]
    """All arrays, memory-mapped; call `release` after reading one to free its pages."""
    state: dict[str, Any]
    """State of the files before they were read, for `record_check`."""
    checked: bool
    """True if this user has checked the folder before, and no file has changed since."""


def read_store(folder: str | Path, *, verify: bool | None = True) -> StoreContents:
    """Open a graph folder, memory-mapped: only what is used is read, and ranks on one host share pages.

    Dtypes, shapes and sizes are always compared with the manifest. Writing to a tensor does not change the files.

    Args:
        folder: The folder.
        verify: True: read every file once and compare checksums. None: only files whose size or modification time
            differs from the manifest, and none if the folder was checked before and has not changed. False: none.

    Raises:
        InputError: The folder is damaged, of a later version, or no graph folder. The message names file and field.
    """
    folder = Path(folder).absolute()
    manifest = read_manifest(folder)
    path = folder / MANIFEST
    vertex_types = entries(manifest, "vertex_types", str, path)
    files = array_files(folder, manifest)
    state = folder_state(files.values(), path)
    checked = was_checked(folder, state)
    arrays = {
        name: read_array(file, entry(manifest["files"], name, dict, path), verify, checked=checked)
        for name, file in files.items()
    }
    features = {name: open_features(arrays, feature_key(vertex_types, name), path) for name in vertex_types}
    fields = GraphFields(
        in_edges=open_adjacency(arrays, entry(manifest, "symmetric", bool, path), path),
        name=entry(manifest, "name", str, path),
        relations=entries(manifest, "relations", str, path),
        vertex_types=vertex_types,
        type_offsets=entries(manifest, "type_offsets", int, path),
        vertex_names=open_names(arrays, manifest, path),
        schema=Schema.from_record(manifest["schema"], path) if "schema" in manifest else None,
        edge_labels=open_edge_labels(arrays, path),
        x=open_features(arrays, "x", path),
        features={name: table for name, table in features.items() if table is not None},
        **{name: arrays.get(name) for name in FIELDS},
    )
    for array in arrays.values():
        note_mapped(array, private=True)
    return StoreContents(fields, folder, tuple(arrays.values()), state, checked)


def open_features(arrays: dict[str, Tensor], key: str, manifest: Path) -> FeatureTable | None:
    """Return features; None if the folder has none of this name.

    Args:
        arrays: Arrays of the folder by name.
        key: Name of the features.
        manifest: Path of the manifest, for errors.

    Raises:
        InputError: If features in int8 have no scales, or wrong ones.
    """
    values, scale = arrays.get(key), arrays.get(f"{key}_scale")
    if values is None or (values.dtype != torch.int8 and scale is None):
        return values
    if scale is None:
        raise InputError(f"{manifest}: field 'files' lacks '{key}_scale': {REMEDY}")
    with located(manifest):
        return QuantizedTable(values, scale)


def open_names(arrays: dict[str, Tensor], manifest: dict[str, Any], path: Path) -> VertexNames | None:
    """Return the names of the vertices; None if the folder has none.

    Args:
        arrays: Arrays of the folder by name.
        manifest: Its manifest.
        path: Path of the manifest, for errors.
    """
    columns = [arrays.get(name) for name in (NUMBER_COLUMN, OFFSET_COLUMN, TEXT_COLUMN)]
    if columns[0] is None and (columns[1] is None or columns[2] is None):
        return None
    numbers, offsets, text = columns
    return VertexNames(column=entry(manifest, "id_column", str, path), numbers=numbers, offsets=offsets, text=text)


def open_edge_labels(arrays: dict[str, Tensor], manifest: Path) -> EdgeLabels | None:
    """Return the labels of edges; None if the folder has none.

    Args:
        arrays: Arrays of the folder by name.
        manifest: Path of the manifest, for errors.

    Raises:
        InputError: If an array is missing.
    """
    fields: dict[str, Any] = {name: arrays[file] for name, file in EDGE_ARRAYS.items() if file in arrays}
    missing = EDGE_ARRAYS.keys() - fields - {"features"}
    if fields and missing:
        raise InputError(f"{manifest}: field 'files' lacks '{EDGE_ARRAYS[min(missing)]}': {REMEDY}")
    return EdgeLabels(**fields) if fields else None


def open_adjacency(arrays: dict[str, Tensor], symmetric: bool, manifest: Path) -> Adjacency:
    """Return the in-edges with the stored transpose; in a symmetric graph both share arrays.

    Args:
        arrays: Arrays of the folder by name.
        symmetric: Whether the graph is symmetric.
        manifest: Path of the manifest, for errors.

    Raises:
        InputError: If an array is missing.
    """
    needed = ["indptr", "indices"]
    needed += [] if symmetric else ["transpose_indptr", "transpose_indices"]
    needed += ["transpose_edge_ids", "transpose_weight"] if "weight" in arrays else []
    for key in needed:
        if key not in arrays:
            raise InputError(f"{manifest}: field 'files' lacks '{key}': {REMEDY}")
    transpose = Transpose(
        indptr=arrays["indptr" if symmetric else "transpose_indptr"],
        indices=arrays["indices" if symmetric else "transpose_indices"],
        edge_ids=arrays.get("transpose_edge_ids"),
        weight=arrays.get("transpose_weight"),
    )
    return Adjacency(
        indptr=arrays["indptr"],
        indices=arrays["indices"],
        num_sources=len(transpose.indptr) - 1,
        weight=arrays.get("weight"),
        known_transpose=transpose,
    )
