"""Other numberings of a graph's vertices, so that rows which are read together lie close together in memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.graph import Graph
from weft.runtime import native
from weft.utils.errors import InputError, unknown


def reorder(graph: Graph, kind: str) -> Graph:
    """The same graph with its vertices renumbered; `ids` holds their original ids.

    kind: 'degree' puts the vertices with the most edges, in and out, first. 'bfs' is breadth first over edges in both
    directions, from the vertex with the most edges, then from that of those not yet met. 'none' is the graph as it is.

    Raises InputError for an unknown kind, and for several vertex types, each of which is one range of ids.
    """
    if kind == "none":
        return graph
    if kind not in ORDERS:
        raise unknown("order", kind, ("none", *ORDERS))
    if len(graph.vertex_types) > 1:
        raise InputError(
            f"{graph.name} has {len(graph.vertex_types)} vertex types, and the ids of each must stay together: "
            f"leave out --order {kind}"
        )
    order = ORDERS[kind](graph.in_edges)
    in_edges, edge_ids = renumbered(graph.in_edges, order)
    place = order.argsort()
    return replace(
        graph,
        in_edges=in_edges,
        x=taken(graph.x, order),
        y=taken(graph.y, order),
        train_mask=taken(graph.train_mask, order),
        val_mask=taken(graph.val_mask, order),
        test_mask=taken(graph.test_mask, order),
        edge_type=taken(graph.edge_type, edge_ids),
        edge_features=taken(graph.edge_features, edge_ids),
        val_links=moved(graph.val_links, place),
        test_links=moved(graph.test_links, place),
        features={name: tensor[order] for name, tensor in graph.features.items()},
        ids=order if graph.ids is None else graph.ids[order],
        trusted=True,
    )


def by_degree(in_edges: Adjacency) -> Tensor:
    """The vertices by falling number of edges, in and out, int64 [N]; equals keep their order."""
    degree = in_edges.degree + torch.bincount(in_edges.indices, minlength=in_edges.num_sources)
    return degree.argsort(descending=True, stable=True)


def breadth_first(in_edges: Adjacency) -> Tensor:
    """The vertices as a breadth-first search meets them, int64 [N]."""
    out = in_edges.with_weight(None).transpose  # not kept: the graph that stays has another
    return native.breadth_first(in_edges.indptr, in_edges.indices, out.indptr, out.indices, by_degree(in_edges))


ORDERS = {"degree": by_degree, "bfs": breadth_first}


def renumbered(in_edges: Adjacency, order: Tensor) -> tuple[Adjacency, Tensor]:
    """The edges of vertices that change places, and the former position [E] of each; duplicates keep their order."""
    rank = torch.empty(len(order), dtype=native.id_dtype(len(order)))
    rank[order] = torch.arange(len(order), dtype=rank.dtype)
    target = rank.repeat_interleave(in_edges.degree, output_size=in_edges.num_edges)
    source = rank.index_select(0, in_edges.indices)
    indptr, indices, edge_ids = native.coo_to_csr(target, source, len(order), len(order))
    weight = taken(in_edges.weight, edge_ids)
    return Adjacency(indptr=indptr, indices=indices, num_sources=len(order), weight=weight), edge_ids


def moved(links: Tensor | None, place: Tensor) -> Tensor | None:
    """Held-out edges [m, 3] between the places [N] that the vertices now have."""
    return None if links is None else torch.cat([place[links[:, :2]], links[:, 2:]], 1)


def taken(tensor: Tensor | None, positions: Tensor) -> Tensor | None:
    """The rows at these positions, of a tensor that may be absent."""
    return None if tensor is None else tensor.index_select(0, positions)
