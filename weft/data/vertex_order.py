"""Renumbering of a graph's vertices, so that rows that are read together are close in memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weft.data.adjacency import Adjacency
from weft.data.fields import EdgeLabels
from weft.data.graph import Graph
from weft.runtime import native
from weft.storage.quantized_table import stored_rows
from weft.utils.errors import InputError, unknown


def reorder(graph: Graph, kind: str) -> Graph:
    """Return the same graph with its vertices renumbered; `ids` contains their original ids.

    Args:
        graph: The graph.
        kind: 'degree': by descending number of in- and out-edges. 'bfs': breadth-first search over edges in both
            directions, starting at the vertex with the most edges, then again from the remaining ones. 'none':
            unchanged.

    Raises:
        InputError: For an unknown kind, and for several vertex types, whose ids must stay contiguous.
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
    new_ids = order.argsort()
    return replace(
        graph,
        in_edges=in_edges,
        x=None if graph.x is None else stored_rows(graph.x, order),
        y=take_rows(graph.y, order),
        train_mask=take_rows(graph.train_mask, order),
        val_mask=take_rows(graph.val_mask, order),
        test_mask=take_rows(graph.test_mask, order),
        edge_type=take_rows(graph.edge_type, edge_ids),
        edge_features=take_rows(graph.edge_features, edge_ids),
        val_links=renumber_links(graph.val_links, new_ids),
        test_links=renumber_links(graph.test_links, new_ids),
        edge_labels=renumber_labels(graph.edge_labels, new_ids),
        features={name: stored_rows(table, order) for name, table in graph.features.items()},
        ids=order if graph.ids is None else graph.ids[order],
        trusted=True,
    )


def by_degree(in_edges: Adjacency) -> Tensor:
    """Return the vertices by descending number of in- and out-edges, int64 [N]; ties keep their order."""
    degree = in_edges.degree + torch.bincount(in_edges.indices, minlength=in_edges.num_sources)
    return degree.argsort(descending=True, stable=True)


def breadth_first(in_edges: Adjacency) -> Tensor:
    """Return the vertices in the order of a breadth-first search, int64 [N]."""
    out = in_edges.with_weight(None).transpose  # of a temporary copy: this graph and its transpose are replaced anyway
    return native.breadth_first(in_edges.indptr, in_edges.indices, out.indptr, out.indices, by_degree(in_edges))


ORDERS = {"degree": by_degree, "bfs": breadth_first}


def renumbered(in_edges: Adjacency, order: Tensor) -> tuple[Adjacency, Tensor]:
    """Return the edges after renumbering the vertices; duplicate edges keep their order.

    Args:
        in_edges: The edges.
        order: Former id of each new id, int64 [N].

    Returns:
        The edges, and the former position of each edge, [E].
    """
    rank = torch.empty(len(order), dtype=native.id_dtype(len(order)))
    rank[order] = torch.arange(len(order), dtype=rank.dtype)
    target = rank.repeat_interleave(in_edges.degree, output_size=in_edges.num_edges)
    source = rank.index_select(0, in_edges.indices)
    indptr, indices, edge_ids = native.coo_to_csr(target, source, len(order), len(order))
    weight = take_rows(in_edges.weight, edge_ids)
    return Adjacency(indptr=indptr, indices=indices, num_sources=len(order), weight=weight), edge_ids


def renumber_links(links: Tensor | None, new_ids: Tensor) -> Tensor | None:
    """Return held-out edges with new vertex ids; None without any.

    Args:
        links: int64 [m, 3].
        new_ids: New id of each former id, int64 [N].
    """
    return None if links is None else torch.cat([new_ids[links[:, :2]], links[:, 2:]], 1)


def renumber_labels(labels: EdgeLabels | None, new_ids: Tensor) -> EdgeLabels | None:
    """Return labels of edges with new vertex ids; None without any.

    Args:
        labels: The labels.
        new_ids: New id of each former id, int64 [N].
    """
    return labels and replace(labels, edges=torch.cat([new_ids[labels.edges[:, :2]], labels.edges[:, 2:]], 1))


def take_rows(tensor: Tensor | None, positions: Tensor) -> Tensor | None:
    """Return the rows at some positions; None for None.

    Args:
        tensor: Tensor [n, ...], or None.
        positions: int64 [m].
    """
    return None if tensor is None else tensor.index_select(0, positions)
