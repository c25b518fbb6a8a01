"""Folders of OGB's node property data sets as downloaded: text tables or .npz files, read in parts."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data.checks.tensor_checks import Float32Rounding, check_finite, check_ids, located
from weft.data.io.graph_parts import EdgesOfPart, GraphParts
from weft.data.splits import Masks
from weft.data.store.npy import Header, parsing, read_header
from weft.data.tables.edge_list import read_edge_table
from weft.data.tables.table_labels import labels_of
from weft.data.tables.text_table import read_blocks
from weft.utils.errors import InputError
from weft.utils.files.file_reading import open_regular

EDGES, BINARY = "edge.csv.gz", "data.npz"
SPLITS = ("train", "valid", "test")
PART_BYTES = 1 << 26
REMEDY = "download it again"

Rows = Iterator[NDArray[Any]]


def is_ogb(folder: Path) -> bool:
    """Return whether a folder is one of OGB's."""
    return any((folder / "raw" / name).is_file() for name in (EDGES, BINARY, "triplet-type-list.csv.gz"))


def ogb_parts(folder: Path, *, split: int = 0, undirected: bool = False) -> GraphParts:
    """Return the graph in a folder with raw/ and split/.

    Args:
        folder: The folder.
        split: Number of the split among several, in alphabetical order of their names.
        undirected: Add the reverse of each edge and merge duplicates.

    Raises:
        InputError: If files are missing or inconsistent, or contain several graphs or vertex types.
    """
    raw = folder / "raw"
    if (raw / "triplet-type-list.csv.gz").is_file():
        raise InputError(
            f"{folder}: contains several vertex types: load it as OGB's PyG data set and call weft.Graph.from_pyg"
        )
    counts = binary(raw, "num_nodes_list") if (raw / BINARY).is_file() else table(raw / "num-node-list.csv.gz")
    sizes = np.concatenate(list(counts)).reshape(-1)
    if len(sizes) != 1:
        raise InputError(f"{raw}: contains {len(sizes)} graphs: weft trains on one, give a node property data set")
    num_vertices = int(sizes[0])
    labels = list(label_rows(raw))
    y = labels_of(np.concatenate(labels).astype(np.float64)) if labels else None
    return GraphParts(
        name=folder.resolve().name,
        edges=lambda: read_edges(raw, num_vertices),
        num_vertices=num_vertices,
        x=feature_reader(raw),
        y=y,
        masks=read_splits(folder / "split", num_vertices, split),
        undirected=undirected,
    )


def label_rows(raw: Path) -> Rows:
    """Yield the labels in parts [n, C]; nothing if there are none."""
    if (raw / "node-label.npz").is_file():
        return binary(raw, "node_label", "node-label.npz")
    path = raw / "node-label.csv.gz"
    return table(path, integral=False) if path.is_file() else iter(())


def feature_reader(raw: Path) -> Callable[[], Iterator[Tensor]] | None:
    """Return a function that yields the features of the vertices in parts; None if there are none."""
    if (raw / BINARY).is_file():
        with opened(raw / BINARY) as archive:
            if "node_feat.npy" not in archive.namelist():
                return None
        return lambda: finite(binary(raw, "node_feat"), raw / BINARY)
    path = raw / "node-feat.csv.gz"
    return (lambda: finite(table(path, integral=False), path)) if path.is_file() else None


def finite(rows: Rows, path: Path) -> Iterator[Tensor]:
    """Yield features in parts, [n, F], in float16 if they are; otherwise in float32.

    Args:
        rows: The features in parts.
        path: Their file, for errors.

    Raises:
        InputError: If one is not finite.
    """
    rounding = Float32Rounding()
    for part in rows:
        with np.errstate(over="ignore"):
            x = torch.from_numpy(part.astype(np.float16 if part.dtype == np.float16 else np.float32))
        with located(path):
            check_finite("features", x, "features must be finite, replace missing ones, for example with 0")
        rounding.add(f"{path}: features", part, x.numpy())
        yield x
    rounding.warn()


def read_edges(raw: Path, num_vertices: int) -> Iterator[EdgesOfPart]:
    """Yield the edges in parts, with features if there are any.

    Args:
        raw: Folder of the files.
        num_vertices: Number of vertices.

    Raises:
        InputError: For an id that no vertex has, and if there are fewer features than edges.
    """
    path = raw / (BINARY if (raw / BINARY).is_file() else EDGES)
    edge_parts = binary_edges(raw, num_vertices) if path.name == BINARY else read_edge_table(path, num_vertices)
    features = raw / "edge-feat.csv.gz"
    feature_parts = finite(table(features, integral=False), features) if features.is_file() else None
    # Features come in other parts than edges: collect them until there are enough for a part of edges.
    pending = torch.empty(0, 0)
    for part in edge_parts:
        if feature_parts is None:
            yield part
            continue
        while len(pending) < len(part.source):
            rows = next(feature_parts, None)
            if rows is None:
                raise InputError(f"{features}: has fewer rows than {path} has edges: {REMEDY}")
            pending = torch.cat([pending.reshape(-1, rows.shape[1]), rows])
        yield replace(part, features=pending[: len(part.source)])
        pending = pending[len(part.source) :]


def binary_edges(raw: Path, num_vertices: int) -> Iterator[EdgesOfPart]:
    """Yield the edges of an .npz file in parts.

    Args:
        raw: Folder of the file.
        num_vertices: Number of vertices.

    Raises:
        InputError: For an id that no vertex has.
    """
    for pair in zip(binary(raw, "edge_index", row=0), binary(raw, "edge_index", row=1), strict=True):
        source, target = (torch.from_numpy(ids.astype(np.int64)) for ids in pair)
        with located(raw / BINARY):
            check_ids("edge_index[0]", source, num_vertices)
            check_ids("edge_index[1]", target, num_vertices)
        yield EdgesOfPart(source=source, target=target)


def read_splits(folder: Path, num_vertices: int, split: int) -> Masks:
    """Return the masks of one split; empty Masks if there are no splits.

    Args:
        folder: Folder with a folder for each split.
        num_vertices: Number of vertices.
        split: Number of the split, in alphabetical order.

    Raises:
        InputError: If there is no such split.
    """
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    if not names and not split:
        return Masks()
    if not 0 <= split < len(names):
        raise InputError(f"--split {split}: {folder} has {', '.join(names) or 'none'}, numbered from 0")
    masks = []
    for name in SPLITS:
        path = folder / names[split] / f"{name}.csv.gz"
        ids = torch.from_numpy(np.concatenate([np.empty((0, 1), np.int64), *table(path)])[:, 0])
        with located(path):
            check_ids("ids", ids, num_vertices)
        masks.append(torch.zeros(num_vertices, dtype=torch.bool).index_fill_(0, ids, True))
    return Masks(*masks)


def table(path: Path, *, integral: bool = True) -> Rows:
    """Yield a text table in parts, int64 or float64 [n, columns].

    Args:
        path: The file.
        integral: Read integers instead of floats.
    """
    for block in read_blocks(path, integral=integral):
        yield block.values


def binary(raw: Path, key: str, name: str = BINARY, row: int | None = None) -> Rows:
    """Yield an array of an .npz file in parts of its rows, unpacked while it is read.

    Args:
        raw: Folder of the file.
        key: Key of the array.
        name: Name of the file.
        row: Read this row of the array only, in parts of its entries.
    """
    path = raw / name
    with opened(path) as archive, member(archive, key, path) as (file, header):
        if header.fortran_order and len(header.shape) > 1:
            raise InputError(f"{path}: {key} is stored by columns: save numpy.ascontiguousarray of it")
        shape = header.shape if row is None else header.shape[1:]
        row_bytes = header.dtype.itemsize * int(np.prod(shape[1:]))
        file.seek((row or 0) * header.dtype.itemsize * int(np.prod(header.shape[1:])), 1)
        at_once = max(1, PART_BYTES // max(1, row_bytes))
        for first in range(0, shape[0], at_once):
            num_rows = min(at_once, shape[0] - first)
            data = file.read(num_rows * row_bytes)
            yield np.frombuffer(data, header.dtype).reshape(num_rows, *shape[1:])


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an .npz file. Raises InputError if the file is damaged or of another format."""
    with parsing(path, REMEDY), open_regular(path) as file, zipfile.ZipFile(file) as archive:
        yield archive


@contextmanager
def member(archive: zipfile.ZipFile, key: str, path: Path) -> Iterator[tuple[IO[bytes], Header]]:
    """Open an array of an .npz file, positioned at its data, and read its header.

    Args:
        archive: The file.
        key: Key of the array.
        path: Path of the file, for errors.

    Raises:
        InputError: If it is missing.
    """
    if f"{key}.npy" not in archive.namelist():
        raise InputError(f"{path}: no array '{key}' in the file: {REMEDY}")
    with archive.open(f"{key}.npy") as file:
        yield file, read_header(file, archive.getinfo(f"{key}.npy").file_size)
