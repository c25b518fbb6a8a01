"""Checks of a graph: shapes and values must fit together. Each error is one line with the position and the remedy."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from numbers import Integral

import torch
from torch import Tensor

from weft.data.adjacency import BLOCK_ENTRIES, Adjacency, Transpose
from weft.data.checks.tensor_checks import (
    LINKS,
    MASKS,
    SEVERAL_LABELS,
    DataWarning,
    check_edge_features,
    check_finite,
    check_ids,
    check_length,
    check_numbering,
    check_pointers,
    check_vector,
    first_flagged,
    has_label,
    label_kind,
)
from weft.data.fields import EdgeLabels, GraphFields
from weft.data.vertex_names import VertexNames
from weft.data.vertex_types import type_range
from weft.runtime import native
from weft.utils.errors import InputError

MIN_MARK = 32
"""Smallest class that may be a mark for unlabelled vertices, such as 99 or 255."""
REMEDY = "use Graph.from_edges, or import the graph again"


def check_shapes(graph: GraphFields) -> None:
    """Raise InputError if parts of a graph disagree in size or kind. Reads no large array."""
    check_adjacency_shapes(graph.in_edges)
    num_vertices = graph.in_edges.num_targets
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
        check_edge_features(graph.edge_features, graph.in_edges.num_edges)
    for field in LINKS:
        tensor = getattr(graph, field)
        if tensor is not None and (tensor.dim() != 2 or tensor.shape[1] != 3):
            raise InputError(f"{field} has shape {list(tensor.shape)}: give rows of source, target and relation")
    if graph.y is not None and graph.y.dim() > 2:
        raise InputError(f"y has shape {list(graph.y.shape)}: labels are [vertices] or [vertices, classes]")
    if graph.vertex_names is not None:
        check_names(graph.vertex_names, num_vertices)
    if graph.edge_labels is not None:
        check_edge_label_shapes(graph.edge_labels)
    check_types(graph)


def check_edge_label_shapes(labels: EdgeLabels) -> None:
    """Raise InputError if parts of the labels of edges disagree in size or dtype."""
    edges, y, features = labels.edges, labels.y, labels.features
    if edges.dim() != 2 or edges.shape[1] != 3 or edges.dtype != torch.int64:
        raise InputError(f"edge_labels.edges is {edges.dtype} of shape {list(edges.shape)}: give int64 [m, 3]")
    check_array("edge_labels.y", y[:, 0] if y.dim() == 2 else y, len(edges), torch.int64, torch.float32)
    for name in MASKS:
        check_array(f"edge_labels.{name}", getattr(labels, name), len(edges), torch.bool)
    if features is not None and (features.dim(), len(features), features.dtype) != (2, len(edges), torch.float32):
        raise InputError(
            f"edge_labels.features is {features.dtype} of shape {list(features.shape)}: give float32 [{len(edges)}, K]"
        )


def check_names(names: VertexNames, num_vertices: int) -> None:
    """Check that there is one name for each vertex.

    Args:
        names: The names.
        num_vertices: Number of vertices.

    Raises:
        InputError: If there is not.
    """
    if (names.numbers is None) == (names.offsets is None or names.text is None):
        raise InputError(f"vertex_names must have either numbers or texts: {REMEDY}")
    for field, tensor, dtype in (("numbers", names.numbers, torch.int64), ("offsets", names.offsets, torch.int64)):
        if tensor is not None:
            check_array(f"vertex_names.{field}", tensor, num_vertices + (field == "offsets"), dtype)
    if names.text is not None:
        check_array("vertex_names.text", names.text, len(names.text), torch.uint8)


def check_kinds(graph: GraphFields) -> None:
    """Raise InputError if a field that is no tensor is of another type than GraphFields declares."""
    if not isinstance(graph.name, str):
        raise InputError(f"name is of type {type(graph.name).__name__}: give a str")
    for field, kind in (("relations", str), ("vertex_types", str), ("type_offsets", Integral)):
        values = getattr(graph, field)
        if not isinstance(values, tuple | list) or not all(isinstance(value, kind) for value in values):
            raise InputError(f"{field} must be a tuple of {kind.__name__}: give one, or leave it out")
    if not isinstance(graph.features, Mapping):
        raise InputError(f"features is of type {type(graph.features).__name__}: give a dict of vertex type to tensor")


def check_adjacency_shapes(in_edges: Adjacency) -> None:
    """Raise InputError if arrays of the edges, or of an existing transpose, have a wrong size or dtype."""
    if not isinstance(in_edges, Adjacency):
        raise InputError(f"in_edges is of type {type(in_edges).__name__}: use Graph.from_edges")
    ids, num_edges = (torch.int32, torch.int64), in_edges.num_edges
    check_array("in_edges.indptr", in_edges.indptr, in_edges.num_targets + 1, torch.int64)
    check_array("in_edges.indices", in_edges.indices, num_edges, *ids)
    transpose = in_edges.known_transpose
    weights = [("in_edges.weight", in_edges.weight)]
    if transpose is not None:
        check_array("transpose.indptr", transpose.indptr, in_edges.num_sources + 1, torch.int64)
        check_array("transpose.indices", transpose.indices, num_edges, *ids)
        if transpose.edge_ids is not None:
            check_array("transpose.edge_ids", transpose.edge_ids, num_edges, *ids)
        weights.append(("transpose.weight", transpose.weight))
    for field, weight in weights:
        if weight is not None:
            check_array(field, weight, num_edges, torch.float32, torch.float64)


def check_array(field: str, tensor: Tensor, length: int, *dtypes: torch.dtype) -> None:
    """Check that an array of an adjacency is a vector of a length and of one of several dtypes.

    Args:
        field: Name of the array in errors.
        tensor: The array.
        length: Length that it must have.
        dtypes: Dtypes that it may have.

    Raises:
        InputError: If it is not.
    """
    if tensor.shape != (length,) or tensor.dtype not in dtypes:
        actual = f"{tensor.dtype} of shape {list(tensor.shape)}, not {dtypes[-1]} of [{length}]"
        raise InputError(f"{field} is {actual}: {REMEDY}")


def check_types(graph: GraphFields) -> None:
    """Raise InputError if vertex types, relations and features per type do not fit together."""
    if graph.vertex_types:
        offsets, num_vertices = graph.type_offsets, graph.in_edges.num_targets
        ascends = all(low <= high for low, high in itertools.pairwise(offsets))
        if len(offsets) != len(graph.vertex_types) + 1 or (offsets[0], offsets[-1]) != (0, num_vertices) or not ascends:
            raise InputError(
                f"type_offsets is {list(offsets)} for {len(graph.vertex_types)} vertex types and {num_vertices} "
                "vertices: it must ascend from 0 to the vertex count, with one more entry than types"
            )
    for name in graph.relations:
        parts = name.split("|")
        if len(parts) != 3 or parts[0] not in graph.vertex_types or parts[2] not in graph.vertex_types:
            raise InputError(
                f"relation '{name}' is not 'source type|name|target type' over the vertex types "
                f"{', '.join(graph.vertex_types) or '(none)'}: rename it"
            )
    if len(set(graph.relations)) != len(graph.relations):
        raise InputError(f"relations {list(graph.relations)} repeat a name: give each relation its own name")
    if (graph.edge_type is None) != (not graph.relations):
        raise InputError("edge_type and relations belong together: give both, or neither")
    if graph.edge_type is not None:
        check_vector("edge_type", graph.edge_type, graph.in_edges.num_edges, "edges")
    for name, tensor in graph.features.items():
        if name not in graph.vertex_types:
            raise InputError(f"features['{name}'] names no vertex type: choose from {', '.join(graph.vertex_types)}")
        if tensor.dim() != 2:
            raise InputError(f"features['{name}'] has shape {list(tensor.shape)}: features are [vertices, features]")
        span = type_range(graph, name)
        check_length(f"features['{name}']", tensor, len(span), f"vertices of type {name}")
    if graph.features and graph.x is not None:
        raise InputError("x and features are both given: use x for all vertices, or features per type")


def check_values(graph: GraphFields) -> None:
    """Raise InputError at the first value that no graph may contain. Warns (DataWarning) if masks overlap."""
    check_adjacency(graph.in_edges)
    if graph.x is not None:
        check_finite("x", graph.x, "features must be finite, replace missing ones, for example with 0")
    for name, tensor in graph.features.items():
        check_finite(f"features['{name}']", tensor, "features must be finite, replace missing ones, for example with 0")
    if graph.edge_features is not None:
        check_finite("edge_features", graph.edge_features, "replace missing ones, for example with 0")
    if graph.y is not None:
        check_labels(graph.y)
    if graph.edge_type is not None:
        check_relations(graph, graph.edge_type)
    for field in LINKS:
        if getattr(graph, field) is not None:
            check_links(graph, field, getattr(graph, field))
    if graph.edge_labels is not None:
        check_links(graph, "edge_labels.edges", graph.edge_labels.edges)
        check_labels(graph.edge_labels.y)
        if graph.edge_labels.features is not None:
            check_finite("edge_labels.features", graph.edge_labels.features, "replace missing ones, for example with 0")
    if graph.ids is not None:
        check_permutation("ids", graph.ids)
    if graph.vertex_names is not None and graph.vertex_names.offsets is not None:
        assert graph.vertex_names.text is not None
        check_pointers("vertex_names.offsets", graph.vertex_names.offsets, len(graph.vertex_names.text), REMEDY)
    warn_doubtful(graph)


def warn_doubtful(graph: GraphFields) -> None:
    """Warn (DataWarning) about legal values that are probably mistakes: gaps between classes, overlapping masks."""
    if graph.y is not None and len(graph.y) and label_kind(graph.y) == "classes":
        warn_gap(graph.y)
    warn_overlap(graph)


def check_labels(y: Tensor) -> None:
    """Raise InputError at the first label that is impossible for its kind."""
    kind = label_kind(y)
    if kind == "classes":
        wrong, remedy = y < -1, "classes count from 0, -1 is unlabelled"
    elif kind == "labels":
        wrong = (y != 0) & (y != 1)
        remedy = SEVERAL_LABELS
    else:
        wrong, remedy = y.isinf(), "values are finite, NaN is unlabelled"
    if wrong.any():
        place, value = first_flagged(y, wrong)
        raise InputError(f"y{place} is {value}: {remedy}")
    if kind == "classes" and len(y):
        check_numbering("y", int(y.max()) + 1, len(y), "vertices")


def warn_gap(y: Tensor) -> None:
    """Warn (DataWarning) if the largest class is far above all others, as 255 is if it marks unlabelled vertices.

    Args:
        y: Classes, int64 [N], -1 if unlabelled.
    """
    counts = torch.bincount(y[y >= 0])
    classes = counts.nonzero()[-2:, 0].tolist()
    if len(classes) == 2 and classes[1] >= max(MIN_MARK, 2 * (classes[0] + 1)):
        second, largest = classes
        warnings.warn(
            f"y: {int(counts[largest])} vertices have class {largest}, no other class is above {second}, so there are "
            f"{largest + 1} classes: if {largest} means unlabelled, set -1 there, else number the classes without gaps",
            DataWarning,
            stacklevel=6,
        )


def check_adjacency(adjacency: Adjacency) -> None:
    """Raise InputError if row pointers, source ids or weights cannot come from a list of edges."""
    indptr, indices = adjacency.indptr, adjacency.indices
    check_pointers("in_edges.indptr", indptr, len(indices), REMEDY)
    check_ids("in_edges.indices", indices, adjacency.num_sources)
    if adjacency.unsorted_target is not None:
        raise InputError(
            f"in_edges.indices: the sources of target {adjacency.unsorted_target} do not ascend: use Graph.from_edges "
            "or Graph.from_scipy, or import the graph again"
        )
    if adjacency.known_transpose is not None:
        check_transpose(adjacency, adjacency.known_transpose)
    if adjacency.weight is not None:
        check_finite("in_edges.weight", adjacency.weight, "edge weights must be finite")


def check_transpose(adjacency: Adjacency, transpose: Transpose) -> None:
    """Check that a transpose has as many edges as the adjacency, between the same vertices.

    Args:
        adjacency: The in-edges.
        transpose: A transpose that was not computed from them, for example from a file.

    Raises:
        InputError: If it has not.
    """
    check_pointers("transpose.indptr", transpose.indptr, adjacency.num_edges, REMEDY)
    check_ids("transpose.indices", transpose.indices, adjacency.num_targets)
    if adjacency.num_edges and transpose.edge_ids is not None:
        low, high = (int(end) for end in transpose.edge_ids.aminmax())
        if low < 0 or high >= adjacency.num_edges:
            raise InputError(f"transpose.edge_ids is out of range: {REMEDY}")


def check_stored_transpose(adjacency: Adjacency, transpose: Transpose) -> None:
    """Check that a transpose that was read from a file is that of the adjacency, in one pass over the edges.

    Args:
        adjacency: The in-edges, checked by `check_adjacency`.
        transpose: The transpose from the file.

    Raises:
        InputError: If it has other edges, another order, or other weights.
    """
    # Transpose the edges of some targets at a time. Their entries in row u of the transpose must follow those of
    # earlier targets: `cursor` is the position of the next entry of each row.
    indptr, cursor, first = adjacency.indptr, transpose.indptr[:-1].clone(), 0
    while first < adjacency.num_targets:
        bound = int(indptr[first]) + max(BLOCK_ENTRIES, adjacency.num_sources)
        last = max(first + 1, int(torch.searchsorted(indptr, bound, right=True)) - 1)
        start, stop = int(indptr[first]), int(indptr[last])
        pointers, targets, edge_ids = native.transpose(
            indptr[first : last + 1] - start, adjacency.indices[start:stop], adjacency.num_sources
        )
        num_entries = pointers.diff()
        positions = torch.arange(stop - start) + (cursor - pointers[:-1]).repeat_interleave(num_entries)
        cursor += num_entries
        edge_ids = edge_ids.long() + start
        pairs = [(transpose.indices, targets + first)]
        if transpose.edge_ids is not None:
            pairs.append((transpose.edge_ids, edge_ids))
        if adjacency.weight is not None:
            stored = torch.empty(0) if transpose.weight is None else transpose.weight
            pairs.append((stored, adjacency.weight[edge_ids]))
        if (cursor > transpose.indptr[1:]).any() or any(
            len(stored) != adjacency.num_edges or (stored[positions] != expected).any() for stored, expected in pairs
        ):
            raise InputError(
                "transpose: is not the transpose of in_edges (a directed graph that is stored as symmetric, or files "
                f"of another graph): {REMEDY}"
            )
        first = last


def check_links(graph: GraphFields, field: str, links: Tensor) -> None:
    """Check edges in rows: vertices and relations must be those of the graph.

    Args:
        graph: The graph.
        field: Name of the edges, such as 'val_links'.
        links: int64 [m, 3].

    Raises:
        InputError: At the first unknown vertex or relation.
    """
    for column, name in enumerate(("source", "target")):
        check_ids(f"{field}'s {name}", links[:, column], graph.in_edges.num_targets)
    num_relations = max(len(graph.relations), 1)
    wrong = (links[:, 2] < 0) | (links[:, 2] >= num_relations)
    if wrong.any():
        place, value = first_flagged(links[:, 2], wrong)
        raise InputError(f"{field}'s relation{place} is {value}: give 0 to {num_relations - 1}, positions in relations")


def check_permutation(field: str, ids: Tensor) -> None:
    """Check that each of 0 to n - 1 occurs once among n ids.

    Args:
        field: Name of the ids in errors.
        ids: int64 [n].

    Raises:
        InputError: If an id is missing or occurs twice.
    """
    check_ids(field, ids, len(ids))
    repeated = torch.bincount(ids, minlength=len(ids)) > 1
    if repeated.any():
        _, vertex = first_flagged(ids, repeated[ids])
        raise InputError(f"{field} holds {vertex} more than once: give every vertex its original id")


def check_relations(graph: GraphFields, edge_type: Tensor) -> None:
    """Check that every edge has a relation, and that its endpoints have the types of the relation.

    Args:
        graph: The graph.
        edge_type: Relation of each edge, integer [E].

    Raises:
        InputError: At the first edge without a valid relation, or with an endpoint of another type.
    """
    wrong = (edge_type < 0) | (edge_type >= len(graph.relations))
    if wrong.any():
        place, value = first_flagged(edge_type, wrong)
        raise InputError(f"edge_type{place} is {value}: there are {len(graph.relations)} relations, numbered from 0")
    if len(graph.vertex_types) == 1:
        return
    type_pairs = torch.tensor([[graph.vertex_types.index(part) for part in r.split("|")[::2]] for r in graph.relations])
    bounds = torch.tensor(graph.type_offsets[1:])
    for side, ids in zip((0, 1), graph.in_edges.edges(), strict=True):
        actual = torch.bucketize(ids, bounds, right=True)
        wrong = actual != type_pairs[:, side][edge_type.long()]
        if wrong.any():
            edge = int(wrong.nonzero()[0])
            raise InputError(
                f"edge_type[{edge}] is relation '{graph.relations[int(edge_type[edge])]}', but the edge's "
                f"{('source', 'target')[side]} {int(ids[edge])} is of type {graph.vertex_types[int(actual[edge])]}: "
                "correct the type or the id"
            )


def warn_overlap(graph: GraphFields) -> None:
    """Warn once if a vertex is in two split masks."""
    masks = [(field, getattr(graph, field)) for field in MASKS if getattr(graph, field) is not None]
    for i, (field, mask) in enumerate(masks):
        for other_field, other in masks[i + 1 :]:
            both = int((mask & other).sum())
            if both:
                warnings.warn(
                    f"{graph.name}: {both} vertices lie in both {field} and {other_field}: scores on one "
                    "are not independent of the other",
                    DataWarning,
                    stacklevel=6,
                )
                return


def require_trainable(graph: GraphFields, *, features: bool = True, labels: bool = True) -> None:
    """Check that a node-level model can be trained: features, labels, a training vertex, labelled splits.

    Args:
        graph: The graph.
        features: False for models that learn an embedding per vertex instead of reading features.
        labels: False for tasks without labels.

    Raises:
        InputError: If something is missing.
    """
    if features and graph.x is None:
        missing = [name for name in graph.vertex_types if name not in graph.features]
        if missing or not graph.features:
            of_types = f" for vertex type {', '.join(missing)}" if graph.features else ""
            raise InputError(
                f"{graph.name} has no features{of_types}: add some, or --random-features 256 to measure speed"
            )
    if not labels:
        return
    if graph.y is None:
        if graph.edge_labels is not None:
            raise InputError(f"{graph.name} has labels of edges only: add --task edge")
        raise InputError(f"{graph.name} has no labels: add some, or --random-classes 16 to measure speed")
    if graph.train_mask is None or not graph.train_mask.any():
        state = "is missing" if graph.train_mask is None else "selects no vertex"
        remedy = "set it for the vertices to train on, or use graph.with_split((0.6, 0.2, 0.2)) for a random split"
        raise InputError(f"{graph.name}: train_mask {state}: {remedy}")
    unlabelled, sign = ~has_label(graph.y), "-1" if label_kind(graph.y) == "classes" else "NaN"
    for field in MASKS:
        mask = getattr(graph, field)
        if mask is not None and (mask & unlabelled).any():
            vertex = int((mask & unlabelled).nonzero()[0])
            raise InputError(
                f"{graph.name}: {field}[{vertex}] selects an unlabelled vertex (y = {sign}): clear it there"
            )
