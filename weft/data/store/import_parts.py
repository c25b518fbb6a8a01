"""Import of a graph that comes in parts: written as a graph folder without being in memory as a whole."""

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


def ignore_progress(text: str) -> None:
    """Ignore a line of progress."""
    del text


def import_parts(
    parts: GraphParts, folder: str | Path, report: ReportProgress = ignore_progress, *, overwrite: bool = False
) -> Graph:
    """Write a graph that comes in parts as a graph folder, and open it.

    Args:
        parts: The graph.
        folder: The new folder.
        report: Called with lines of progress.
        overwrite: Replace a graph folder that exists.

    Raises:
        InputError: As from new_store, and for values that no graph may contain; no folder is left then.
    """
    with new_store(folder, overwrite=overwrite) as draft:
        write_parts(with_checked_labels(parts), draft, report)
    return Graph.open(folder, verify=False)


def with_checked_labels(parts: GraphParts) -> GraphParts:
    """Return parts whose labels and masks are checked and cast as a Graph does. Raises InputError if they are wrong."""
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
