"""Which rows a full-graph step reads, or why it reads all: the optimisation `reach`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.data import Graph
from weft.nn import ONE_DEVICE, LinkModel, Total, ViewTraits, Workload, check_row_independence
from weft.partition import ReceptiveField
from weft.utils.errors import InputError

MIN_SAVED_SHARE = 0.25
"""The share of the edges that must be left out, since the others are copied for it."""


def find_receptive_field(work: Workload, traits: ViewTraits, *, training: bool) -> ReceptiveField | str:
    """What a training step's labelled vertices, or an evaluation's scored ones, reach; or why all rows are read.

    traits: of views on all rows. '': it is switched off, or would save little.
    """
    if not (work.optimisations.reach and work.has_graph):
        return ""
    hops = max((op.hops.stop for op in work.outline(traits, training=training)), default=0)
    if isinstance(work.model, LinkModel):
        return "links may join any vertices"
    vertices = labelled_vertices(work.graph, "train" if training else "train val test")
    reach = ReceptiveField.of(work.graph.in_edges, vertices, hops)
    if not len(vertices) or sum(reach.edges) >= (1 - MIN_SAVED_SHARE) * hops * work.graph.num_edges:
        return ""
    return reason_for_all_rows(work, traits, training=training) or reach


def reason_for_all_rows(work: Workload, traits: ViewTraits, *, training: bool) -> str:
    """Why a step needs all rows whatever it is of; '': it does not."""
    try:
        asked = work.outline(pruned_traits(traits), training=training)
        if traits == ONE_DEVICE:  # others have refused models whose rows know each other
            check_row_independence(work, together=False)
    except InputError as error:
        return str(error).rpartition(": ")[0]
    coupling = [op.layer for op in asked if isinstance(op.op, Total)]
    return f"{coupling[0]} takes its statistics over all rows" if coupling else ""


def pruned_traits(traits: ViewTraits) -> ViewTraits:
    """The traits of views on the rows that are reached, which are fewer behind each aggregate."""
    return traits._replace(shrinks_rows=True)


def labelled_vertices(graph: Graph, splits: str) -> Tensor:
    """The vertices of some splits that have a label: int64, ascending."""
    found = torch.zeros(graph.num_vertices, dtype=torch.bool)
    for split in splits.split():
        mask = graph.labelled(split)
        if mask is not None:
            found |= mask
    return found.nonzero().view(-1)


def describe_receptive_fields(known: dict[str, ReceptiveField | str]) -> dict[str, Any]:
    """What steps read, by what they are called, or why they read all rows, for a record."""
    found = {
        what: reach.counts if isinstance(reach, ReceptiveField) else reach for what, reach in known.items() if reach
    }
    return {"reach": found} if found else {}
