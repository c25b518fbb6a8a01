"""Sets of rows that ranks exchange before or after each chunk, and the exchanges that are under way.

Source: NeutronTP, section 4.2.2, figure 9.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, pairwise

import torch
from torch import Tensor

from weft.comm import ColsToRows, RowSet, RowsToCols
from weft.data import Adjacency
from weft.nn import OwnRelationRows, RelationIndex
from weft.parallel.chunks.cut.ranges import chunk_sources


@dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """Rows that cross the network before or after each chunk. Vertex v belongs to rank v % P.

    Forward, source rows arrive with the first chunk that reads them, and the results of a chunk leave after it.
    Backward, gradients go the other way. Without the pipeline, all rows arrive before the first chunk and leave after
    the last one.
    """

    receives: tuple[RowSet | None, ...]
    """Rows that arrive before each chunk; None: none."""
    sends: tuple[RowSet | None, ...]
    """Rows that leave after each chunk; None: none."""

    @classmethod
    def of(
        cls,
        block: Adjacency,
        bounds: Sequence[int],
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
        *,
        pipeline: bool,
        relations: AssignedRelations | None = None,
    ) -> ExchangePlan:
        """Return the plan of a rank.

        Args:
            block: Adjacency of the whole graph.
            bounds: Boundaries of the ranges of targets, [chunks + 1].
            rank: The rank.
            size: Number of ranks.
            device: Device of the index tensors.
            pipeline: Rows cross chunk by chunk.
            relations: Relation rows, if the results are relation rows and not rows of vertices.
        """
        targets = [slice(*ends) for ends in pairwise(bounds)]
        spans = targets if relations is None else [relations.rows.span(target_range) for target_range in targets]
        assignment = partial(assigned, rank=rank, size=size)
        assign_results = assignment if relations is None else relations.assigned
        results = [torch.arange(span.start, span.stop, device=device) for span in spans]
        if pipeline:
            return cls(
                receives=tuple(assignment(ids.to(device)) if len(ids) else None for ids in first_read(block, bounds)),
                sends=tuple(assign_results(ids) if len(ids) else None for ids in results),
            )
        all_rows = torch.arange(block.num_targets, device=device)
        no_rows = (None,) * (len(targets) - 1)
        return cls(receives=(assignment(all_rows), *no_rows), sends=(*no_rows, assign_results(torch.cat(results))))

    def without_data(self) -> ExchangePlan:
        """Return the same sets of rows on the meta device, where they have only sizes."""
        receives, sends = (
            tuple(rows and replace(rows, ids=rows.ids.to("meta"), positions=rows.positions.to("meta")) for rows in sets)
            for sets in (self.receives, self.sends)
        )
        return ExchangePlan(receives=receives, sends=sends)

    def of_chunks(self, groups: Sequence[range]) -> ExchangePlan:
        """Return the plan with one set before, and one after, each group of chunks."""
        receives, sends = (
            tuple(joined([sets[number] for number in group]) for group in groups)
            for sets in (self.receives, self.sends)
        )
        return ExchangePlan(receives=receives, sends=sends)


def joined(sets: Sequence[RowSet | None]) -> RowSet | None:
    """Return the union of disjoint sets of rows, not ordered by rank; None if all are empty."""
    rows = [each for each in sets if each is not None]
    if not rows:
        return None
    return RowSet(
        ids=torch.cat([each.ids for each in rows]),
        counts=tuple(map(sum, zip(*(each.counts for each in rows), strict=True))),
        positions=torch.cat([each.positions for each in rows]),
    )


def first_read(block: Adjacency, bounds: Sequence[int]) -> Iterator[Tensor]:
    """Yield, for each chunk, the vertices that it reads and no earlier chunk does: int64, ascending.

    A chunk's targets are among the vertices that it reads.

    Args:
        block: Adjacency of the whole graph.
        bounds: Boundaries of the ranges of targets, [chunks + 1].
    """
    already_read = torch.zeros(block.num_sources, dtype=torch.bool)
    for sources in chunk_sources(block, bounds, loops=True):
        yield sources[~already_read[sources]]
        already_read[sources] = True


def assigned(ids: Tensor, *, rank: int, size: int) -> RowSet:
    """Return vertices as a set of rows; vertex v is row v // P of rank v % P.

    Args:
        ids: Vertices, ascending.
        rank: This rank.
        size: Number of ranks P.
    """
    return row_set(ids, ids % size, ids // size, rank, size)


@dataclass(frozen=True, kw_only=True)
class AssignedRelations:
    """Relation rows, each assigned to the rank that owns its vertex."""

    rows: RelationIndex
    """Index of all relation rows."""
    local: OwnRelationRows
    """Relation rows of this rank."""
    position: Tensor
    """Position of each relation row on the rank that owns it, int64 [M]."""
    rank: int
    """Number of this rank."""
    size: int
    """Number of ranks."""

    def assigned(self, ids: Tensor) -> RowSet:
        """Return relation rows, given by ascending numbers, as a set of rows."""
        on_host = ids.cpu()
        owner, position = self.rows.vertex[on_host] % self.size, self.position[on_host]
        return row_set(ids, owner.to(ids.device), position.to(ids.device), self.rank, self.size)


def row_set(ids: Tensor, owner: Tensor, position: Tensor, rank: int, size: int) -> RowSet:
    """Return a set of rows.

    Args:
        ids: Numbers of the rows.
        owner: Rank that owns each row.
        position: Position of each row on its owner.
        rank: This rank.
        size: Number of ranks.
    """
    return RowSet(
        ids=ids[owner.argsort(stable=True)],
        counts=tuple(torch.bincount(owner, minlength=size).tolist()),
        positions=position[owner == rank],
    )


class Receives:
    """Sets of rows that arrive one after the other, while the caller works on earlier sets.

    Args:
        sets: Rows that arrive before each chunk; None: none.
        start: Starts the exchange of a set, given its number and its rows.
        ahead: Number of sets that may be under way; None: all.
    """

    def __init__(
        self, sets: Sequence[RowSet | None], start: Callable[[int, RowSet], RowsToCols], *, ahead: int | None
    ) -> None:
        self._sets, self._start = enumerate(sets), start
        self._pending: deque[tuple[RowSet, RowsToCols] | None] = deque()
        self._begin(len(sets) if ahead is None else ahead)

    def receive(self) -> tuple[Tensor, Tensor] | None:
        """Return the next set's ids and rows, or None if it has none; also start another set."""
        due = self._pending.popleft()
        arrived = None if due is None else (due[0].ids, due[1].wait())
        self._begin(1)
        return arrived

    def _begin(self, number: int) -> None:
        for index, rows in islice(self._sets, number):
            self._pending.append(None if rows is None else (rows, self._start(index, rows)))


class Sends:
    """Sets of rows that leave one after the other, and the rows that arrive from other ranks.

    Args:
        start: Starts the exchange of a set, given its number, its rows and their columns.
        result: Destination of the rows that arrive.
        max_pending: Number of sets that may be under way; None: all.
    """

    def __init__(
        self, start: Callable[[int, RowSet, Tensor], ColsToRows], result: Tensor, *, max_pending: int | None
    ) -> None:
        self._start, self._result, self._max_pending = start, result, max_pending
        self._numbers = count()
        self._under_way: deque[tuple[RowSet, ColsToRows]] = deque()

    def send(self, rows: RowSet | None, columns: Callable[[Tensor], Tensor]) -> None:
        """Start to send the next set.

        Args:
            rows: Rows of the set; None: the chunk sends none.
            columns: Returns this rank's columns of given vertices.
        """
        if self._max_pending is not None:
            self._wait(self._max_pending - 1)
        number = next(self._numbers)
        if rows is not None:
            self._under_way.append((rows, self._start(number, rows, columns(rows.ids))))

    def finish(self) -> Tensor:
        """Wait for all sets, and return the rows that have arrived."""
        self._wait(0)
        return self._result

    def _wait(self, max_pending: int) -> None:
        while len(self._under_way) > max_pending:
            rows, pending = self._under_way.popleft()
            self._result[rows.positions] = pending.wait()
