"""Edge lists from people's own files: text tables, and .npy arrays that are never read as a whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import InputError
from weft.data.checks import check_finite, located
from weft.data.edges import build
from weft.data.fields import GraphFields
from weft.data.io.arrays import map_tensor
from weft.data.io.text import Block, read_blocks
from weft.data.splits import Masks, split_labelled

TEXT_SUFFIXES = (".txt", ".csv", ".tsv")

# Larger whole numbers are not exact in a table that has a weight column, and are no vertex numbers.
MAX_ID = 1 << 53


def read_edge_list(
    path: str | Path,
    *,
    num_vertices: int | None = None,
    features: str | Path | None = None,
    labels: str | Path | None = None,
    name: str | None = None,
    seed: int = 0,
) -> GraphFields:
    """The fields of a graph from an edge list; weft.data.read_edges says what the files may hold."""
    path = Path(path)
    x = None if features is None else read_features(Path(features))
    y = None if labels is None else read_labels(Path(labels))
    if x is not None and y is not None and len(x) != len(y):
        raise InputError(f"{labels}: has {len(y)} rows, {features} has {len(x)}: give one row per vertex in both")
    sizes = [len(tensor) for tensor in (x, y) if tensor is not None]
    limit = sizes[0] if sizes and num_vertices is None else num_vertices
    if path.suffix == ".npy":
        source, target, weight = read_edge_array(path)
    else:
        source, target, weight = read_edge_table(path, limit)
    masks = Masks() if y is None else split_labelled(y, seed)
    with located(path):
        edges = build(source, target, num_vertices=limit, weight=weight)
    return replace(edges, x=x, y=y, name=path.name.split(".")[0] if name is None else name, **masks._asdict())


def read_edge_table(path: Path, num_vertices: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Source and target int64 [E], and weight float32 [E] or None, of a text table."""
    limit = MAX_ID if num_vertices is None else num_vertices
    ids, weights = [], []
    for block in read_blocks(path):
        if block.values.shape[1] not in (2, 3):
            raise block.error(0, "an edge has two columns, source and target, or three with a weight")
        ids.append(edge_ids(block, limit))
        if block.values.shape[1] == 3:
            weights.append(as_float32(block, block.values[:, 2:], "the weight must be finite, and below 3e38")[:, 0])
    if not ids and num_vertices is None:
        raise InputError(
            f"{path}: holds no edges: give lines of 'source target', or num_vertices for a graph without any"
        )
    source = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(pair[0] for pair in ids)]))
    target = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(pair[1] for pair in ids)]))
    return source, target, torch.from_numpy(np.concatenate(weights)) if weights else None


def edge_ids(block: Block, limit: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sources and targets of a block, int64 [rows]; InputError at the first line whose ids are not in [0, limit)."""
    ends = block.values[:, :2]
    check_rows(block, np.any(ends < 0, axis=1), "vertex ids count from 0: renumber them")
    past = f"the largest vertex id is {limit - 1}: correct it, or give more vertices"
    check_rows(block, np.any(ends >= limit, axis=1), past)
    with np.errstate(invalid="ignore"):  # nan and infinity are told by the next line
        ids = ends.astype(np.int64)
    check_rows(block, np.any(ids != ends, axis=1), "vertex ids are whole numbers: correct it")
    return np.ascontiguousarray(ids[:, 0]), np.ascontiguousarray(ids[:, 1])


def as_float32(block: Block, values: NDArray[Any], reason: str) -> NDArray[np.float32]:
    """Columns of a block as float32; InputError for the first row in which one is not finite, or too large for it."""
    with np.errstate(over="ignore"):
        result = values.astype(np.float32)
    check_rows(block, np.any(~np.isfinite(result), axis=1), reason)
    return result


def check_rows(block: Block, wrong: NDArray[np.bool_], reason: str) -> None:
    """Raises the block's error for the first flagged row."""
    if wrong.any():
        raise block.error(int(wrong.argmax()), reason)


def read_edge_array(path: Path) -> tuple[Tensor, Tensor, None]:
    """Source and target [E], integers, of a memory-mapped .npy array: views where its rows are contiguous."""
    edges = map_tensor(path, "edges")
    if edges.dim() != 2 or 2 not in edges.shape:
        raise InputError(f"{path}: edges have shape {list(edges.shape)}: save them as (2, E) or (E, 2)")
    pair = edges if len(edges) == 2 else edges.T
    return pair[0], pair[1], None


def read_features(path: Path) -> Tensor:
    """Features float32 [N, F] from .npy or a text table; InputError where one is not finite."""
    remedy = "features must be finite, replace missing ones, for example with 0"
    if path.suffix == ".npy":
        x = map_tensor(path, "features")
        with located(path):
            check_finite("features", x, remedy)
        return x
    blocks = []
    for block in read_blocks(path, integral=False):
        blocks.append(as_float32(block, block.values, remedy))
    return torch.from_numpy(concatenate(blocks, path))


def read_labels(path: Path) -> Tensor:
    """Labels from .npy or a text table, as they are stored: [N] for one column, else [N, C]."""
    if path.suffix == ".npy":
        y = map_tensor(path, "labels")
    else:
        y = torch.from_numpy(concatenate([block.values for block in read_blocks(path, integral=True)], path))
    return y[:, 0] if y.dim() == 2 and y.shape[1] == 1 else y


def concatenate(blocks: list[NDArray[Any]], path: Path) -> NDArray[Any]:
    """The rows of all blocks; InputError if there are none."""
    if not blocks:
        raise InputError(f"{path}: holds no rows: give one line per vertex")
    return np.concatenate(blocks)
