"""Conversion from and to PyG's Data and HeteroData. All values are kept; edges return sorted by target, then source."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from weft.data.checks.tensor_checks import (
    MASKS,
    DataWarning,
    as_integers,
    as_labels,
    cast,
    check_ids,
    check_length,
    dense_cpu_tensor,
    has_label,
    label_kind,
    no_label,
    user_labels,
    vertex_ids,
    warn_whole_values,
)
from weft.data.edges import build, count_vertices, vertex_count
from weft.data.fields import GraphFields
from weft.data.splits import Masks
from weft.data.vertex_types import VERTEX, merge_features, numbered_relations, put_rows, relation_edges, type_range
from weft.utils.errors import InputError, readable
from weft.utils.optional_packages import import_extra

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData  # an optional dependency: imported where used

PygGraph: TypeAlias = "Data | HeteroData"


def from_pyg(data: PygGraph, *, name: str = "graph") -> GraphFields:
    """Return the fields of a PyG Data or HeteroData.

    Reads `edge_index` (or `adj_t` as a torch.sparse matrix), `edge_weight` [E] or [E, 1], `edge_type`, `x` (dense or
    sparse), `y` and the three masks. `edge_attr`, [E, K] or [E], becomes edge features, and is never taken for a
    weight; in a HeteroData all relations must have the same number of columns. In a HeteroData in which only some
    relations have weights, other edges weigh 1.

    Args:
        data: The PyG graph.
        name: Name of the graph in messages.

    Raises:
        InputError: An attribute is wrong; the message names it.
    """
    pyg = import_extra("torch_geometric.data", "from_pyg")
    if not isinstance(data, pyg.Data | pyg.HeteroData):
        raise InputError(f"data is of type {type(data).__name__}: give PyG's Data or HeteroData")
    with readable("data", "give attributes as PyG's own data sets have them"):
        return from_hetero(data, name) if isinstance(data, pyg.HeteroData) else from_data(data, name)


def to_pyg(graph: GraphFields) -> PygGraph:
    """Return a PyG HeteroData if there are several vertex types, else a Data with relation names in `data.relations`.

    The original ids of a reordered graph are in `data.n_id`, which `from_pyg` ignores.
    """
    return to_data(graph) if graph.vertex_types in ((), (VERTEX,)) else to_hetero(graph)


def from_data(data: Data, name: str) -> GraphFields:
    """Return the fields of a PyG Data.

    Args:
        data: The PyG graph.
        name: Name of the graph.
    """
    source, target, weight = read_edges(data, "data")
    edge_type = read(data, "edge_type")
    num_vertices = read_size(data)
    relations: tuple[str, ...] = ()
    if edge_type is not None:
        if num_vertices is None:
            num_vertices = count_vertices(source, target, "edge_index")
        edge_type = as_integers("edge_type", edge_type)
        relations = tuple(data["relations"]) if "relations" in data else numbered_relations(edge_type)
    y = user_labels(read(data, "y"))
    edges = build(
        source,
        target,
        num_vertices=num_vertices,
        weight=weight,
        edge_features=read_edge_features(data),
        edge_type=edge_type if relations else None,
    )
    return replace(
        edges,
        x=read(data, "x"),
        y=y,
        name=name,
        relations=relations,
        vertex_types=(VERTEX,) if relations else (),
        type_offsets=(0, num_vertices or 0) if relations else (),
        **Masks(*(read(data, mask) for mask in MASKS))._asdict(),
    )


def from_hetero(data: HeteroData, name: str) -> GraphFields:
    """Return the fields of a PyG HeteroData; its vertex types become id ranges, in the order of `data.node_types`.

    Args:
        data: The PyG graph.
        name: Name of the graph.
    """
    types = tuple(data.node_types)
    counts = []
    for vertex_type in types:
        count = read_size(data[vertex_type])
        if count is None:
            raise InputError(f"data['{vertex_type}'] has neither x nor num_nodes: set data['{vertex_type}'].num_nodes")
        counts.append(count)
    offsets = (0, *itertools.accumulate(counts))
    merged = merge_edges(data, types, counts, offsets)
    features_of_type = {t: x for t in types if (x := read(data[t], "x")) is not None}
    for t, x in features_of_type.items():
        check_length(f"data['{t}'].x", x, counts[types.index(t)], f"vertices of type {t}")
    x, features = merge_features(types, features_of_type)
    y, masks = merge_rows(data, "y", offsets), Masks(*(merge_rows(data, mask, offsets) for mask in MASKS))
    edges = build(
        merged.source,
        merged.target,
        num_vertices=offsets[-1],
        weight=merged.weight,
        edge_features=merged.edge_features,
        edge_type=merged.edge_type,
    )
    return replace(
        edges,
        x=x,
        y=y,
        name=name,
        relations=tuple("|".join(relation) for relation in data.edge_types),
        vertex_types=types,
        type_offsets=offsets,
        features=features,
        **masks._asdict(),
    )


class MergedEdges(NamedTuple):
    """Edges of all relations, with vertices numbered from 0 to N - 1 across all vertex types."""

    source: Tensor
    """int64 [E]: source of each edge."""
    target: Tensor
    """int64 [E]: target of each edge."""
    weight: Tensor | None
    """[E]: edge weights, 1 for edges of relations without weights; None if no relation has weights."""
    edge_features: Tensor | None
    """[E, K]: edge features; None unless all relations have the same number of edge features."""
    edge_type: Tensor | None
    """int64 [E]: positions in `data.edge_types`; None without relations."""


def merge_edges(data: HeteroData, types: Sequence[str], counts: Sequence[int], offsets: Sequence[int]) -> MergedEdges:
    """Return the edges of all relations.

    Args:
        data: The PyG graph.
        types: Names of the vertex types.
        counts: Number of vertices of each type.
        offsets: First id of each type, and N.

    Raises:
        InputError: For an id that its vertex type does not have.
    """
    none = torch.empty(0, dtype=torch.int64)
    sources, targets, weights = [none], [none], []
    for relation in data.edge_types:
        place = f"data[{', '.join(relation)}]"
        source, target, weight = read_edges(data[relation], place)
        for row, ids, vertex_type, merged in ((0, source, relation[0], sources), (1, target, relation[2], targets)):
            check_ids(f"{place}.edge_index[{row}]", ids, counts[types.index(vertex_type)])
            merged.append(ids.long() + offsets[types.index(vertex_type)])
        weights.append(weight)
    sizes = torch.tensor([len(source) for source in sources[1:]], dtype=torch.int64)
    weight = None
    if any(part is not None for part in weights):
        weight = torch.cat([torch.ones(n) if part is None else part for n, part in zip(sizes, weights, strict=True)])
    features = [read_edge_features(data[relation]) for relation in data.edge_types]
    present = [part for part in features if part is not None]
    one_width = len(present) == len(features) and len({part.shape[1] for part in present}) == 1
    edge_features = torch.cat(present) if one_width else None
    if present and not one_width:
        warnings.warn(
            f"edge_attr of {len(present)} relations is left out: give all {len(features)} relations the same number of "
            "columns, for example with zeros, or delete it",
            DataWarning,
            stacklevel=5,
        )
    edge_type = torch.arange(len(sizes)).repeat_interleave(sizes) if len(sizes) else None
    return MergedEdges(torch.cat(sources), torch.cat(targets), weight, edge_features, edge_type)


def merge_rows(data: HeteroData, field: str, offsets: Sequence[int]) -> Tensor | None:
    """Return the labels or masks of all vertex types as one tensor; None if no type has any.

    Args:
        data: The PyG graph.
        field: Name of the attribute.
        offsets: First id of each type, and N.

    Raises:
        InputError: If types have rows of different shapes.
    """
    parts = {}
    for i, vertex_type in enumerate(data.node_types):
        part = read(data[vertex_type], field)
        if part is not None:
            check_length(
                f"data['{vertex_type}'].{field}", part, offsets[i + 1] - offsets[i], f"vertices of type {vertex_type}"
            )
            parts[offsets[i]] = as_labels(part) if field == "y" else cast(field, part, torch.bool)
    if not parts:
        return None
    shapes = {tuple(part.shape[1:]) for part in parts.values()}
    if len(shapes) > 1:
        raise InputError(f"{field} has rows of different shapes {sorted(shapes)} per vertex type: make them one")
    example = next((part for part in parts.values() if part.is_floating_point()), next(iter(parts.values())))
    parts = {start: part.to(example.dtype) for start, part in parts.items()}
    merged = put_rows(parts, offsets[-1], no_label(example) if field == "y" else 0)
    warn_whole_values(merged)
    return merged


def to_data(graph: GraphFields) -> Data:
    """Return a PyG Data with edges in stored order."""
    data: Data = import_extra("torch_geometric.data", "to_pyg").Data(
        edge_index=torch.stack(graph.in_edges.edges()), num_nodes=graph.in_edges.num_targets
    )
    x = None if graph.x is None else graph.x[:]
    for field, tensor in (("x", x), ("y", graph.y), ("edge_type", graph.edge_type), ("n_id", graph.ids)):
        if tensor is not None:
            data[field] = tensor.long() if field == "edge_type" else tensor
    for mask in MASKS:
        if getattr(graph, mask) is not None:
            data[mask] = getattr(graph, mask)
    if graph.edge_features is not None:
        data["edge_attr"] = graph.edge_features
    if graph.in_edges.weight is not None:
        data["edge_weight"] = graph.in_edges.weight
    if graph.relations:
        data["relations"] = list(graph.relations)
    return data


def to_hetero(graph: GraphFields) -> HeteroData:
    """Return a PyG HeteroData; types without labelled or masked vertices get no y and no masks."""
    data: HeteroData = import_extra("torch_geometric.data", "to_pyg").HeteroData()
    kind = "" if graph.y is None else label_kind(graph.y)
    for vertex_type in graph.vertex_types:
        span = type_range(graph, vertex_type)
        rows = slice(span.start, span.stop)
        data[vertex_type].num_nodes = len(span)
        if graph.x is not None:
            data[vertex_type].x = graph.x[rows]
        elif vertex_type in graph.features:
            data[vertex_type].x = graph.features[vertex_type][:]
        parts = {field: None if (t := getattr(graph, field)) is None else t[rows] for field in ("y", *MASKS)}
        y = parts["y"]
        labelled = y is not None and bool(y.any() if kind == "labels" else has_label(y).any())
        if labelled or any(part is not None and part.any() for field, part in parts.items() if field != "y"):
            for field, part in parts.items():
                if part is not None:
                    data[vertex_type][field] = part
    for number, name in enumerate(graph.relations):
        adjacency = relation_edges(graph, name)
        store = data[tuple(name.split("|"))]
        store.edge_index = torch.stack(adjacency.edges())
        if adjacency.weight is not None:
            store.edge_weight = adjacency.weight
        if graph.edge_features is not None:
            store.edge_attr = graph.edge_features[graph.edge_type == number]
    return data


def read_edges(store: Any, place: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return source, target and weight [E] of a Data or of one relation.

    Args:
        store: The Data, or the store of a relation.
        place: Name of the store in errors.

    Raises:
        InputError: If it has no edges.
    """
    edge_index = read(store, "edge_index")
    if edge_index is not None:
        if edge_index.dim() != 2 or len(edge_index) != 2:
            raise InputError(
                f"{place}.edge_index has shape {list(edge_index.shape)}: edges are [2, E], source row first"
            )
        source, target = (vertex_ids(f"{place}.edge_index[{row}]", edge_index[row]) for row in (0, 1))
        weight = read(store, "edge_weight")
        return source, target, weight.squeeze(1) if weight is not None and weight.dim() == 2 else weight
    if "adj_t" not in store:
        raise InputError(f"{place} has neither edge_index nor adj_t: set {place}.edge_index, [2, E]")
    adj_t = store["adj_t"]
    if not isinstance(adj_t, Tensor) or adj_t.layout == torch.strided or adj_t.dim() != 2:
        raise InputError(f"{place}.adj_t is no torch.sparse matrix: set {place}.edge_index, [2, E]")
    entries = adj_t.detach().cpu().to_sparse(layout=torch.sparse_coo)
    target, source = entries._indices()
    weight = entries._values()
    return source, target, None if (weight == 1).all() else weight  # PyG writes ones if there are no weights


def read_edge_features(store: Any) -> Tensor | None:
    """Return `edge_attr` of a Data or of one relation, [E, K] in the order of edge_index; None without any."""
    features = read(store, "edge_attr") if "edge_index" in store and "edge_attr" in store else None
    return features[:, None] if features is not None and features.dim() == 1 else features


def read_size(store: Any) -> int | None:
    """Return the number of vertices of a Data or of one vertex type, as stated or by its tensors; None if unknown."""
    if "num_nodes" in store and store["num_nodes"] is not None:
        stated = store["num_nodes"]
        return vertex_count(stated.item() if isinstance(stated, Tensor) and stated.numel() == 1 else stated)
    candidates = (store[field] for field in ("x", "y", *MASKS) if field in store)
    return next((len(value) for value in candidates if isinstance(value, Tensor) and value.dim()), None)


def read(store: Any, field: str) -> Tensor | None:
    """Return a tensor of a Data, or of one vertex or edge type, dense and on the CPU; None if it is missing.

    Args:
        store: The Data, or the store of a type.
        field: Name of the attribute.

    Raises:
        InputError: If it is a single number.
    """
    if field not in store or store[field] is None:
        return None
    value = dense_cpu_tensor(field, store[field])
    if not value.dim():
        raise InputError(f"{field} is a single number: give one entry for each vertex or edge")
    return value
