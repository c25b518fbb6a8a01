"""In-edges from arrays of edges: checks whose messages use the caller's positions, then one native sort."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.checks.tensor_checks import (
    DataWarning,
    Numbers,
    as_integers,
    cast,
    check_edge_features,
    check_finite,
    check_ids,
    check_length,
    check_vector,
    dense_cpu_tensor,
    first_flagged,
    has_label,
    user_labels,
    vertex_ids,
)
from weft.data.fields import EdgeLabels, GraphFields
from weft.data.splits import SHARES, random_split
from weft.runtime.memory.limit import check_fits_memory
from weft.runtime.native import coo_to_csr
from weft.utils.errors import InputError
from weft.utils.units import format_bytes

# If the largest id exceeds both limits, most vertices would have no edge: such ids are names, not vertex numbers.
MAX_SPARSE_IDS = 1 << 24
MAX_IDS_PER_EDGE = 16

POINTER_BYTES = 16
"""Bytes of row pointers per vertex: an int64 for the in-edges and one for the out-edges."""


def build(
    source: Numbers,
    target: Numbers,
    *,
    num_vertices: int | None = None,
    weight: Numbers | None = None,
    edge_features: Numbers | None = None,
    edge_type: Numbers | None = None,
    undirected: bool = False,
    edge_y: Numbers | None = None,
    edge_split: Numbers | None = None,
    field: str = "edge_index",
) -> GraphFields:
    """Check edges and sort them by target, source, type and position in the input.

    Args:
        source: Integer [E].
        target: Integer [E].
        num_vertices: Number of vertices; None: one more than the largest id.
        weight: Float [E].
        edge_features: Float [E, K].
        edge_type: Integer [E].
        undirected: Add the reverse of each edge and merge duplicates. The first of several equal edges is kept; an edge
            as given wins over a reversed one.
        edge_y: Labels of the edges, [E] or [E, C]; see `Graph.from_edges`.
        edge_split: Split of the edges; see `Graph.from_edges`.
        field: Name of the edges in errors, which call the first two arguments `field[0]` and `field[1]`.

    Returns:
        Fields of a graph: in-edges with weights, edge types and edge features, all in stored order, and labels of edges
        in the order of the input.

    Raises:
        InputError: If ids are out of range, lengths differ, or weights or features are not finite.
    """
    source, target = vertex_ids(f"{field}[0]", source), vertex_ids(f"{field}[1]", target)
    if source.shape != target.shape:
        raise InputError(f"{field} has {len(source)} sources and {len(target)} targets: give one of each per edge")
    if weight is not None:
        weight = edge_weights(weight, len(source))
    if edge_features is not None:
        edge_features = cast("edge_features", edge_features, torch.float32)
        check_edge_features(edge_features, len(source))
        check_finite("edge_features", edge_features, "replace missing ones, for example with 0")
    if edge_type is not None:
        edge_type = as_integers("edge_type", edge_type)
        check_vector("edge_type", edge_type, len(source), "edges")
    num_vertices = vertex_count(count_vertices(source, target, field) if num_vertices is None else num_vertices)
    check_ids(f"{field}[0]", source, num_vertices)
    check_ids(f"{field}[1]", target, num_vertices)
    if source.dtype != target.dtype:
        source, target = source.to(torch.int64), target.to(torch.int64)
    edge_labels = None
    if edge_y is not None:
        edge_labels, carries = label_edges(source, target, edge_type, edge_features, edge_y, edge_split)
        source, target = source[carries], target[carries]
        weight, edge_features, edge_type = (
            None if rows is None else rows[carries] for rows in (weight, edge_features, edge_type)
        )
    elif edge_split is not None:
        raise InputError("edge_split has no effect without edge_y: give the labels of the edges too")
    if undirected:
        if edge_type is not None:
            raise InputError(
                "undirected=True cannot be combined with edge_type: leave undirected out, and add inverse relations "
                "instead (inverse_relations=True of weft.load)"
            )
        source, target, edge_ids = both_ways(
            source, target, [rows for rows in (weight, edge_features) if rows is not None]
        )
        weight, edge_features = (None if rows is None else rows[edge_ids] for rows in (weight, edge_features))
    by_type = None if edge_type is None else edge_type.argsort(stable=True)
    if by_type is not None:
        source, target = source[by_type], target[by_type]
    indptr, indices, edge_ids = coo_to_csr(target, source, num_vertices, num_vertices)
    if by_type is not None:
        edge_ids = by_type[edge_ids]
    in_edges = Adjacency(
        indptr=indptr,
        indices=indices,
        num_sources=num_vertices,
        weight=None if weight is None else weight[edge_ids],
    )
    return GraphFields(
        in_edges=in_edges,
        edge_type=None if edge_type is None else edge_type[edge_ids],
        edge_features=None if edge_features is None else edge_features[edge_ids],
        edge_labels=edge_labels,
    )


def label_edges(
    source: Tensor,
    target: Tensor,
    relation: Tensor | None,
    features: Tensor | None,
    edge_y: Numbers,
    edge_split: Numbers | None,
) -> tuple[EdgeLabels, Tensor]:
    """Return the labelled edges, and whether each edge carries messages, bool [E].

    Args:
        source: Integer [E].
        target: Integer [E].
        relation: Relation of each edge, integer [E].
        features: Features of the edges, [E, K].
        edge_y: Label of each edge, [E] or [E, C].
        edge_split: Split of each edge, [E], or three fractions; None: default fractions.

    Raises:
        InputError: If lengths differ, or a number of a split is unknown.
    """
    y = user_labels(edge_y)
    assert y is not None
    check_length("edge_y", y, len(source), "edges")
    labelled = has_label(y)
    split = torch.tensor(SHARES) if edge_split is None else dense_cpu_tensor("edge_split", edge_split)
    if split.is_floating_point():
        shares, split = split.tolist(), torch.full((len(source),), -1)
        for number, mask in enumerate(random_split(labelled, 0, shares)):
            split[mask] = number
    check_vector("edge_split", split, len(source), "edges")
    wrong = (split < -1) | (split > 2)
    if wrong.any():
        place, value = first_flagged(split, wrong)
        raise InputError(f"edge_split{place} is {value}: give 0 (train), 1 (validation), 2 (test) or -1 (none)")
    train, val, test = (split == number for number in range(3))
    held_out = val | test
    listed = (labelled | held_out).nonzero()[:, 0]
    columns = [source, target, torch.zeros_like(source) if relation is None else relation]
    return EdgeLabels(
        edges=torch.stack([column[listed].long() for column in columns], 1),
        y=y[listed],
        features=None if features is None else features[listed],
        train_mask=train[listed],
        val_mask=val[listed],
        test_mask=test[listed],
    ), ~held_out


def both_ways(source: Tensor, target: Tensor, values: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Add the reverse of every edge and remove duplicates.

    Args:
        source: Integer [E].
        target: Integer [E].
        values: Weights and features of the edges, [E, ...] each; a DataWarning says how many pairs of vertices have
            edges with different ones.

    Returns:
        Sources and targets of the distinct edges, and the position int64 in the input of the edge that each comes from.
    """
    # Sort the given and the reversed edges by (target, source), keep the first of each group of equal edges (given
    # edges come before reversed ones), and restore the order of the input.
    num_edges = max(len(source), 1)
    sources, targets = torch.cat([source, target]), torch.cat([target, source])
    order = sources.argsort(stable=True)
    order = order[targets[order].argsort(stable=True)]
    new = torch.ones(len(order), dtype=torch.bool)
    new[1:] = (sources[order].diff() != 0) | (targets[order].diff() != 0)
    first = order[new]
    if values:
        group = new.cumsum(0) - 1
        differs = torch.zeros_like(new)
        for rows in values:
            unequal = rows[order % num_edges] != rows[first[group] % num_edges]
            differs |= unequal.any(1) if unequal.dim() > 1 else unequal
        # The edges of two vertices form two groups, one for each direction: count one of them.
        warn_merged(len(group[differs & (sources[order] <= targets[order])].unique()))
    first = first.sort().values
    return sources[first], targets[first], first % num_edges


def warn_merged(num_pairs: int) -> None:
    """Warn (DataWarning) that edges with different weights or features were merged, unless there are none.

    Args:
        num_pairs: Number of pairs of vertices with such edges.
    """
    if num_pairs:
        warnings.warn(
            f"undirected: {num_pairs} pairs of vertices have edges of different weights or features; each direction "
            "keeps its first edge as given, else the first reversed one. Merge them before, for example by the mean",
            DataWarning,
            stacklevel=5,
        )


def edge_weights(weight: object, num_edges: int) -> Tensor:
    """Return edge weights as a tensor [E] of float32 or float64.

    Args:
        weight: A tensor, an array or a list of numbers [E].
        num_edges: Number of edges, E.

    Raises:
        InputError: If they are not one per edge, or one is not finite.
    """
    tensor = dense_cpu_tensor("edge_weight", weight)
    check_vector("edge_weight", tensor, num_edges, "edges")
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = cast("edge_weight", tensor, torch.float32)
    check_finite("edge_weight", tensor, "edge weights must be finite")
    return tensor


def count_vertices(source: Tensor, target: Tensor, field: str) -> int:
    """Return one more than the largest id.

    Args:
        source: Integer [E].
        target: Integer [E].
        field: Name of the edges in errors.

    Raises:
        InputError: If ids are far too sparse to be vertex numbers.
    """
    if not len(source):
        return 0
    return check_sparse_ids(1 + max(int(source.max()), int(target.max())), len(source), field)


def check_sparse_ids(count: int, num_edges: int, field: str) -> int:
    """Return `count` unchanged, or refuse it if ids are far too sparse to be vertex numbers.

    Args:
        count: One more than the largest id.
        num_edges: Number of edges that the ids are from.
        field: Name of the edges in errors.

    Raises:
        InputError: If most vertices below `count` would have no edge.
    """
    if count > max(MAX_SPARSE_IDS, MAX_IDS_PER_EDGE * num_edges):
        raise InputError(
            f"{field} contains ids up to {count - 1} in {num_edges} edges; vertices without edges would need "
            f"{format_bytes(POINTER_BYTES * count)} of memory: number the vertices from 0 without gaps, as "
            "names, edges = numpy.unique(edges, return_inverse=True) does, or give num_vertices if they are meant"
        )
    return count


def vertex_count(count: object) -> int:
    """Check a number of vertices that a caller or a file states, and return it as an int.

    Raises:
        InputError: If it is no whole number from 0 on, or needs more memory than there is.
    """
    if not isinstance(count, Integral) or int(count) < 0:
        raise InputError(f"num_vertices is {count!r}: give a whole number from 0 on")
    check_fits_memory(POINTER_BYTES * int(count), f"num_vertices={count}", "give the number of vertices of the graph")
    return int(count)
