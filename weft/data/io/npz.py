"""Graphs from .npz files: the names that PyG and this project's data sets use, never a pickled object.

Plain and knowledge graphs: `edge_index` (2, E), source row first; `num_nodes`; optional `edge_weight`, `edge_type` with
`relation_names`. Typed graphs: `node_types`, `num_nodes` per type, `edge_types` "source|name|target", `edge_index|...`
of each, `target_type`. Features `x` or its CSR parts `x_data`, `x_indices`, `x_indptr`, `x_shape`, in typed graphs
`x|type` and so on. `y`; `train_mask` and so on, or `train_masks` (k, N) with k splits. Edges are taken as stored, none
is reversed. Held out for link prediction: `valid_triples` and `test_triples` (m, 3) with rows head, relation, tail, or,
where there is at most one relation, `valid_edge_index` and `test_edge_index` (2, m).
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core.errors import InputError, unknown
from weft.data.checks import MASKS, check_ids, check_length, located
from weft.data.edges import build, count_vertices
from weft.data.fields import GraphFields
from weft.data.splits import Masks, split_labelled
from weft.data.typed import VERTEX, merge_features, put_rows, vertex_relations

Arrays = dict[str, NDArray[Any]]


def read_npz(path: str | Path, *, split: int = 0, seed: int = 0) -> GraphFields:
    """The fields of a graph in an .npz file; `split` picks one of several public splits.

    Labels without any mask get a seeded 60/20/20 split over the labelled vertices.
    Raises InputError with file, key and remedy where keys are missing or disagree.
    """
    path = Path(path)
    arrays = read_all(path)
    with located(path):
        if "node_types" in arrays:
            return typed_fields(arrays, path.stem, split, seed)
        return plain_fields(arrays, path.stem, split, seed)


def read_all(path: Path) -> Arrays:
    """Every array of the file. Raises InputError if it is no .npz file, or holds pickled objects."""
    if not path.is_file():
        raise InputError(f"{path}: no such file: check the path")
    try:
        if not zipfile.is_zipfile(path):
            raise InputError(f"{path}: is no .npz file: save it with numpy.savez")
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path}: is no .npz file of plain arrays ({error}): save it with numpy.savez, without objects"
        ) from None


def plain_fields(arrays: Arrays, name: str, split: int, seed: int) -> GraphFields:
    """A graph with one kind of vertices, with or without relations."""
    source, target = edge_rows(arrays, "edge_index")
    x, y, edge_type = read_features(arrays, "x"), tensor(arrays, "y"), tensor(arrays, "edge_type")
    masks = read_masks(arrays, y, split, seed)
    num_vertices = scalar(arrays, "num_nodes") if "num_nodes" in arrays else None
    relations: tuple[str, ...] = ()
    if edge_type is not None:
        if num_vertices is None:
            num_vertices = count_vertices(source, target, "edge_index")
        relations = relation_names(arrays, edge_type)
    if num_vertices is None:
        num_vertices = next((len(rows) for rows in (x, y) if rows is not None), None)
    weight = tensor(arrays, "edge_weight")
    edges = build(source, target, num_vertices=num_vertices, weight=weight, edge_type=edge_type)
    return replace(
        edges,
        x=x,
        y=y,
        name=name,
        relations=relations,
        vertex_types=(VERTEX,) if relations else (),
        type_offsets=(0, num_vertices or 0) if relations else (),
        val_links=read_links(arrays, "valid", relations),
        test_links=read_links(arrays, "test", relations),
        **masks._asdict(),
    )


def relation_names(arrays: Arrays, edge_type: Tensor) -> tuple[str, ...]:
    """The relations of a graph with one kind of vertices: their names where the file has them, else their numbers."""
    if "relation_names" in arrays:
        names = [str(name) for name in arrays["relation_names"]]
    elif "num_relations" in arrays:
        names = [str(i) for i in range(scalar(arrays, "num_relations"))]
    else:
        names = [str(i) for i in range(int(edge_type.max()) + 1 if len(edge_type) else 0)]
    return vertex_relations(names)


def typed_fields(arrays: Arrays, name: str, split: int, seed: int) -> GraphFields:
    """A graph with several kinds of vertices, one after the other in one range of ids."""
    types = tuple(str(name) for name in need(arrays, "node_types"))
    counts = [int(count) for count in need(arrays, "num_nodes").reshape(-1)]
    if len(counts) != len(types):
        raise InputError(f"num_nodes has {len(counts)} entries for {len(types)} node_types: give one count for each")
    offsets = (0, *np.cumsum(counts).tolist())
    relations = tuple(str(name) for name in need(arrays, "edge_types"))
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    for relation in relations:
        ends = relation.split("|")
        if len(ends) != 3 or ends[0] not in types or ends[2] not in types:
            raise InputError(f"edge_types: '{relation}' is not 'source type|name|target type' over {', '.join(types)}")
        for ids, row, end, out in zip(
            edge_rows(arrays, f"edge_index|{relation}"), (0, 1), ends[::2], (sources, targets), strict=True
        ):
            check_ids(f"edge_index|{relation}[{row}]", ids, counts[types.index(end)])
            out.append(ids.long() + offsets[types.index(end)])
    sizes = torch.tensor([len(source) for source in sources])
    found = {name: read_features(arrays, f"x|{name}") for name in types}
    x, features = merge_features(types, {name: part for name, part in found.items() if part is not None})
    y, masks = typed_labels(arrays, types, offsets, split, seed)
    firsts = [offsets[types.index(end)] for end in relations[0].split("|")[::2]] if relations else [0, 0]
    none = torch.empty(0, dtype=torch.int64)
    edges = build(
        torch.cat([none, *sources]),
        torch.cat([none, *targets]),
        num_vertices=offsets[-1],
        edge_type=torch.arange(len(relations)).repeat_interleave(sizes) if relations else None,
    )
    return replace(
        edges,
        x=x,
        y=y,
        name=name,
        relations=relations,
        vertex_types=types,
        type_offsets=offsets,
        features=features,
        val_links=read_links(arrays, "valid", relations, firsts),
        test_links=read_links(arrays, "test", relations, firsts),
        **masks._asdict(),
    )


def typed_labels(
    arrays: Arrays, types: tuple[str, ...], offsets: tuple[int, ...], split: int, seed: int
) -> tuple[Tensor | None, Masks]:
    """Labels and masks of `target_type`, among all vertices: -1 (or no label at all) and False for the other types."""
    y = tensor(arrays, "y")
    if y is None:
        return None, Masks()
    target_type = str(need(arrays, "target_type"))
    if target_type not in types:
        raise unknown("target_type", target_type, types)
    first, last = offsets[types.index(target_type) : types.index(target_type) + 2]

    def place(field: str, part: Tensor | None, fill: int) -> Tensor | None:
        if part is None:
            return None
        check_length(field, part, last - first, f"vertices of type {target_type}")
        return put_rows({first: part}, offsets[-1], fill)

    masks = Masks(*(place(mask, part, 0) for mask, part in read_masks(arrays, y, split, seed)._asdict().items()))
    return place("y", y, -1 if y.dim() == 1 else 0), masks


def read_masks(arrays: Arrays, y: Tensor | None, split: int, seed: int) -> Masks:
    """The public split, the `split`-th of several, or a seeded one where there are labels and no mask at all."""
    several = {mask: tensor(arrays, f"{mask}s") for mask in MASKS}
    count = max((len(masks) for masks in several.values() if masks is not None), default=0)
    if not 0 <= split < max(count, 1):
        raise InputError(f"--split {split}: the file has {count or 'one'} split{'s, numbered from 0' if count else ''}")
    if count:
        found = [None if masks is None else masks[split] for masks in several.values()]
    else:
        found = [tensor(arrays, mask) for mask in MASKS]
    if y is not None and found == [None, None, None]:
        return split_labelled(y, seed)
    return Masks(*found)


def read_links(arrays: Arrays, split: str, relations: Sequence[str], firsts: Sequence[int] = (0, 0)) -> Tensor | None:
    """The edges held out for a split, int64 [m, 3] (source, target, relation); None if the file has none.

    firsts: the first vertex of the only relation's source type, and of its target type.
    """
    if f"{split}_triples" in arrays:
        triples = need(arrays, f"{split}_triples")
        if triples.ndim != 2 or triples.shape[1] != 3:
            raise InputError(f"{split}_triples has shape {list(triples.shape)}: save rows of head, relation, tail")
        return torch.from_numpy(triples[:, [0, 2, 1]].astype(np.int64))
    if f"{split}_edge_index" not in arrays:
        return None
    if len(relations) > 1:
        raise InputError(f"{split}_edge_index does not say which of {len(relations)} relations: save {split}_triples")
    source, target = (
        ids.long() + first for ids, first in zip(edge_rows(arrays, f"{split}_edge_index"), firsts, strict=True)
    )
    return torch.stack([source, target, torch.zeros_like(source)], 1)


def read_features(arrays: Arrays, key: str) -> Tensor | None:
    """Features [n, F], dense, from `key` or its CSR parts; None if the file has neither."""
    if key in arrays:
        return tensor(arrays, key)
    if f"{key}_data" not in arrays:
        return None
    data, indices, indptr, shape = (need(arrays, f"{key}_{part}") for part in ("data", "indices", "indptr", "shape"))
    rows, columns = (int(size) for size in shape)
    if len(indptr) != rows + 1 or not len(data) == len(indices) == indptr[-1]:
        raise InputError(
            f"{key}_indptr has {len(indptr)} entries and ends at {indptr[-1]}, for {rows} rows and {len(data)} values: "
            "write the CSR parts again"
        )
    check_ids(f"{key}_indices", torch.from_numpy(indices), columns)
    cells = np.repeat(np.arange(rows) * columns, np.diff(indptr)) + indices
    x = torch.zeros(rows * columns)
    x.index_add_(0, torch.from_numpy(cells), torch.from_numpy(data.astype(np.float32, copy=False)))
    return x.view(rows, columns)


def edge_rows(arrays: Arrays, key: str) -> tuple[Tensor, Tensor]:
    """Source and target [E] of a (2, E) array."""
    edges = need(arrays, key)
    if edges.ndim != 2 or len(edges) != 2:
        raise InputError(f"{key} has shape {list(edges.shape)}: save edges as (2, E), source row first")
    return torch.from_numpy(edges[0]), torch.from_numpy(edges[1])


def need(arrays: Arrays, key: str) -> NDArray[Any]:
    """An array by its key; InputError if the file lacks it."""
    if key not in arrays:
        raise InputError(f"lacks '{key}': it holds {', '.join(sorted(arrays))}")
    return arrays[key]


def scalar(arrays: Arrays, key: str) -> int:
    """A single whole number by its key; InputError if it is something else."""
    array = need(arrays, key)
    if array.size != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{key} is {array.dtype} of shape {list(array.shape)}: save one whole number")
    return int(array.reshape(()))


def tensor(arrays: Arrays, key: str) -> Tensor | None:
    """An array as a tensor, or None if the file lacks it; InputError if it holds no numbers."""
    if key not in arrays:
        return None
    if arrays[key].dtype.kind not in "biuf":
        raise InputError(f"{key} is {arrays[key].dtype}: save numbers")
    return torch.from_numpy(np.ascontiguousarray(arrays[key]))
