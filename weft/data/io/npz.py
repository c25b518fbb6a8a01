"""Graphs from .npz files: the names that PyG and this project's data sets use, never a pickled object.

Plain and knowledge graphs: `edge_index` (2, E), source row first; `num_nodes`; optional `edge_weight`, `edge_type` with
`relation_names`. Typed graphs: `node_types`, `num_nodes` per type, `edge_types` "source|name|target", `edge_index|...`
of each, `target_type`. Features `x` or its CSR parts `x_data`, `x_indices`, `x_indptr`, `x_shape`, in typed graphs
`x|type` and so on. `y`; `train_mask` and so on, or `train_masks` (k, N) with k splits. Edges are taken as stored, none
is reversed. Held out for link prediction: `valid_triples` and `test_triples` (m, 3) with rows head, relation, tail, or,
where there is at most one relation, `valid_edge_index` and `test_edge_index` (2, m). Any other
array but NOTES is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from weft.data.edges import build, count_vertices
from weft.data.fields import GraphFields
from weft.data.io.npz_arrays import (
    CSR_PARTS,
    REMEDY,
    Arrays,
    edge_rows,
    name_list,
    optional_tensor,
    read_all,
    read_features,
    required_array,
    whole_number,
    whole_numbers,
)
from weft.data.splits import Masks, split_labelled
from weft.data.store.npy import as_tensor
from weft.data.tensor_checks import MASKS, as_integers, cast, check_ids, check_length, label_dtype, located, no_label
from weft.data.vertex_types import VERTEX, merge_features, numbered_relations, put_rows, vertex_relations
from weft.utils.errors import InputError, readable, unknown

LABELS = ("y", *MASKS, *(f"{mask}s" for mask in MASKS))
HELD_OUT = ("valid_triples", "test_triples", "valid_edge_index", "test_edge_index")
PLAIN = ("edge_index", "edge_weight", "edge_type", "relation_names", "num_relations")
TYPED = ("node_types", "edge_types", "target_type")
NOTES = re.compile(r"meta|both_directions|is_literal|(train|val|test)_idx_\d+")
"""What this project's data sets tell besides, of which a graph needs nothing."""


def read_npz(path: str | Path, *, split: int = 0, seed: int = 0) -> GraphFields:
    """The fields of a graph in an .npz file; `split` picks one of several public splits.

    Labels without any mask get a seeded 60/20/20 split over the labelled vertices.
    Raises InputError with file, key and remedy where keys are missing, unknown or disagree.
    """
    path = Path(path)
    arrays = read_all(path)
    with readable(path, REMEDY), located(path):
        if "node_types" in arrays:
            fields = typed_fields(arrays, path.stem, split, seed)
        else:
            fields = plain_fields(arrays, path.stem, split, seed)
        check_names(arrays, fields)
        return fields


def plain_fields(arrays: Arrays, name: str, split: int, seed: int) -> GraphFields:
    """A graph with one kind of vertices, with or without relations."""
    source, target = edge_rows(arrays, "edge_index")
    x, y, edge_type = read_features(arrays, "x"), optional_tensor(arrays, "y"), optional_tensor(arrays, "edge_type")
    edge_type = None if edge_type is None else as_integers("edge_type", edge_type)
    masks = read_masks(arrays, y, split, seed)
    num_vertices = whole_number(arrays, "num_nodes") if "num_nodes" in arrays else None
    relations: tuple[str, ...] = ()
    if edge_type is not None:
        if num_vertices is None:
            num_vertices = count_vertices(source, target, "edge_index")
        relations = relation_names(arrays, edge_type)
    if num_vertices is None:
        num_vertices = next((len(rows) for rows in (x, y) if rows is not None), None)
    weight = optional_tensor(arrays, "edge_weight")
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


def check_names(arrays: Arrays, fields: GraphFields) -> None:
    """Raises InputError at the first array of the file that the fields were not read from, and no note."""
    known = {"num_nodes", *LABELS, *HELD_OUT}
    if "node_types" in arrays:
        known |= {*TYPED, *(f"edge_index|{name}" for name in fields.relations)}
        known |= {key for name in fields.vertex_types for key in feature_names(f"x|{name}")}
    else:
        known |= {*PLAIN, *feature_names("x")}
    for name in sorted(arrays):
        if name not in known and not NOTES.fullmatch(name):
            raise InputError(f"{unknown('array', name, known)} (or leave it out of the file)")


def feature_names(key: str) -> tuple[str, ...]:
    """The arrays that features may be in."""
    return (key, *(f"{key}_{part}" for part in CSR_PARTS))


def relation_names(arrays: Arrays, edge_type: Tensor) -> tuple[str, ...]:
    """The relations of a graph with one kind of vertices: their names where the file has them, else their numbers."""
    if "relation_names" in arrays:
        return vertex_relations(name_list(arrays, "relation_names"))
    return numbered_relations(edge_type, whole_number(arrays, "num_relations") if "num_relations" in arrays else None)


def typed_fields(arrays: Arrays, name: str, split: int, seed: int) -> GraphFields:
    """A graph with several kinds of vertices, one after the other in one range of ids."""
    types, relations = name_list(arrays, "node_types"), name_list(arrays, "edge_types")
    counts = whole_numbers(arrays, "num_nodes", len(types))
    offsets = (0, *itertools.accumulate(counts))
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
    y = optional_tensor(arrays, "y")
    if y is None:
        return None, Masks()
    y = cast("y", y, label_dtype(y))
    target_type = str(required_array(arrays, "target_type"))
    if target_type not in types:
        raise unknown("target_type", target_type, types)
    first, last = offsets[types.index(target_type) : types.index(target_type) + 2]

    def place(field: str, part: Tensor | None, fill: float) -> Tensor | None:
        if part is None:
            return None
        check_length(field, part, last - first, f"vertices of type {target_type}")
        return put_rows({first: part}, offsets[-1], fill)

    masks = Masks(*(place(mask, part, 0) for mask, part in read_masks(arrays, y, split, seed)._asdict().items()))
    return place("y", y, no_label(y)), masks


def read_masks(arrays: Arrays, y: Tensor | None, split: int, seed: int) -> Masks:
    """The public split, the `split`-th of several, or a seeded one where there are labels and no mask at all."""
    several = {mask: optional_tensor(arrays, f"{mask}s") for mask in MASKS}
    count = max((len(masks) for masks in several.values() if masks is not None), default=0)
    if not 0 <= split < max(count, 1):
        raise InputError(f"--split {split}: the file has {count or 'one'} split{'s, numbered from 0' if count else ''}")
    if count:
        found = [None if masks is None else masks[split : split + 1].flatten() for masks in several.values()]
    else:
        found = [optional_tensor(arrays, mask) for mask in MASKS]
    if y is not None and found == [None, None, None]:
        return split_labelled(y, seed)
    return Masks(*found)


def read_links(arrays: Arrays, split: str, relations: Sequence[str], firsts: Sequence[int] = (0, 0)) -> Tensor | None:
    """The edges held out for a split, int64 [m, 3] (source, target, relation); None if the file has none.

    firsts: the first vertex of the only relation's source type, and of its target type.
    """
    if f"{split}_triples" in arrays:
        triples = as_tensor(f"{split}_triples", required_array(arrays, f"{split}_triples"))
        if triples.dim() != 2 or triples.shape[1] != 3:
            raise InputError(f"{split}_triples has shape {list(triples.shape)}: save rows of head, relation, tail")
        return cast(f"{split}_triples", triples, torch.int64)[:, [0, 2, 1]]
    if f"{split}_edge_index" not in arrays:
        return None
    if len(relations) > 1:
        raise InputError(f"{split}_edge_index does not say which of {len(relations)} relations: save {split}_triples")
    source, target = (
        ids.long() + first for ids, first in zip(edge_rows(arrays, f"{split}_edge_index"), firsts, strict=True)
    )
    return torch.stack([source, target, torch.zeros_like(source)], 1)
