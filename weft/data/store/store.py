"""Graphs as folders of .npy files with one JSON manifest: written whole or not at all, opened memory-mapped."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency, Transpose
from weft.data.fields import GraphFields
from weft.data.store.digests import FIELDS
from weft.data.store.manifest import (
    ASIDE,
    FORMAT,
    MANIFEST,
    REMEDY,
    entries,
    entry,
    is_store,
    read_arrays,
    read_manifest,
)
from weft.data.store.npy_writer import write_array
from weft.data.vertex_names import NUMBER_COLUMN, OFFSET_COLUMN, TEXT_COLUMN, VertexNames
from weft.storage.unnamed_files import note_mapped
from weft.utils.errors import InputError
from weft.utils.migrate import versioned

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux's renameat2: paths from the current folder, and the exchange of two names."""


def save(graph: GraphFields, folder: str | Path, *, overwrite: bool = False) -> None:
    """Writes a graph as a store folder; see new_store."""
    with new_store(folder, overwrite=overwrite) as draft:
        write_store(graph, draft)


@contextmanager
def new_store(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Where a store's files are to be written; they are at `folder` when that has succeeded.

    Everything goes to a hidden sibling folder first, is flushed to disk and then renamed: no reader sees half of it.

    Raises InputError if `folder` exists, unless it is a store and `overwrite` is given.
    """
    folder = Path(folder).absolute()
    if folder.exists() or folder.is_symlink():
        if not is_store(folder):
            raise InputError(f"{folder}: exists and is no graph store: choose another folder")
        if not overwrite:
            raise InputError(f"{folder}: holds a graph store already: choose another folder, or overwrite it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        yield partial
        replace_folder(partial, folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(folder)) from error
        raise


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`, and remove what was there.

    The two are exchanged at once, so that a process that is stopped at any moment leaves the old or the new one under
    the name. Where the file system cannot do that, the old one is renamed first: a reader then says where it is.
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


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step. Return whether the system and the file system can."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other)
    return bool(renameat2(*names, RENAME_EXCHANGE) == 0)


def write_store(graph: GraphFields, folder: Path) -> None:
    """Writes arrays and manifest into an empty folder, and flushes them."""
    in_edges, transpose = graph.in_edges, graph.in_edges.transpose
    symmetric = is_symmetric(in_edges)
    arrays: dict[str, Tensor | None] = {
        "indptr": in_edges.indptr,
        "indices": in_edges.indices,
        "weight": in_edges.weight,
        "transpose_indptr": None if symmetric else transpose.indptr,
        "transpose_indices": None if symmetric else transpose.indices,
        "transpose_edge_ids": transpose.edge_ids,
        "transpose_weight": transpose.weight,
        **{name: getattr(graph, name) for name in FIELDS},
        **({} if graph.vertex_names is None else graph.vertex_names.arrays()),
        **{feature_key(graph.vertex_types, name): tensor for name, tensor in graph.features.items()},
    }
    files = {key: write_array(folder / f"{key}.npy", t.numpy()) for key, t in arrays.items() if t is not None}
    manifest = {
        "name": graph.name,
        "num_vertices": in_edges.num_targets,
        "num_edges": in_edges.num_edges,
        "symmetric": symmetric,
        "relations": list(graph.relations),
        "vertex_types": list(graph.vertex_types),
        "type_offsets": list(graph.type_offsets),
        "id_column": "" if graph.vertex_names is None else graph.vertex_names.column,
        "fingerprint": in_edges.fingerprint,
    }
    write_manifest(no_types() | manifest, files, folder)


def is_symmetric(in_edges: Adjacency) -> bool:
    """Whether edges and their transpose are the same, so that a store has them once."""
    transpose = in_edges.transpose
    return torch.equal(in_edges.indptr, transpose.indptr) and torch.equal(in_edges.indices, transpose.indices)


def no_types() -> dict[str, Any]:
    """What a manifest says of a graph with one kind of vertices and of edges."""
    return {"relations": [], "vertex_types": [], "type_offsets": []}


def write_manifest(described: dict[str, Any], files: dict[str, Any], folder: Path) -> None:
    """Writes the manifest, and flushes it and the folder. files: the entries of the arrays that were written."""
    manifest = {"format": FORMAT, **versioned("graph", described), "files": files}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def feature_key(vertex_types: tuple[str, ...], name: str) -> str:
    """The file of a vertex type's features, by number: a type's name need not be a file name."""
    return f"features_{vertex_types.index(name)}"


def sync(folder: Path) -> None:
    """Flushes a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class StoreContents(NamedTuple):
    """What a store folder holds."""

    fields: GraphFields
    """The graph's fields: views of the arrays."""
    folder: Path
    """The folder, absolute."""
    arrays: tuple[Tensor, ...]
    """Every array, memory-mapped; whoever has read them may `release` their pages."""


def read_store(folder: str | Path, *, verify: bool | None = True) -> StoreContents:
    """A store folder, memory-mapped: what is not touched is not read, and ranks of one host share pages.

    `verify` reads every file once and compares checksums; None: only the files whose size or modification time is not
    what the manifest says. Dtypes, shapes and sizes are always compared. Writing to a tensor does not reach the files.

    Raises InputError with the file, the field and the remedy for a store that is damaged, newer, or none at all.
    """
    folder = Path(folder).absolute()
    manifest = read_manifest(folder)
    path = folder / MANIFEST
    vertex_types = entries(manifest, "vertex_types", str, path)
    arrays = read_arrays(folder, manifest, verify)
    fields = GraphFields(
        in_edges=open_adjacency(arrays, entry(manifest, "symmetric", bool, path), path),
        name=entry(manifest, "name", str, path),
        relations=entries(manifest, "relations", str, path),
        vertex_types=vertex_types,
        type_offsets=entries(manifest, "type_offsets", int, path),
        vertex_names=open_names(arrays, manifest, path),
        features={name: arrays[key] for name in vertex_types if (key := feature_key(vertex_types, name)) in arrays},
        **{name: arrays.get(name) for name in FIELDS},
    )
    for array in arrays.values():
        note_mapped(array, private=True)
    return StoreContents(fields, folder, tuple(arrays.values()))


def open_names(arrays: dict[str, Tensor], manifest: dict[str, Any], path: Path) -> VertexNames | None:
    """The names of the vertices; None where the store has none."""
    found = [arrays.get(name) for name in (NUMBER_COLUMN, OFFSET_COLUMN, TEXT_COLUMN)]
    if found[0] is None and (found[1] is None or found[2] is None):
        return None
    numbers, offsets, text = found
    return VertexNames(column=entry(manifest, "id_column", str, path), numbers=numbers, offsets=offsets, text=text)


def open_adjacency(arrays: dict[str, Tensor], symmetric: bool, manifest: Path) -> Adjacency:
    """In-edges with the stored transpose; a symmetric graph's two share arrays. InputError where one is lacking."""
    needed = ["indptr", "indices", "transpose_edge_ids"]
    needed += [] if symmetric else ["transpose_indptr", "transpose_indices"]
    needed += ["transpose_weight"] if "weight" in arrays else []
    for key in needed:
        if key not in arrays:
            raise InputError(f"{manifest}: field 'files' lacks '{key}': {REMEDY}")
    transpose = Transpose(
        indptr=arrays["indptr" if symmetric else "transpose_indptr"],
        indices=arrays["indices" if symmetric else "transpose_indices"],
        edge_ids=arrays["transpose_edge_ids"],
        weight=arrays.get("transpose_weight"),
    )
    return Adjacency(
        indptr=arrays["indptr"],
        indices=arrays["indices"],
        num_sources=len(transpose.indptr) - 1,
        weight=arrays.get("weight"),
        known_transpose=transpose,
    )
