"""Which rows of typed features and of embeddings a rank has, and those that it fetches."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Group, Halo, make_route
from weft.data import Graph
from weft.nn import TypedRows


def is_embedded(graph: Graph) -> Tensor:
    """The vertices that a model learns a row each for, because they have no features: bool [N]."""
    found = torch.full((graph.num_vertices,), graph.x is None)
    for name in graph.features:
        span = graph.type_range(name)
        found[span.start : span.stop] = False
    return found


def embedding_rows(graph: Graph, vertices: slice | Tensor) -> Tensor:
    """Which rows of an embedding belong to those of the vertices that are embedded: int64 [k].

    By what vertices were called first, so that another order of them changes no number.
    """
    embedded = is_embedded(graph)
    order = torch.arange(graph.num_vertices) if graph.ids is None else graph.ids.argsort()
    row = torch.empty_like(order)
    row[order] = embedded[order].cumsum(0) - 1
    return row[vertices][embedded[vertices]]


def typed_rows(
    graph: Graph, vertices: slice | Tensor, device: torch.device | str, dtype: torch.dtype
) -> TypedRows | None:
    """What is known of some vertices of a graph without x; None for one with x."""
    if graph.x is not None:
        return None
    ids = torch.arange(*vertices.indices(graph.num_vertices)) if isinstance(vertices, slice) else vertices
    features, places = [], []
    for name in graph.vertex_types:
        if name in graph.features:
            span = graph.type_range(name)
            place = ((ids >= span.start) & (ids < span.stop)).nonzero().view(-1)
            features.append(graph.features[name][ids[place] - span.start].to(device, dtype))
            places.append(place)
    has_features = torch.zeros(len(ids), dtype=torch.bool)
    has_features[torch.cat([ids[:0], *places])] = True
    places.append((~has_features).nonzero().view(-1))
    order = torch.cat(places).argsort()
    in_order = torch.equal(order, torch.arange(len(order)))
    return TypedRows(
        features=tuple(features), num_embedded=len(places[-1]), order=None if in_order else order.to(device)
    )


def again_by_owner(graph: Graph, part: Tensor, rows: Tensor, num_own: int, size: int) -> tuple[Tensor, Tensor]:
    """The embedded ones of the vertices that a rank computes again, int64 [k], and how many each rank owns, [P].

    rows: int64, the rank's `num_own` vertices, and then those that it computes again.
    """
    again = rows[num_own:]
    again = again[is_embedded(graph)[again]]
    return again, torch.bincount(part[again], minlength=size)


class EmbeddedHalo:
    """Embedded rows of vertices that a rank computes again; their owners get the gradients. All ranks make it.

    again, counts: of `again_by_owner`. own: int64, the rank's embedded vertices.
    """

    def __init__(self, again: Tensor, counts: Tensor, own: Tensor, part: Tensor, group: Group) -> None:
        by_owner = part[again].argsort(stable=True)
        route = make_route(again[by_owner], counts.tolist(), own, len(own), group)
        self._halo, self._order = Halo(route, group, name="embedding"), by_owner.argsort().to(group.device)

    def fetch(self, weight: Tensor) -> Tensor:
        """The rows of all embedded vertices of the rank, in the order of its rows, from those that it keeps."""
        return torch.cat([weight, self._halo.fetch(weight).index_select(0, self._order)])
