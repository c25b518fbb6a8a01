"""From edge arrays to in-edges: checks in the caller's own positions, then one native sort."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.fields import GraphFields
from weft.data.tensor_checks import (
    Numbers,
    cast,
    check_edge_features,
    check_finite,
    check_ids,
    check_vector,
    plain,
    vertex_ids,
    whole,
)
from weft.runtime.memory import require_memory
from weft.runtime.native import coo_to_csr
from weft.utils.errors import InputError
from weft.utils.units import format_bytes

# Above both, most vertices would have no edge: ids are names, and no vertex numbers.
MAX_SPARSE_IDS = 1 << 24
MAX_IDS_PER_EDGE = 16

POINTER_BYTES = 16  # of a vertex: int64 for the edges into it, and for those out of it


def build(
    source: Numbers,
    target: Numbers,
    *,
    num_vertices: int | None = None,
    weight: Numbers | None = None,
    edge_features: Numbers | None = None,
    edge_type: Numbers | None = None,
    undirected: bool = False,
    field: str = "edge_index",
) -> GraphFields:
    """What edges tell of a graph: themselves, their types and their features, in the order in which they are stored.

    It is by target, source, type, and position in the input.
    source and target are integer [E]; weight is float [E], edge_features float [E, K], edge_type integer [E].
    num_vertices is one more than the largest id where it is not given. Errors call the first two field[0] and field[1].
    undirected: joins each pair that an edge joins once in either direction. Of several edges from one vertex to another
    the first that is given stays, and one given before one turned round.

    Raises InputError for ids out of range, lengths that disagree, and weights or features that are not finite.
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
        edge_type = whole("edge_type", edge_type)
        check_vector("edge_type", edge_type, len(source), "edges")
    num_vertices = vertex_count(count_vertices(source, target, field) if num_vertices is None else num_vertices)
    check_ids(f"{field}[0]", source, num_vertices)
    check_ids(f"{field}[1]", target, num_vertices)
    if source.dtype != target.dtype:
        source, target = source.to(torch.int64), target.to(torch.int64)
    if undirected:
        if edge_type is not None:
            raise InputError("undirected edges of several types: leave it out, and load with inverse_relations")
        source, target, given = both_ways(source, target)
        weight, edge_features = (None if rows is None else rows[given] for rows in (weight, edge_features))
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
    )


def both_ways(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sources and targets of each pair of ends once, in either direction, and the edge int64 that it is from."""
    sources, targets = torch.cat([source, target]), torch.cat([target, source])
    order = sources.argsort(stable=True)
    order = order[targets[order].argsort(stable=True)]
    new = torch.ones(len(order), dtype=torch.bool)
    new[1:] = (sources[order].diff() != 0) | (targets[order].diff() != 0)
    first = order[new].sort().values
    return sources[first], targets[first], first % max(len(source), 1)


def edge_weights(weight: object, num_edges: int) -> Tensor:
    """Weights [E], float32 or float64; InputError where one is not finite."""
    tensor = plain("edge_weight", weight)
    check_vector("edge_weight", tensor, num_edges, "edges")
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = cast("edge_weight", tensor, torch.float32)
    check_finite("edge_weight", tensor, "edge weights must be finite")
    return tensor


def count_vertices(source: Tensor, target: Tensor, field: str) -> int:
    """One more than the largest id. Raises InputError where ids are far too sparse to be vertex numbers."""
    if not len(source):
        return 0
    return check_sparse_ids(1 + max(int(source.max()), int(target.max())), len(source), field)


def check_sparse_ids(count: int, num_edges: int, field: str) -> int:
    """One more than the largest id, as it is. Raises InputError where ids are far too sparse to be vertex numbers."""
    if count > max(MAX_SPARSE_IDS, MAX_IDS_PER_EDGE * num_edges):
        raise InputError(
            f"{field} holds ids up to {count - 1} in {num_edges} edges, and vertices without any would take "
            f"{format_bytes(POINTER_BYTES * count)} of memory: number the vertices from 0 without gaps, as "
            "names, edges = numpy.unique(edges, return_inverse=True) does, or give num_vertices if they are meant"
        )
    return count


def vertex_count(given: object) -> int:
    """A number of vertices that somebody states. InputError where there cannot be as many."""
    if not isinstance(given, Integral) or int(given) < 0:
        raise InputError(f"num_vertices is {given!r}: give a whole number from 0 on")
    require_memory(POINTER_BYTES * int(given), f"num_vertices={given}", "give as many as the graph has")
    return int(given)
