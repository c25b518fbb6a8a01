"""Imports: a graph of parts, written as a store without being in memory, or gathered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from weft.data.adjacency import Adjacency
from weft.data.fields import GraphFields
from weft.data.graph import Graph
from weft.data.io.graph_parts import GraphParts
from weft.data.store.external_sort import ReportProgress
from weft.data.store.store import new_store
from weft.data.store.write_parts import write_parts


def say_nothing(text: str) -> None:
    """Of those who ask for no progress."""
    del text


def import_parts(
    parts: GraphParts, folder: str | Path, say: ReportProgress = say_nothing, *, overwrite: bool = False
) -> Graph:
    """Writes a graph of parts as a store folder, and opens it. say: is told how far it is. overwrite: a store there.

    Raises InputError as new_store does, and for values that no graph may hold; nothing is left then.
    """
    with new_store(folder, overwrite=overwrite) as draft:
        write_parts(checked(parts), draft, say)
    return Graph.open(folder, verify=False)


def checked(parts: GraphParts) -> GraphParts:
    """The same with labels and masks as a graph has them. InputError where they are wrong."""
    if parts.num_vertices is None:
        return parts
    none = torch.empty(0, dtype=torch.int32)
    pointers = torch.zeros(parts.num_vertices + 1, dtype=torch.int64)
    graph = Graph.of(
        GraphFields(
            in_edges=Adjacency(indptr=pointers, indices=none, num_sources=parts.num_vertices),
            y=parts.y,
            vertex_names=parts.vertex_names,
            name=parts.name,
            **parts.masks._asdict(),
        )
    )
    masks = type(parts.masks)(graph.train_mask, graph.val_mask, graph.test_mask)
    return replace(parts, y=graph.y, masks=masks)
