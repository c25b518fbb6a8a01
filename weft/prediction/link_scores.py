"""Scores of links by a trained model: the best targets of each source, or the scores of pairs in a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.data import Graph, endpoint_ranges, forward_relations
from weft.data.tables.table import ID, ids_of, open_table, raise_at_first, require_columns
from weft.data.tables.table_vertices import TypeOfVertices
from weft.data.vertex_names import NameIndex
from weft.training.tasks.top_targets import decode_keys
from weft.utils.errors import InputError

WRITTEN_ROWS = 1 << 16
"""Number of rows of a file that are converted at once."""


class TopTargets(NamedTuple):
    """Best targets of q sources. A source with fewer than k candidates has -1 and minus infinity at the end."""

    source: Tensor
    """Original id of each source, int64 [q]."""
    relation: Tensor
    """Relation of each row, int64 [q]: position in the relations of the graph; 0 without relations."""
    target: Tensor
    """Original ids of the targets, the best first, int64 [q, k]."""
    score: Tensor
    """Scores of the targets, float32 [q, k]."""


def sources_of(graph: Graph) -> tuple[Tensor, Tensor]:
    """Return the original ids of all possible sources of each relation, ascending, and the relations: int64 [q] each.

    Args:
        graph: The graph.
    """
    ranges = [torch.arange(first, stop) for first, stop in endpoint_ranges(graph)[:, 0].tolist()]
    counts = torch.tensor([len(sources) for sources in ranges])
    return torch.cat(ranges), torch.arange(len(ranges)).repeat_interleave(counts)


def top_of_keys(keys: Tensor, graph: Graph) -> TopTargets:
    """Return the best targets of all sources of a graph.

    Args:
        keys: Keys of the targets of each source, [q, k]; see `decode_keys`.
        graph: The graph.
    """
    ids, scores = decode_keys(keys)
    return TopTargets(*sources_of(graph), ids.masked_fill(scores == -torch.inf, -1), scores)


def read_pairs(source: Any, graph: Graph) -> Tensor:
    """Return pairs of vertices as original ids and relations, int64 [p, 3].

    Args:
        source: A table with the columns source, target and, if the graph has several relations, relation (names or
            numbers): a path, a DataFrame, a pyarrow.Table or arrays by name. Vertices have their names in the graph, or
            without names their ids.
        graph: The graph.

    Raises:
        InputError: A column is missing, or a row names no vertex or no relation.
    """
    table, relations = open_table(source, "pairs"), forward_relations(graph)
    columns = ("source", "target", "relation") if len(relations) > 1 else ("source", "target")
    require_columns(table, columns, "--pairs")
    names, row, edges = graph.vertex_names, 0, []
    ids_of_vertices = np.arange(graph.num_vertices) if names is None else names.ids  # texts in CSV files are converted
    index = NameIndex(ids_of_vertices, "id" if names is None else names.column)
    vertices = TypeOfVertices(count=graph.num_vertices, index=index)
    for part in table.parts({"source": ID, "target": ID}):
        places = {column: f"{table.place}: column '{column}'" for column in ("source", "target")}
        ids = [vertices.find(ids_of(part[column], place, row), place, row) for column, place in places.items()]
        edges.append(torch.from_numpy(np.stack(ids, 1)))
        row += len(edges[-1])
    endpoints = torch.cat([torch.empty(0, 2, dtype=torch.int64), *edges])
    relation = torch.zeros(len(endpoints), 1, dtype=torch.int64)
    row = 0
    numbers = {name: number for number, name in enumerate(relations)}
    numbers |= {str(number): number for number in range(len(relations))}
    for part in table.parts({"relation": ID}) if len(relations) > 1 else ():
        place = f"{table.place}: column 'relation'"
        part_numbers = np.array([numbers.get(str(name), -1) for name in ids_of(part["relation"], place, row).tolist()])
        raise_at_first(part_numbers < 0, place, row, f"is no relation: give one of {', '.join(relations)}")
        relation[row : row + len(part_numbers), 0] = torch.from_numpy(part_numbers)
        row += len(part_numbers)
    return torch.cat([endpoints, relation], 1)


def top_columns(top: TopTargets, graph: Graph) -> Iterator[dict[str, list[Any]]]:
    """Yield the best targets as columns: source, target, relation if there are several, rank (from 1) and score.

    Args:
        top: The targets.
        graph: The graph, which has the names of vertices and relations.
    """
    at_once = max(1, WRITTEN_ROWS // max(top.target.shape[1], 1))
    parts = (part.split(at_once) for part in top)
    for source, relation, target, score in zip(*parts, strict=True):
        row, position = (target >= 0).nonzero().unbind(1)
        pairs = torch.stack([source[row], target[row, position], relation[row]], 1)
        yield {**pair_columns(pairs, graph), "rank": (position + 1).tolist(), "score": score[row, position].tolist()}


def scored_columns(pairs: Tensor, scores: Tensor, graph: Graph) -> Iterator[dict[str, list[Any]]]:
    """Yield pairs and their scores as columns: source, target, relation if there are several, and score.

    Args:
        pairs: The pairs, [p, 3].
        scores: Their scores, [p].
        graph: The graph, which has the names of vertices and relations.
    """
    for part, part_scores in zip(pairs.split(WRITTEN_ROWS), scores.split(WRITTEN_ROWS), strict=True):
        yield {**pair_columns(part, graph), "score": part_scores.tolist()}


def pair_columns(pairs: Tensor, graph: Graph) -> dict[str, list[Any]]:
    """Return the names of the vertices and relations of pairs, by column.

    Args:
        pairs: The pairs, [p, 3].
        graph: The graph.
    """
    names, relations = graph.vertex_names, forward_relations(graph)
    source, target, relation = pairs.unbind(1)
    columns = {
        column: ids.tolist() if names is None else names.take(ids)
        for column, ids in (("source", source), ("target", target))
    }
    return columns | ({"relation": [relations[number] for number in relation]} if len(relations) > 1 else {})


def check_link_request(task: str, what: str, layer: int | None, top: int | None, *, has_pairs: bool) -> None:
    """Check the options of a prediction of links.

    Args:
        task: Task of the run.
        what: Kind of result that was requested.
        layer: Layer that was requested.
        top: Number of targets of each source.
        has_pairs: True if scores of pairs are requested.

    Raises:
        InputError: The options contradict each other, or the run has another task.
    """
    flag = f"--top {top}" if top is not None else "--pairs"
    if top is not None and has_pairs:
        raise InputError(f"{flag} and --pairs exclude each other: give one of them")
    if task != "link":
        raise InputError(f"{flag} needs a run with --task link, and this one predicts labels: leave it out")
    if what != "logits" or layer is not None:
        raise InputError(f"{flag}: --what and --layer have no effect on scores of links: leave them out")
    if top is not None and top < 1:
        raise InputError(f"{flag}: give at least 1")
