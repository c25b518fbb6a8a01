"""Graphs from .npz files with the keys that PyG and this project's data sets use. No object is unpickled.

Plain and knowledge graphs: `edge_index` (2, E), source row first; `num_nodes`; optional `edge_weight`, and `edge_type`
with `relation_names`. Typed graphs: `node_types`, `num_nodes` per type, `edge_types` "source|name|target",
`edge_index|...` for each of these, `target_type`. Features: `x`, or its CSR parts `x_data`, `x_indices`, `x_indptr`,
`x_shape`; in typed graphs `x|type` and so on. Labels: `y`. Splits: `train_mask` and so on, or `train_masks` (k, N) with
k splits. Edges are taken as stored; none is reversed. Held-out edges for link prediction: `valid_triples` and
`test_triples` (m, 3) with rows head, relation, tail; or, with at most one relation, `valid_edge_index` and
`test_edge_index` (2, m). Any other array is refused, except for those that NOTES matches.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from weft.data.checks.tensor_checks import (
    MASKS,
    as_integers,
    cast,
    check_ids,
    check_length,
    located,
    no_label,
    user_labels,
)
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
from weft.data.vertex_types import VERTEX, merge_features, numbered_relations, put_rows, vertex_relations
from weft.utils.errors import InputError, readable, unknown

LABELS = ("y", *MASKS, *(f"{mask}s" for mask in MASKS))
HELD_OUT = ("valid_triples", "test_triples", "valid_edge_index", "test_edge_index")
PLAIN = ("edge_index", "edge_weight", "edge_type", "relation_names", "num_relations")
TYPED = ("node_types", "edge_types", "target_type")
NOTES = re.compile(r"meta|both_directions|is_literal|(train|val|test)_idx_\d+")
"""Keys in this project's data sets that a graph does not need."""


def read_npz(path: str | Path, *, split: int = 0, seed: int = 0) -> GraphFields:
    """Return the fields of a graph in an .npz file.

    Labels without any mask get a seeded 60/20/20 split over the labelled vertices.

    Args:
        path: The file.
        split: Number of the public split, if there are several.
        seed: Seed of a split.

    Raises:
        InputError: Keys are missing, unknown or inconsistent. The message names file, key and remedy.
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
    """Return the fields of a graph with one vertex type, with or without relations.

    Args:
        arrays: Arrays of the file by key.
        name: Name of the graph.
        split: Number of the public split.
        seed: Seed of a split.
    """
    source, target = edge_rows(arrays, "edge_index")
    x, y, edge_type = read_features(arrays, "x"), optional_tensor(arrays, "y"), optional_tensor(arrays, "edge_type")
    y = user_labels(y)
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
    """Check that the file has no unknown keys.

    Args:
        arrays: Arrays of the file by key.
        fields: Fields that were read from them.

    Raises:
        InputError: At the first key that is neither read nor a note.
    """
    allowed = {"num_nodes", *LABELS, *HELD_OUT}
    if "node_types" in arrays:
        allowed |= {*TYPED, *(f"edge_index|{name}" for name in fields.relations)}
        allowed |= {key for name in fields.vertex_types for key in feature_names(f"x|{name}")}
    else:
        allowed |= {*PLAIN, *feature_names("x")}
    for name in sorted(arrays):
        if name not in allowed and not NOTES.fullmatch(name):
            raise InputError(f"{unknown('array', name, allowed)} (or leave it out of the file)")


def feature_names(key: str) -> tuple[str, ...]:
    """Return the keys that features can be stored under."""
    return (key, *(f"{key}_{part}" for part in CSR_PARTS))


def relation_names(arrays: Arrays, edge_type: Tensor) -> tuple[str, ...]:
    """Return the relations of a graph with one vertex type: by their names in the file, else by number.

    Args:
        arrays: Arrays of the file by key.
        edge_type: Relation of each edge.
    """
    if "relation_names" in arrays:
        return vertex_relations(name_list(arrays, "relation_names"))
    return numbered_relations(edge_type, whole_number(arrays, "num_relations") if "num_relations" in arrays else None)


def typed_fields(arrays: Arrays, name: str, split: int, seed: int) -> GraphFields:
    """Return the fields of a graph with several vertex types, each of which becomes a range of ids.

    Args:
        arrays: Arrays of the file by key.
        name: Name of the graph.
        split: Number of the public split.
        seed: Seed of a split.
    """
    types, relations = name_list(arrays, "node_types"), name_list(arrays, "edge_types")
    counts = whole_numbers(arrays, "num_nodes", len(types))
    offsets = (0, *itertools.accumulate(counts))
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    for relation in relations:
        parts = relation.split("|")
        if len(parts) != 3 or parts[0] not in types or parts[2] not in types:
            raise InputError(f"edge_types: '{relation}' is not 'source type|name|target type' over {', '.join(types)}")
        for ids, row, vertex_type, merged in zip(
            edge_rows(arrays, f"edge_index|{relation}"), (0, 1), parts[::2], (sources, targets), strict=True
        ):
            check_ids(f"edge_index|{relation}[{row}]", ids, counts[types.index(vertex_type)])
            merged.append(ids.long() + offsets[types.index(vertex_type)])
    sizes = torch.tensor([len(source) for source in sources])
    features_of_type = {name: read_features(arrays, f"x|{name}") for name in types}
    x, features = merge_features(types, {name: part for name, part in features_of_type.items() if part is not None})
    y, masks = typed_labels(arrays, types, offsets, split, seed)
    firsts = (
        [offsets[types.index(vertex_type)] for vertex_type in relations[0].split("|")[::2]] if relations else [0, 0]
    )
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
    """Return labels and masks over all vertices; types other than `target_type` are unlabelled and in no split.

    Args:
        arrays: Arrays of the file by key.
        types: Names of the vertex types.
        offsets: First id of each type, and N.
        split: Number of the public split.
        seed: Seed of a split.
    """
    y = user_labels(optional_tensor(arrays, "y"))
    if y is None:
        return None, Masks()
    target_type = str(required_array(arrays, "target_type"))
    if target_type not in types:
        raise unknown("target_type", target_type, types)
    first, last = offsets[types.index(target_type) : types.index(target_type) + 2]

    def spread(field: str, part: Tensor | None, fill: float) -> Tensor | None:
        if part is None:
            return None
        check_length(field, part, last - first, f"vertices of type {target_type}")
        return put_rows({first: part}, offsets[-1], fill)

    masks = Masks(*(spread(mask, part, 0) for mask, part in read_masks(arrays, y, split, seed)._asdict().items()))
    return spread("y", y, no_label(y)), masks


def read_masks(arrays: Arrays, y: Tensor | None, split: int, seed: int) -> Masks:
    """Return the public split, or a seeded one if there are labels but no mask.

    Args:
        arrays: Arrays of the file by key.
        y: Labels, or None.
        split: Number of the public split, if there are several.
        seed: Seed of a split.

    Raises:
        InputError: If there is no such split.
    """
    several = {mask: optional_tensor(arrays, f"{mask}s") for mask in MASKS}
    count = max((len(masks) for masks in several.values() if masks is not None), default=0)
    if not 0 <= split < max(count, 1):
        raise InputError(f"--split {split}: the file has {count or 'one'} split{'s, numbered from 0' if count else ''}")
    if count:
        masks_of_split = [None if masks is None else masks[split : split + 1].flatten() for masks in several.values()]
    else:
        masks_of_split = [optional_tensor(arrays, mask) for mask in MASKS]
    if y is not None and masks_of_split == [None, None, None]:
        return split_labelled(y, seed)
    return Masks(*masks_of_split)


def read_links(arrays: Arrays, split: str, relations: Sequence[str], firsts: Sequence[int] = (0, 0)) -> Tensor | None:
    """Return the edges that are held out for a split, int64 [m, 3] (source, target, relation); None if there are none.

    Args:
        arrays: Arrays of the file by key.
        split: 'valid' or 'test'.
        relations: Names of the relations.
        firsts: First ids of the only relation's source type and target type.
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
