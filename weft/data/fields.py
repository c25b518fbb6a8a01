"""The fields of a graph, unchecked: the result of readers and the input of writers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.tables.schema import Schema
from weft.data.vertex_names import VertexNames


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphFields:
    """Arrays of a graph of N vertices and E edges. `Graph` adds checks and derived figures."""

    in_edges: Adjacency
    """Edges over all N vertices, with constant weights if there are any; in a typed graph, those of all relations."""
    x: Tensor | None = None
    """float32, float16 or bfloat16 [N, F]: features, which models read in the type of their rows."""
    y: Tensor | None = None
    """Labels in one of three forms, distinguished by dtype and values.

    int64 [N]: classes, -1 if unlabelled. float32 [N, C] of 0 and 1: several labels per vertex. float32 [N], or [N, T]
    that contains other numbers: values of a regression, NaN if unlabelled.
    """
    train_mask: Tensor | None = None
    """bool [N]: vertices to train on."""
    val_mask: Tensor | None = None
    """bool [N]: vertices to validate on."""
    test_mask: Tensor | None = None
    """bool [N]: vertices to test on."""
    name: str = "graph"
    """Name of the graph in messages."""
    edge_type: Tensor | None = None
    """int16 (int32 from 32,768 relations on) [E] in stored order: position of each edge's relation in `relations`."""
    relations: tuple[str, ...] = ()
    """Name of each relation, 'source type|name|target type'."""
    edge_features: Tensor | None = None
    """float32 [E, K] in stored order: features of the edges."""
    vertex_types: tuple[str, ...] = ()
    """Names of the vertex types, in the order of their ids."""
    type_offsets: tuple[int, ...] = ()
    """Id ranges of the vertex types: type t has the ids type_offsets[t] to type_offsets[t + 1] - 1."""
    features: Mapping[str, Tensor] = field(default_factory=dict)
    """Features [n_t, F_t] by vertex type, if types differ in width or some have none; x is None then."""
    val_links: Tensor | None = None
    """int64 [m, 3]: edges held out to validate link prediction, as rows (source, target, relation or 0)."""
    test_links: Tensor | None = None
    """int64 [m, 3]: edges held out to test link prediction, as rows (source, target, relation or 0)."""
    ids: Tensor | None = None
    """int64 [N]: original id of each vertex of a reordered graph (weft.data.vertex_order); None: not reordered."""
    vertex_names: VertexNames | None = None
    """Names of the vertices in the graph's source, by original id; None: they are numbered from 0."""
    schema: Schema | None = None
    """Tables that the graph comes from, with fitted transforms and class names; None for other sources."""
