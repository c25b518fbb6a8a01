"""The fields of a graph, unchecked: what readers return, and what writers take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.vertex_names import VertexNames


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphFields:
    """A graph of N vertices and E edges with what is known of its vertices. `Graph` adds checks and derived figures."""

    in_edges: Adjacency
    """The edges over all N vertices; of a typed graph, all relations merged. Holds the constant edge weights."""
    x: Tensor | None = None
    """float32 [N, F]: features."""
    y: Tensor | None = None
    """Labels: int64 [N] classes, -1 where unlabelled, or float32 [N, C] of 0 and 1 (several labels).

    Or values of a regression, float32 [N] or [N, T], NaN where unlabelled: told by numbers with a fraction.
    """
    train_mask: Tensor | None = None
    """bool [N]: the vertices to train on."""
    val_mask: Tensor | None = None
    """bool [N]: the vertices to validate on."""
    test_mask: Tensor | None = None
    """bool [N]: the vertices to test on."""
    name: str = "graph"
    """What messages call the graph."""
    edge_type: Tensor | None = None
    """int16 (int32 from 32,768 relations on) [E] in stored order: positions in `relations`."""
    relations: tuple[str, ...] = ()
    """One name for each relation: 'source type|name|target type'."""
    edge_features: Tensor | None = None
    """float32 [E, K] in stored order."""
    vertex_types: tuple[str, ...] = ()
    """The names of the vertex types, in the order of their ids."""
    type_offsets: tuple[int, ...] = ()
    """Type t has the ids from type_offsets[t] to type_offsets[t + 1]."""
    features: Mapping[str, Tensor] = field(default_factory=dict)
    """Per vertex type, float32 [n_t, F_t], where types differ in width or lack any; x is None then."""
    val_links: Tensor | None = None
    """int64 [m, 3]: edges held out to validate link prediction: source, target, relation (or 0)."""
    test_links: Tensor | None = None
    """int64 [m, 3]: edges held out to test link prediction."""
    ids: Tensor | None = None
    """int64 [N]: the vertices' original ids, where the graph was reordered (see weft.data.vertex_order); None: the same."""
    vertex_names: VertexNames | None = None
    """What the source of the graph calls its vertices, by their original ids; None: numbers from 0 on."""
