"""From edge arrays to in-edges: checks in the caller's own positions, then one native sort."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.native import coo_to_csr
from weft.data.adjacency import Adjacency
from weft.data.checks import cast, check_edge_features, check_finite, check_ids, check_vector
from weft.data.fields import GraphFields

# Above both, ids are arbitrary identifiers and no vertex numbers: the row pointers alone might not fit.
MAX_SPARSE_IDS = 1 << 31
MAX_IDS_PER_EDGE = 64


def build(
    source: Tensor,
    target: Tensor,
    *,
    num_vertices: int | None = None,
    weight: Tensor | None = None,
    edge_features: Tensor | None = None,
    edge_type: Tensor | None = None,
    field: str = "edge_index",
) -> GraphFields:
    """What edges tell of a graph: themselves, their types and their features, in the order in which they are stored.

    It is by target, source, type, and position in the input.
    source and target are integer [E]; weight is float [E], edge_features float [E, K], edge_type integer [E].
    num_vertices is one more than the largest id where it is not given. Errors call the first two field[0] and field[1].

    Raises InputError for ids out of range, lengths that disagree, and weights or features that are not finite.
    """
    if source.dim() != 1 or source.shape != target.shape:
        raise InputError(
            f"{field} has {list(source.shape)} sources and {list(target.shape)} targets: give one of each per edge"
        )
    if weight is not None:
        check_vector("edge_weight", weight, len(source), "edges")
        check_finite("edge_weight", weight, "edge weights must be finite")
        weight = (
            weight if weight.dtype in (torch.float32, torch.float64) else cast("edge_weight", weight, torch.float32)
        )
    if edge_features is not None:
        edge_features = cast("edge_features", edge_features, torch.float32)
        check_edge_features(edge_features, len(source))
        check_finite("edge_features", edge_features, "replace missing ones, for example with 0")
    if edge_type is not None:
        check_vector("edge_type", edge_type, len(source), "edges")
    if num_vertices is None:
        num_vertices = count_vertices(source, target, field)
    check_ids(f"{field}[0]", source, num_vertices)
    check_ids(f"{field}[1]", target, num_vertices)
    source, target = common_dtype(source, target, field)
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


def count_vertices(source: Tensor, target: Tensor, field: str) -> int:
    """One more than the largest id. Raises InputError where ids are far too sparse to be vertex numbers."""
    if not len(source):
        return 0
    count = 1 + max(int(source.max()), int(target.max()))
    if count > MAX_SPARSE_IDS and count > MAX_IDS_PER_EDGE * len(source):
        raise InputError(
            f"{field} holds ids up to {count - 1} in {len(source)} edges: number the vertices from 0 without gaps"
        )
    return count


def common_dtype(source: Tensor, target: Tensor, field: str) -> tuple[Tensor, Tensor]:
    """Both as int32 or both as int64, uncopied where they are one of these already; InputError for other kinds."""
    for i, ids in enumerate((source, target)):
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
            raise InputError(f"{field}[{i}] is {ids.dtype}: vertex ids are integers, cast them to int64")
    if source.dtype == target.dtype and source.dtype in (torch.int32, torch.int64):
        return source, target
    return source.to(torch.int64), target.to(torch.int64)
