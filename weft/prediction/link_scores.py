"""Scores of links by a trained model: the best targets of each source, or the scores of pairs in a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.data import Graph, endpoint_ranges, forward_relations
from weft.data.tables.table import ID, ids_of, open_table, raise_at_first, require_columns
from weft.data.vertex_names import Ids, NameIndex, id_text, take_ids
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


def sources_of(graph: Graph, selection: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the original ids of the possible sources of each relation, and the relations: int64 [q] each.

    Args:
        graph: The graph.
        selection: Original ids of vertices, in the order to return. Default: all vertices, ascending.

    Raises:
        InputError: No vertex is selected, or one that cannot be the source of any relation.
    """
    vertices, ranges = torch.arange(graph.num_vertices) if selection is None else selection, endpoint_ranges(graph)
    sources = [vertices[(vertices >= first) & (vertices < stop)] for first, stop in ranges[:, 0].tolist()]
    counts = torch.tensor([len(ids) for ids in sources])
    if not len(vertices):
        raise InputError("--ids names no source for --top: give at least one")
    if selection is not None and len(others := selection[~torch.isin(selection, torch.cat(sources))]):
        number = int(others[0])
        name = number if graph.vertex_names is None else graph.vertex_names.take(others[:1])[0]
        raise InputError(f"--top: {name!r} is of a vertex type that is no source: leave it out of --ids")
    return torch.cat(sources), torch.arange(len(sources)).repeat_interleave(counts)


def top_of_keys(keys: Tensor, graph: Graph, selection: Tensor | None = None) -> TopTargets:
    """Return the best targets of the sources of a graph.

    Args:
        keys: Keys of the targets of each source, [q, k]; see `decode_keys`.
        graph: The graph.
        selection: Original ids of the sources. Default: all.
    """
    ids, scores = decode_keys(keys)
    return TopTargets(*sources_of(graph, selection), ids.masked_fill(scores == -torch.inf, -1), scores)


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
    if not {*columns} <= {*table.columns} and ";" not in "".join(table.columns):
        needed, present = (", ".join(names) or "none" for names in (columns, table.columns))
        raise InputError(f"{table.place}: --pairs needs the columns {needed}, and it has {present}: rename them")
    require_columns(table, columns, "--pairs")
    numbers = {name: number for number, name in enumerate(relations)}
    numbers |= {str(number): number for number in range(len(relations))}
    short = [name.split("|")[1] for name in relations]
    numbers |= {name: number for number, name in enumerate(short) if short.count(name) == 1}
    row, pairs, ids_of_range = 0, [torch.empty(0, 3, dtype=torch.int64)], IdsOfRange(graph)
    for part in table.parts(dict.fromkeys(columns, ID)):
        places = {column: f"{table.place}: column '{column}'" for column in columns}
        ids = {column: ids_of(part[column], place, row) for column, place in places.items()}
        relation = np.zeros(len(ids["source"]), np.int64)
        if len(relations) > 1:
            relation = np.array([numbers.get(str(name), -1) for name in ids["relation"].tolist()], np.int64)
            names = f"is no relation: give one of {', '.join(relations)}"
            raise_at_first(relation < 0, places["relation"], row, names)
        ends = []
        for side, column in enumerate(("source", "target")):
            vertices = ids_of_range.find(ids[column], relation, side)
            wrong = vertices < 0
            odd = id_text(ids[column], wrong.argmax()) if wrong.any() else ""
            raise_at_first(
                wrong, places[column], row, f"{odd} is no vertex's id there: correct it, or leave the row out"
            )
            ends.append(vertices)
        pairs.append(torch.from_numpy(np.stack([*ends, relation], 1)))
        row += len(relation)
    return torch.cat(pairs)


class IdsOfRange:
    """Look-up of vertices by id among the possible endpoints of a relation; vertices of two types may share an id.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: Graph) -> None:
        names = graph.vertex_names
        self._ids = np.arange(graph.num_vertices) if names is None else names.ids
        self._column = "id" if names is None else names.column
        self._ranges = endpoint_ranges(graph).numpy()
        self._indices: dict[tuple[int, int], NameIndex] = {}

    def find(self, ids: Ids, relation: NDArray[np.int64], side: int) -> NDArray[np.int64]:
        """Return the original ids of vertices, -1 if there is none, int64 [n].

        Args:
            ids: Their ids in the source, [n].
            relation: Relation of each, [n].
            side: 0 for sources, 1 for targets.
        """
        vertices = np.full(len(relation), -1, np.int64)
        for number in np.unique(relation).tolist():
            first, stop = self._ranges[number, side].tolist()
            if (first, stop) not in self._indices:
                self._indices[first, stop] = NameIndex(take_ids(self._ids, np.arange(first, stop)), self._column)
            rows = np.flatnonzero(relation == number)
            positions = self._indices[first, stop].find(take_ids(ids, rows))
            vertices[rows] = np.where(positions < 0, -1, positions + first)
        return vertices


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
