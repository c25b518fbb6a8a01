"""What a graph must be: dtypes, shapes and values, each mistake one line that says where and what helps."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.core.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from weft.data.adjacency import Adjacency
    from weft.data.graph import Graph

MASKS = ("train_mask", "val_mask", "test_mask")
LINKS = ("val_links", "test_links")

# Rows looked at together: a memory-mapped matrix is never copied, and its flags stay within the cache.
BLOCK_ENTRIES = 1 << 20


class DataWarning(UserWarning):
    """Legal data that is probably not what was meant."""


@contextmanager
def located(place: str | Path) -> Iterator[None]:
    """Puts the file in front of an InputError raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def cast(field: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as `dtype`, contiguous; raises InputError at the first value that would change."""
    if tensor.dtype == dtype:
        return tensor.contiguous()
    if tensor.dtype.is_complex:
        raise InputError(f"{field} is {tensor.dtype}, not {dtype}: give real numbers")
    result = tensor.to(dtype).contiguous()
    changed = (result.to(tensor.dtype) != tensor) & (tensor == tensor)
    if tensor.dtype.is_floating_point and not dtype.is_floating_point:
        changed |= tensor != tensor
    if changed.any():
        place, value = first(tensor, changed)
        raise InputError(
            f"{field}{place} is {value}, which {dtype} cannot hold ({field} is {tensor.dtype}): "
            f"round it yourself, with {field}.to({dtype})"
        )
    return result


def first(tensor: Tensor, wrong: Tensor) -> tuple[str, float | int | bool]:
    """Where and what the first flagged entry is: ("[3, 7]", nan)."""
    index = tuple(int(i) for i in wrong.nonzero()[0])
    return str(list(index)), tensor[index].item()


def check_finite(field: str, tensor: Tensor, remedy: str) -> None:
    """Raises InputError at the first NaN or infinity of a float tensor [n, ...], looking at a few rows at a time."""
    rows = max(1, BLOCK_ENTRIES // max(1, tensor[:1].numel()))
    for start in range(0, len(tensor), rows):
        block = tensor[start : start + rows]
        if not block.numel():
            continue
        low, high = torch.aminmax(block)  # one pass, and NaN wins; eight times as fast as asking each entry
        if not (torch.isfinite(low) and torch.isfinite(high)):
            index = (~torch.isfinite(block)).nonzero()[0]
            value = block[tuple(index)].item()
            index[0] += start
            raise InputError(f"{field}{index.tolist()} is {value}: {remedy}")


def check_length(field: str, tensor: Tensor, length: int, unit: str) -> None:
    """Raises InputError unless the tensor has one entry or row for each of `length` units."""
    if tensor.dim() == 0 or len(tensor) != length:
        raise InputError(
            f"{field} has shape {list(tensor.shape)}, but the graph has {length} {unit}: give one entry for each"
        )


def check_vector(field: str, tensor: Tensor, length: int, unit: str) -> None:
    """Raises InputError unless the tensor is a vector with one entry for each of `length` units."""
    check_length(field, tensor, length, unit)
    if tensor.dim() != 1:
        raise InputError(f"{field} has shape {list(tensor.shape)}: give one column of it, for example {field}[:, 0]")


def check_edge_features(tensor: Tensor, num_edges: int) -> None:
    """Raises InputError unless the tensor is [edges, features]."""
    check_length("edge_features", tensor, num_edges, "edges")
    if tensor.dim() != 2:
        raise InputError(f"edge_features has shape {list(tensor.shape)}: edge features are [edges, features]")


def check_shapes(graph: Graph) -> None:
    """Raises InputError where the parts of a graph disagree in size or kind; reads no large array."""
    num_vertices = graph.num_vertices
    if graph.in_edges.num_sources != num_vertices:
        raise InputError(
            f"in_edges has {graph.in_edges.num_sources} sources and {num_vertices} targets: they must be one set"
        )
    for field in ("x", "y", "ids", *MASKS):
        tensor = getattr(graph, field)
        if tensor is not None:
            check = check_length if field in ("x", "y") else check_vector
            check(field, tensor, num_vertices, "vertices")
    if graph.x is not None and graph.x.dim() != 2:
        raise InputError(f"x has shape {list(graph.x.shape)}: features are [vertices, features]")
    if graph.edge_features is not None:
        check_edge_features(graph.edge_features, graph.num_edges)
    for field in LINKS:
        tensor = getattr(graph, field)
        if tensor is not None and (tensor.dim() != 2 or tensor.shape[1] != 3):
            raise InputError(f"{field} has shape {list(tensor.shape)}: give rows of source, target and relation")
    if graph.y is not None and graph.y.dim() > 2:
        raise InputError(f"y has shape {list(graph.y.shape)}: labels are [vertices] or [vertices, classes]")
    check_types(graph)


def check_types(graph: Graph) -> None:
    """Raises InputError where vertex types, relations and per-type features do not fit together."""
    if graph.vertex_types:
        offsets = graph.type_offsets
        ascends = all(low <= high for low, high in itertools.pairwise(offsets))
        if (
            len(offsets) != len(graph.vertex_types) + 1
            or (offsets[0], offsets[-1]) != (0, graph.num_vertices)
            or not ascends
        ):
            raise InputError(
                f"type_offsets is {list(offsets)} for {len(graph.vertex_types)} vertex types and {graph.num_vertices} "
                "vertices: it must ascend from 0 to the vertex count, with one more entry than types"
            )
    for name in graph.relations:
        ends = name.split("|")
        if len(ends) != 3 or ends[0] not in graph.vertex_types or ends[2] not in graph.vertex_types:
            raise InputError(
                f"relation '{name}' is not 'source type|name|target type' over the vertex types "
                f"{', '.join(graph.vertex_types) or '(none)'}: rename it"
            )
    if len(set(graph.relations)) != len(graph.relations):
        raise InputError(f"relations {list(graph.relations)} repeat a name: give each its own")
    if (graph.edge_type is None) != (not graph.relations):
        raise InputError("edge_type and relations belong together: give both, or neither")
    if graph.edge_type is not None:
        check_vector("edge_type", graph.edge_type, graph.num_edges, "edges")
    for name, tensor in graph.features.items():
        if name not in graph.vertex_types:
            raise InputError(f"features['{name}'] names no vertex type: known are {', '.join(graph.vertex_types)}")
        if tensor.dim() != 2:
            raise InputError(f"features['{name}'] has shape {list(tensor.shape)}: features are [vertices, features]")
        span = graph.type_range(name)
        check_length(f"features['{name}']", tensor, len(span), f"vertices of type {name}")
    if graph.features and graph.x is not None:
        raise InputError("x and features are both given: use x for all vertices, or features per type")


def check_values(graph: Graph) -> None:
    """Raises InputError at the first value that no graph may hold; warns (DataWarning) where masks overlap."""
    check_adjacency(graph.in_edges)
    if graph.x is not None:
        check_finite("x", graph.x, "features must be finite, replace missing ones, for example with 0")
    for name, tensor in graph.features.items():
        check_finite(f"features['{name}']", tensor, "features must be finite, replace missing ones, for example with 0")
    if graph.edge_features is not None:
        check_finite("edge_features", graph.edge_features, "replace missing ones, for example with 0")
    if graph.y is not None:
        multilabel = graph.y.dim() == 2
        wrong = (graph.y != 0) & (graph.y != 1) if multilabel else graph.y < -1
        if wrong.any():
            place, value = first(graph.y, wrong)
            kind = (
                "labels of [vertices, classes] are 0 or 1, give class numbers as [vertices]"
                if multilabel
                else "classes count from 0, -1 is unlabelled"
            )
            raise InputError(f"y{place} is {value}: {kind}")
    if graph.edge_type is not None:
        check_relations(graph, graph.edge_type)
    for field in LINKS:
        if getattr(graph, field) is not None:
            check_links(graph, field, getattr(graph, field))
    if graph.ids is not None:
        check_permutation("ids", graph.ids)
    warn_overlap(graph)


def check_adjacency(adjacency: Adjacency) -> None:
    """Raises InputError where row pointers, source ids or weights could not come from a list of edges."""
    indptr, indices = adjacency.indptr, adjacency.indices
    if len(indptr) == 0 or int(indptr[0]) != 0 or int(indptr[-1]) != len(indices) or (indptr[1:] < indptr[:-1]).any():
        raise InputError(f"in_edges.indptr does not ascend from 0 to the {len(indices)} edges: use Graph.from_edges")
    check_ids("in_edges.indices", indices, adjacency.num_sources)
    if adjacency.weight is not None:
        check_vector("in_edges.weight", adjacency.weight, len(indices), "edges")
        check_finite("in_edges.weight", adjacency.weight, "edge weights must be finite")


def check_ids(field: str, ids: Tensor, num_vertices: int) -> None:
    """Raises InputError at the first id outside [0, num_vertices)."""
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < num_vertices):
        return
    place, value = first(ids, (ids < 0) | (ids >= num_vertices))
    known = f"the graph has {num_vertices} vertices, numbered from 0"
    remedy = "no id is negative" if value < 0 else "correct the id or raise num_vertices"
    raise InputError(f"{field}{place} is {value}: {known}; {remedy}")


def check_links(graph: Graph, field: str, links: Tensor) -> None:
    """Raises InputError at the first held-out edge between vertices, or of a relation, that the graph does not have."""
    for column, name in enumerate(("source", "target")):
        check_ids(f"{field}'s {name}", links[:, column], graph.num_vertices)
    known = max(len(graph.relations), 1)
    wrong = (links[:, 2] < 0) | (links[:, 2] >= known)
    if wrong.any():
        place, value = first(links[:, 2], wrong)
        raise InputError(f"{field}'s relation{place} is {value}: give 0 to {known - 1}, positions in relations")


def check_permutation(field: str, ids: Tensor) -> None:
    """Raises InputError unless each of 0 to n - 1 is among the n ids once."""
    check_ids(field, ids, len(ids))
    repeated = torch.bincount(ids, minlength=len(ids)) > 1
    if repeated.any():
        _, vertex = first(ids, repeated[ids])
        raise InputError(f"{field} holds {vertex} more than once: give every vertex the id that it had first")


def check_relations(graph: Graph, edge_type: Tensor) -> None:
    """Raises InputError at the first edge without a known relation, or whose ends are not of its relation's types."""
    wrong = (edge_type < 0) | (edge_type >= len(graph.relations))
    if wrong.any():
        place, value = first(edge_type, wrong)
        raise InputError(f"edge_type{place} is {value}: there are {len(graph.relations)} relations, numbered from 0")
    if len(graph.vertex_types) == 1:
        return
    ends = torch.tensor([[graph.vertex_types.index(part) for part in r.split("|")[::2]] for r in graph.relations])
    bounds = torch.tensor(graph.type_offsets[1:])
    for side, ids in zip((0, 1), graph.in_edges.edges(), strict=True):
        found = torch.bucketize(ids, bounds, right=True)
        wrong = found != ends[:, side][edge_type.long()]
        if wrong.any():
            edge = int(wrong.nonzero()[0])
            raise InputError(
                f"edge_type[{edge}] is relation '{graph.relations[int(edge_type[edge])]}', but the edge's "
                f"{('source', 'target')[side]} {int(ids[edge])} is of type {graph.vertex_types[int(found[edge])]}: "
                "correct the type or the id"
            )


def warn_overlap(graph: Graph) -> None:
    """Warns once, with one line, if a vertex lies in two split masks."""
    masks = [(field, getattr(graph, field)) for field in MASKS if getattr(graph, field) is not None]
    for i, (field, mask) in enumerate(masks):
        for other_field, other in masks[i + 1 :]:
            both = int((mask & other).sum())
            if both:
                warnings.warn(
                    f"{graph.name}: {both} vertices lie in both {field} and {other_field}: figures on one "
                    "are not independent of the other",
                    DataWarning,
                    stacklevel=5,
                )
                return


def require_trainable(graph: Graph, *, features: bool = True, labels: bool = True) -> None:
    """Raises InputError unless a node classifier can be trained: features, labels, a training vertex, labelled splits.

    `features=False` is for models that learn a vector per vertex, `labels=False` for tasks that need none.
    """
    if features and graph.x is None:
        lacking = [name for name in graph.vertex_types if name not in graph.features]
        if lacking or not graph.features:
            whose = f" for vertex type {', '.join(lacking)}" if graph.features else ""
            raise InputError(f"{graph.name} has no features{whose}: --random-features 256 draws some, to measure speed")
    if not labels:
        return
    if graph.y is None:
        raise InputError(f"{graph.name} has no labels: --random-classes 16 draws labels and a split, to measure speed")
    if graph.train_mask is None or not graph.train_mask.any():
        state = "is missing" if graph.train_mask is None else "selects no vertex"
        remedy = "mark some vertices in it, or drop y and let --random-classes 16 draw labels and a split"
        raise InputError(f"{graph.name}: train_mask {state}: {remedy}")
    if graph.y.dim() == 2:
        return
    for field in MASKS:
        mask = getattr(graph, field)
        if mask is not None and (mask & (graph.y < 0)).any():
            vertex = int((mask & (graph.y < 0)).nonzero()[0])
            raise InputError(f"{graph.name}: {field}[{vertex}] selects an unlabelled vertex (y = -1): clear it there")
