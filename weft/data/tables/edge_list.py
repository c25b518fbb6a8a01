"""Edge lists from users' files: text tables, and .npy arrays that are never read as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data.checks.tensor_checks import (
    BLOCK_ENTRIES,
    FEATURE_DTYPES,
    Float32Rounding,
    cast,
    check_finite,
    located,
    vertex_ids,
    warn_whole_values,
)
from weft.data.io.graph_parts import EdgesOfPart, GraphParts
from weft.data.splits import Masks, split_labelled, split_vertices
from weft.data.store.npy import map_array, map_tensor
from weft.data.tables.table import FrameTable, InputTable, TextTable
from weft.data.tables.table_labels import split_column
from weft.data.tables.text_table import TextBlock, read_blocks
from weft.utils.errors import InputError

TEXT_SUFFIXES = (".txt", ".csv", ".tsv")

MAX_ID = 1 << 53
"""Limit of ids if the number of vertices is unknown; larger ids would not be exact in a table with a weight column."""

NAMES_HINT = "; to import vertices with names, use 'weft data import --edges FILE'"


def edge_list_parts(
    path: str | Path,
    *,
    num_vertices: int | None = None,
    features: str | Path | None = None,
    labels: str | Path | None = None,
    split: str | Path | None = None,
    shares: Sequence[float] | None = None,
    undirected: bool = False,
    name: str | None = None,
    seed: int = 0,
) -> GraphParts:
    """Return a graph from an edge list; weft.data.read_edges describes the files.

    Args:
        path: File of the edges.
        num_vertices: Number of vertices. Default: the rows of features or labels, else one more than the largest id.
        features: File of the features.
        labels: File of the labels.
        split: File of the split.
        shares: Fractions of a random split, instead of `split`.
        undirected: Add the reverse of each edge and merge duplicates.
        name: Name of the graph. Default: the file's name.
        seed: Seed of a random split.

    Raises:
        InputError: If features and labels disagree, or the number of vertices of a split is unknown.
    """
    path = Path(path)
    x = None if features is None else read_features(Path(features))
    y = None if labels is None else read_labels(Path(labels))
    if x is not None and y is not None and len(x) != len(y):
        raise InputError(f"{labels}: has {len(y)} rows, {features} has {len(x)}: give one row per vertex in both")
    sizes = [len(tensor) for tensor in (x, y) if tensor is not None]
    limit = sizes[0] if sizes and num_vertices is None else num_vertices
    masks = Masks() if y is None else split_labelled(y, seed)
    if split is not None:
        masks = read_split(Path(split))
    elif shares is not None:
        if limit is None:
            raise InputError(f"{path}: a random split needs the number of vertices: give --labels or --features")
        masks = split_vertices(y, limit, seed, shares)
    return GraphParts(
        name=path.name.split(".")[0] if name is None else name,
        place=str(path),
        edges=lambda: read_edge_array(path) if path.suffix == ".npy" else read_edge_table(path, limit),
        num_vertices=limit,
        x=None if x is None else lambda: feature_blocks(x, f"{features}: features"),
        y=y,
        masks=masks,
        undirected=undirected,
    )


def read_edge_table(path: Path, num_vertices: int | None) -> Iterator[EdgesOfPart]:
    """Yield the edges of a text table in parts, with weights if it has three columns.

    Args:
        path: The file.
        num_vertices: Number of vertices; None: unknown.

    Raises:
        InputError: At the first line that is no edge.
    """
    limit, block, rounding = MAX_ID if num_vertices is None else num_vertices, None, Float32Rounding()
    for block in read_blocks(path, remedy=NAMES_HINT):
        if block.values.shape[1] not in (2, 3):
            raise block.error(0, "an edge has two columns, source and target, or three with a weight")
        source, target = (torch.from_numpy(ids) for ids in edge_ids(block, limit))
        weight = None
        if block.values.shape[1] == 3:
            weights = as_float32(block, block.values[:, 2:], "the weight must be finite, and below 3e38", rounding)
            weight = torch.from_numpy(weights)[:, 0]
        yield EdgesOfPart(source=source, target=target, weight=weight)
    rounding.warn()
    if block is None and num_vertices is None:
        raise InputError(
            f"{path}: holds no edges: give lines of 'source target', or num_vertices for a graph without any"
        )


def edge_ids(block: TextBlock, limit: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sources and targets of a block, int64 [rows].

    Args:
        block: Lines of the table.
        limit: Number that ids must be below.

    Raises:
        InputError: At the first line with an id out of range.
    """
    endpoints = block.values[:, :2]
    check_rows(block, np.any(endpoints < 0, axis=1), "vertex ids count from 0: renumber them")
    too_large = f"the largest vertex id is {limit - 1}: correct it, or give more vertices"
    check_rows(block, np.any(endpoints >= limit, axis=1), too_large)
    with np.errstate(invalid="ignore"):  # the next check reports NaN and infinity
        ids = endpoints.astype(np.int64)
    check_rows(block, np.any(ids != endpoints, axis=1), "vertex ids are whole numbers: correct it")
    return np.ascontiguousarray(ids[:, 0]), np.ascontiguousarray(ids[:, 1])


def as_float32(block: TextBlock, values: NDArray[Any], reason: str, rounding: Float32Rounding) -> NDArray[np.float32]:
    """Return columns of a block as float32.

    Args:
        block: Lines of the table.
        values: Columns of the block.
        reason: Problem and remedy, for the error.
        rounding: Counts the numbers that become equal.

    Raises:
        InputError: At the first row with a number that is not finite as float32.
    """
    with np.errstate(over="ignore"):
        result = values.astype(np.float32)
    check_rows(block, np.any(~np.isfinite(result), axis=1), reason)
    rounding.add(f"{block.path}: column", values, result)
    return result


def check_rows(block: TextBlock, wrong: NDArray[np.bool_], reason: str) -> None:
    """Check that no row of a block is flagged.

    Args:
        block: Lines of the table.
        wrong: Flags, bool [rows].
        reason: Problem and remedy, for the error.

    Raises:
        InputError: At the first flagged row.
    """
    if wrong.any():
        raise block.error(int(wrong.argmax()), reason)


def read_edge_array(path: Path) -> Iterator[EdgesOfPart]:
    """Yield the edges of a memory-mapped .npy array of integers, as views if its rows are contiguous."""
    edges = map_tensor(path, "edges")
    if edges.dim() != 2 or 2 not in edges.shape:
        raise InputError(f"{path}: edges have shape {list(edges.shape)}: save them as (2, E) or (E, 2)")
    pair = edges if len(edges) == 2 else edges.T
    with located(path):
        source, target = (vertex_ids(f"edge_index[{row}]", pair[row]) for row in (0, 1))
    yield EdgesOfPart(source=source, target=target)


def read_features(path: Path) -> Tensor:
    """Return features, [N, F], from .npy or a text table. Raises InputError if one is not finite."""
    remedy = "features must be finite, replace missing ones, for example with 0"
    if path.suffix == ".npy":
        x = map_tensor(path, "features")
        with located(path):
            check_finite("features", x, remedy)
        return x
    blocks, rounding = [], Float32Rounding()
    for block in read_blocks(path, integral=False):
        blocks.append(as_float32(block, block.values, remedy, rounding))
    rounding.warn()
    return torch.from_numpy(concatenate(blocks, path))


def feature_blocks(x: Tensor, place: str) -> Iterator[Tensor]:
    """Yield features in one of FEATURE_DTYPES, in blocks if they have to be converted to float32.

    Args:
        x: Features of any dtype, [N, F].
        place: File and array, for errors.

    Raises:
        InputError: At the first number that float32 cannot hold.
    """
    if x.dtype in FEATURE_DTYPES or x.dim() != 2:
        yield x
        return
    rounding = Float32Rounding()
    for block in x.split(max(1, BLOCK_ENTRIES // max(1, x.shape[1]))):
        rows = cast(place, block, torch.float32, rounding)
        yield rows
    rounding.warn()


def read_labels(path: Path) -> Tensor:
    """Return labels from .npy or a text table as they are stored: [N] for one column, else [N, C]."""
    if path.suffix == ".npy":
        y = map_tensor(path, "labels")
        with located(path):
            warn_whole_values(y)
    else:
        y = torch.from_numpy(concatenate([block.values for block in read_blocks(path, integral=True)], path))
    return y[:, 0] if y.dim() == 2 and y.shape[1] == 1 else y


def read_split(path: Path) -> Masks:
    """Return a split from .npy or a text table of one column: train, val, test, or 0, 1, 2; -1 or 'none' for none."""
    if path.suffix == ".npy":
        table: InputTable = FrameTable({"split": map_array(path)}, str(path))
    else:
        table = TextTable(path)
    return split_column(table, table.columns[0])


def concatenate(blocks: list[NDArray[Any]], path: Path) -> NDArray[Any]:
    """Return the rows of all blocks.

    Args:
        blocks: The blocks.
        path: The file, for errors.

    Raises:
        InputError: If there are none.
    """
    if not blocks:
        raise InputError(f"{path}: holds no rows: give one line per vertex")
    return np.concatenate(blocks)
