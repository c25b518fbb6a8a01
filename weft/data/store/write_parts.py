"""Writing of a graph folder from a graph in parts: edges and features are never in memory as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from weft.data.adjacency import topology_digest
from weft.data.checks.tensor_checks import check_ids
from weft.data.edges import check_sparse_ids, vertex_count, warn_merged
from weft.data.io.graph_parts import EdgesOfPart, GraphParts, require_rows
from weft.data.store.external_sort import RecordFile, Records, ReportProgress, sorted_records
from weft.data.store.npy import array_of
from weft.data.store.npy_writer import ArrayWriter, write_array
from weft.data.store.store import feature_key, schema_entry, write_manifest
from weft.runtime.memory.heap import release_freed_memory
from weft.runtime.native import id_dtype
from weft.storage.quantized_table import FeatureTable, feature_arrays
from weft.storage.unnamed_files import release
from weft.utils.errors import InputError

BLOCK_EDGES = 1 << 20
"""Number of edges or entries that are processed at once."""
MAX_ID = 1 << 53
"""Limit of ids if the number of vertices is unknown; larger ids would not be exact as float64."""


def write_parts(parts: GraphParts, folder: Path, report: ReportProgress) -> None:
    """Write arrays and manifest to an empty folder and flush them: the same files as for the graph gathered in memory.

    Memory: 40 bytes per vertex, the tensors of GraphParts, and parts of a few million edges.

    Args:
        parts: The graph.
        folder: The folder.
        report: Called with lines of progress.

    Raises:
        InputError: If the parts are inconsistent.
    """
    none = torch.empty(0, dtype=torch.int64)
    edges = parts.edges()
    first_part = next(edges, EdgesOfPart(source=none, target=none))
    if parts.generated:
        assert parts.num_vertices is not None
        num_vertices = vertex_count(parts.num_vertices)
        dtype = record_type(first_part, numpy_ids(num_vertices))
        degree, files = write_forward(
            parts, lambda: generated_records(parts, dtype), dtype, num_vertices, folder, report
        )
    else:
        dtype = record_type(first_part)
        with closing(RecordFile(folder, "edges.tmp", dtype)) as spool:
            num_vertices = spool_edges(spool, itertools.chain([first_part], edges), parts, report)
            release_freed_memory()
            degree, files = write_forward(parts, spool.blocks, dtype, num_vertices, folder, report)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(degree)])
    del degree
    release_freed_memory()
    files["indptr"] = write_array(folder / "indptr.npy", indptr)
    symmetric, backward = write_transpose(indptr, folder, files, report)
    files |= backward
    readers = {} if parts.x is None else {"x": (parts.x, num_vertices)}
    for vertex_type, read in parts.features.items():
        first, last = parts.type_offsets[parts.vertex_types.index(vertex_type) :][:2]
        readers[feature_key(parts.vertex_types, vertex_type)] = (read, last - first)
    for key, (read, count) in readers.items():
        files |= write_features(read, count, folder, key, report)
    tensors = {"y": parts.y, **parts.masks._asdict()}
    tensors |= {} if parts.vertex_names is None else parts.vertex_names.arrays()
    tensors |= {} if parts.edge_labels is None else parts.edge_labels().arrays()
    files |= {name: write_array(folder / f"{name}.npy", t.numpy()) for name, t in tensors.items() if t is not None}
    manifest = {
        "name": parts.name,
        "num_vertices": num_vertices,
        "num_edges": int(indptr[-1]),
        "symmetric": symmetric,
        "relations": list(parts.relations),
        "vertex_types": list(parts.vertex_types),
        "type_offsets": list(parts.type_offsets),
        "id_column": "" if parts.vertex_names is None else parts.vertex_names.column,
        **schema_entry(parts.schema),
        "fingerprint": fingerprint(folder, num_vertices, int(indptr[-1])),
    }
    write_manifest(manifest, files, folder)


def spool_edges(spool: RecordFile, edges: Iterator[EdgesOfPart], parts: GraphParts, report: ReportProgress) -> int:
    """Write the edges to a file in the order in which they come, and return the number of vertices.

    Args:
        spool: The file.
        edges: The edges in parts.
        parts: The graph.
        report: Called with lines of progress.

    Raises:
        InputError: If parts differ in their fields, or an id is out of range.
    """
    largest, limit = -1, MAX_ID if parts.num_vertices is None else parts.num_vertices
    for part in edges:
        if record_type(part) != spool.dtype:
            raise InputError(f"{parts.name}: parts of the edges differ in weights or features: give all the same")
        for side in ("source", "target"):
            check_ids(f"{parts.place}: {side}", getattr(part, side), limit)
        for first in range(0, len(part.source), BLOCK_EDGES):
            block = part.rows(first, first + BLOCK_EDGES)
            spool.add(records_of(block, spool.dtype))
            release(block.source)
            release(block.target)
        if len(part.source):
            largest = max(largest, int(part.source.max()), int(part.target.max()))
        report(f"read {spool.num_records:,} edges")
    if parts.num_vertices is None:
        return vertex_count(check_sparse_ids(largest + 1, spool.num_records, "edges"))
    return vertex_count(parts.num_vertices)


def record_type(part: EdgesOfPart, ids: DTypeLike = np.int64) -> np.dtype[Any]:
    """Return the dtype of records of edges into `row` from `col`.

    Args:
        part: A part of the edges, for its fields.
        ids: Dtype of ids.
    """
    fields: list[Any] = [("row", ids), ("col", ids)]
    if part.weight is not None:
        fields.append(("weight", np.float32))
    if part.features is not None:
        fields.append(("features", np.float32, (part.features.shape[1],)))
    if part.relation is not None:
        fields.append(("relation", np.int16))
    return np.dtype(fields)


def records_of(part: EdgesOfPart, dtype: np.dtype[Any]) -> Records:
    """Return edges as records.

    Args:
        part: The edges.
        dtype: Dtype of the records.
    """
    records = np.empty(len(part.source), dtype)
    records["row"], records["col"] = part.target.numpy(), part.source.numpy()
    for name in ("weight", "features", "relation"):
        if (tensor := getattr(part, name)) is not None:
            records[name] = tensor.numpy()
    return records


def generated_records(parts: GraphParts, dtype: np.dtype[Any]) -> Iterator[Records]:
    """Yield the edges of a generated graph in order, in blocks.

    Args:
        parts: The graph.
        dtype: Dtype of the records.
    """
    for part in parts.edges():
        for first in range(0, len(part.source), BLOCK_EDGES):
            yield records_of(part.rows(first, first + BLOCK_EDGES), dtype)


def write_forward(
    parts: GraphParts,
    read_edges: Callable[[], Iterator[Records]],
    edge_dtype: np.dtype[Any],
    num_vertices: int,
    folder: Path,
    report: ReportProgress,
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Write the in-edges with weights and features.

    Args:
        parts: The graph.
        read_edges: Function that yields all edges in the order in which they came, in blocks.
        edge_dtype: Dtype of these blocks.
        num_vertices: Number of vertices.
        folder: The folder.
        report: Called with lines of progress.

    Returns:
        In-degree of each vertex, int64 [N], and the manifest entries of the files.
    """
    ids = numpy_ids(num_vertices)
    fields = [(name, *rest) for name, *rest in edge_dtype.descr if name not in ("row", "col")]
    dtype = np.dtype([("row", ids), ("col", ids), *fields, *([("reversed", np.bool_)] if parts.undirected else [])])
    degree = np.zeros(num_vertices, np.int64)

    def read() -> Iterator[Records]:
        for block in read_edges():
            records = np.zeros(len(block), dtype)
            for name in edge_dtype.names or ():
                records[name] = block[name]
            yield records
            if parts.undirected:
                backward = records.copy()
                backward["row"], backward["col"], backward["reversed"] = records["col"], records["row"], True
                yield backward

    fields_of = {"indices": "col", "weight": "weight", "edge_features": "features", "edge_type": "relation"}
    stored = {name: field for name, field in fields_of.items() if field in (dtype.names or ())}
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(ArrayWriter(folder / f"{name}.npy", dtype[field].base, dtype[field].shape))
            for name, field in stored.items()
        }
        num_differing = 0
        for block in sorted_records(read, dtype, num_vertices, num_vertices, folder, report):
            if parts.undirected:
                block, num_pairs = first_of_runs(block)
                num_differing += num_pairs
            np.add.at(degree, block["row"], 1)
            for name, field in stored.items():
                writers[name].add(block[field])
        warn_merged(num_differing)
        return degree, {name: writer.finish() for name, writer in writers.items()}


def first_of_runs(records: Records) -> tuple[Records, int]:
    """Merge duplicate edges: keep the first record of each (row, column), preferring input edges to reversed ones.

    Returns:
        The merged edges, and the number of pairs of vertices whose edges differ in weight or features.
    """
    # Number the runs of equal pairs, sort by (run, reversed, position), and take the first record of each run.
    new = np.ones(len(records), bool)
    new[1:] = (records["row"][1:] != records["row"][:-1]) | (records["col"][1:] != records["col"][:-1])
    run, position = np.cumsum(new) - 1, np.arange(len(records))
    order = np.lexsort((position, records["reversed"], run))
    first = records[order[np.flatnonzero(new)]]
    differs = np.zeros(len(records), bool)
    for name in {"weight", "features"}.intersection(records.dtype.names or ()):
        unequal = records[name] != first[name][run]
        differs |= unequal.any(1) if unequal.ndim > 1 else unequal
    # The edges of two vertices form two runs, one for each direction: count one of them.
    return first, len(np.unique(run[differs & (records["row"] <= records["col"])]))


def write_transpose(
    indptr: NDArray[np.int64], folder: Path, forward: Collection[str], report: ReportProgress
) -> tuple[bool, dict[str, Any]]:
    """Write the transpose: the edges sorted by source. A symmetric graph shares the arrays of the in-edges.

    Args:
        indptr: Row pointers of the in-edges, int64 [N + 1].
        folder: Folder with the files of the in-edges.
        forward: Names of the arrays of the in-edges; the transpose has weights and edge ids only if they have.
        report: Called with lines of progress.

    Returns:
        Whether the graph is symmetric, and the manifest entries of the files.
    """
    num_vertices, num_edges = len(indptr) - 1, int(indptr[-1])
    ids, positions = numpy_ids(num_vertices), numpy_ids(num_edges)
    weighted, numbered = "weight" in forward, not {"weight", "edge_features", "edge_type"}.isdisjoint(forward)
    fields_of_edge: list[Any] = [("row", ids), ("col", ids)]
    fields_of_edge += [("position", positions)] * numbered + [("weight", "<f4")] * weighted
    dtype = np.dtype(fields_of_edge)

    def read() -> Iterator[Records]:
        for first in range(0, num_edges, BLOCK_EDGES):
            last = min(first + BLOCK_EDGES, num_edges)
            records = np.empty(last - first, dtype)
            records["row"] = read_rows(folder / "indices.npy", first, last)
            records["col"] = owners(indptr, first, last)
            if numbered:
                records["position"] = np.arange(first, last)
            if weighted:
                records["weight"] = read_rows(folder / "weight.npy", first, last)
            yield records

    fields = {"transpose_indices": "col", "transpose_edge_ids": "position", "transpose_weight": "weight"}
    stored = {name: field for name, field in fields.items() if field in (dtype.names or ())}
    degree, symmetric, position = np.zeros(num_vertices, np.int64), True, 0
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(ArrayWriter(folder / f"{name}.npy", dtype[field]))
            for name, field in stored.items()
        }
        for block in sorted_records(read, dtype, num_vertices, num_vertices, folder, report):
            np.add.at(degree, block["row"], 1)
            symmetric &= np.array_equal(
                block["col"], read_rows(folder / "indices.npy", position, position + len(block))
            )
            position += len(block)
            for name, field in stored.items():
                writers[name].add(block[field])
        files = {name: writer.finish() for name, writer in writers.items()}
    transposed = np.concatenate([np.zeros(1, np.int64), np.cumsum(degree)])
    if symmetric and np.array_equal(transposed, indptr):
        (folder / "transpose_indices.npy").unlink()
        del files["transpose_indices"]
        return True, files
    files["transpose_indptr"] = write_array(folder / "transpose_indptr.npy", transposed)
    return False, files


def write_features(
    read: Callable[[], Iterator[FeatureTable]], num_vertices: int, folder: Path, key: str, report: ReportProgress
) -> dict[str, Any]:
    """Write features, and return the manifest entries of their files.

    Args:
        read: Function that yields the features in parts.
        num_vertices: Number of vertices that should have some.
        folder: The folder.
        key: Name of the features in the folder.
        report: Called with lines of progress.

    Raises:
        InputError: If there is not one row per vertex.
    """
    rows = read()
    first_rows = next(rows, torch.empty(0, 0))
    arrays = feature_arrays({key: first_rows})
    first_values = arrays.pop(key)
    with ArrayWriter(folder / f"{key}.npy", array_of(first_values).dtype, tuple(first_values.shape[1:])) as writer:
        for part in itertools.chain([first_rows], rows):
            values = feature_arrays({key: part})[key]
            for block in values.split(max(1, BLOCK_EDGES // max(1, values.shape[1]))):
                writer.add(array_of(block))
                release(block)
            report(f"wrote features of {writer.num_rows:,} vertices")
        require_rows("features", writer.num_rows, num_vertices)
        files = {key: writer.finish()}
    return files | {name: write_array(folder / f"{name}.npy", array_of(scale)) for name, scale in arrays.items()}


def owners(indptr: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
    """Return the row of each entry in a range.

    Args:
        indptr: Row pointers, int64 [n + 1].
        first: Position of the first entry.
        last: Position after the last entry.
    """
    low, high = np.searchsorted(indptr, (first, last - 1), side="right") - 1
    bounds = indptr[low : high + 2].clip(first, last)
    return np.repeat(np.arange(low, high + 1), np.diff(bounds))


def read_rows(path: Path, first: int, last: int) -> NDArray[Any]:
    """Return a range of entries of a .npy file of single numbers, read instead of mapped.

    Args:
        path: The file.
        first: Position of the first entry.
        last: Position after the last entry.
    """
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
        return np.fromfile(file, dtype, last - first, offset=first * dtype.itemsize)


def fingerprint(folder: Path, num_vertices: int, num_edges: int) -> str:
    """Return Adjacency.fingerprint of the edges in a folder.

    Args:
        folder: The folder.
        num_vertices: Number of vertices.
        num_edges: Number of edges.
    """
    digest = topology_digest(num_vertices, num_edges)
    for name, length in (("indptr", num_vertices + 1), ("indices", num_edges)):
        for first in range(0, length, BLOCK_EDGES):
            digest.update(read_rows(folder / f"{name}.npy", first, min(first + BLOCK_EDGES, length)).data)
    return str(digest.hexdigest())


def numpy_ids(count: int) -> np.dtype[Any]:
    """Return the narrowest integer dtype that can number `count` things."""
    return np.dtype(str(id_dtype(count)).removeprefix("torch."))
