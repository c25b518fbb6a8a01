"""Receptive field of full-graph steps: the rows that a step must compute (the optimisation `reach`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.data import EdgeLabels, Graph
from weft.nn import (
    ONE_DEVICE,
    Decoder,
    LinkModel,
    ReceptiveField,
    Total,
    Unconverted,
    ViewTraits,
    Workload,
    check_row_independence,
)
from weft.utils.errors import InputError

MIN_SAVED_SHARE = 0.25
"""Smallest share of the edges that pruning must save, because it copies the remaining ones."""


def find_receptive_field(work: Workload, traits: ViewTraits, *, training: bool) -> ReceptiveField | str:
    """Return the receptive field of a step's scored vertices, or the reason why the step computes all rows.

    The reason is '' if the optimisation is off or would save little, or if the workload is restricted already.

    Args:
        work: The workload.
        traits: Properties of views on all rows.
        training: True for a training step; False for an evaluation, which reads the vertices of all splits.
    """
    if not (work.optimisations.reach and work.has_graph) or work.receptive_field is not None:
        return ""
    num_hops = max((op.hops.stop for op in work.outline(traits, training=training)), default=0)
    if isinstance(work.model, LinkModel) and isinstance(work.model.decoder, Decoder):
        return "links may join any vertices"
    if isinstance(work.model, Unconverted):
        return "the model is not converted, so it reads all rows"
    scored = endpoints if isinstance(work.model, LinkModel) else labelled_vertices
    vertices = scored(work.graph, training=training)
    field = ReceptiveField.of(work.graph.in_edges, vertices, num_hops)
    if not len(vertices) or sum(field.edges) >= (1 - MIN_SAVED_SHARE) * num_hops * work.graph.num_edges:
        return ""
    return reason_for_all_rows(work, traits, training=training) or field


def reason_for_all_rows(work: Workload, traits: ViewTraits, *, training: bool) -> str:
    """Return why a step needs all rows, whatever vertices it scores; '' if it does not.

    Args:
        work: The workload.
        traits: Properties of views on all rows.
        training: True for a training step.
    """
    try:
        operations = work.outline(pruned_traits(traits), training=training)
        if traits == ONE_DEVICE:  # other strategies have already refused models that mix rows
            check_row_independence(work, all_rows=False)
    except InputError as error:
        return str(error).rpartition(": ")[0]
    coupling = [op.layer for op in operations if isinstance(op.op, Total)]
    return f"{coupling[0]} sums over all rows" if coupling else ""


def pruned_traits(traits: ViewTraits) -> ViewTraits:
    """Return the properties of views on a receptive field, which has fewer rows after each aggregate."""
    return traits._replace(shrinks_rows=True)


def endpoints(graph: Graph, *, training: bool) -> Tensor:
    """Return the endpoints of the labelled edges that a step scores, int64, ascending.

    Args:
        graph: The graph.
        training: True for a training step; False for an evaluation.
    """
    labels = graph.labels("edge")
    assert isinstance(labels, EdgeLabels)
    vertices: Tensor = (labels.training_pairs() if training else labels.edges)[:, :2].unique()
    return vertices


def labelled_vertices(graph: Graph, *, training: bool) -> Tensor:
    """Return the labelled vertices that a step scores, int64, ascending.

    Args:
        graph: The graph.
        training: True for a training step; False for an evaluation.
    """
    labelled = torch.zeros(graph.num_vertices, dtype=torch.bool)
    for split in ("train",) if training else ("train", "val", "test"):
        mask = graph.labelled(split)
        if mask is not None:
            labelled |= mask
    return labelled.nonzero().view(-1)


def describe_receptive_fields(fields: dict[str, ReceptiveField | str]) -> dict[str, Any]:
    """Return, for the record, the size of the receptive field of each type of step, or why it reads all rows."""
    described = {
        step: field.counts if isinstance(field, ReceptiveField) else field for step, field in fields.items() if field
    }
    return {"reach": described} if described else {}
