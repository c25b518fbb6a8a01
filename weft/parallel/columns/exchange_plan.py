"""Which rows cross the network with which chunk, and their way there (NeutronTP, section 4.2.2, figure 9)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    """Which rows cross before or after which chunk; None: none. The ranks' rows are assigned one by one.

    forward: arrivals are source rows, each with the first chunk that reads it, departures a chunk's results; backward,
    their gradients go the other way. Without the pipeline all arrive before the first chunk and leave after the last.
    """

    receives: tuple[RowSet | None, ...]
    sends: tuple[RowSet | None, ...]

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
        """What crosses on `rank` of `size` with the chunks of a block's targets between these bounds.

        relations: whose rows the results are, if not those of vertices.
        """
        targets = [slice(*ends) for ends in pairwise(bounds)]
        spans = targets if relations is None else [relations.rows.span(one) for one in targets]
        assignment = partial(assigned, rank=rank, size=size)
        deal_results = assignment if relations is None else relations.assigned
        results = [torch.arange(span.start, span.stop, device=device) for span in spans]
        if pipeline:
            return cls(
                receives=tuple(assignment(ids.to(device)) if len(ids) else None for ids in first_read(block, bounds)),
                sends=tuple(deal_results(ids) if len(ids) else None for ids in results),
            )
        everything = torch.arange(block.num_targets, device=device)
        nothing = (None,) * (len(targets) - 1)
        return cls(receives=(assignment(everything), *nothing), sends=(*nothing, deal_results(torch.cat(results))))


def first_read(block: Adjacency, bounds: Sequence[int]) -> Iterator[Tensor]:
    """By chunk, the vertices that it reads, its targets among them, and no earlier one does: int64, ascending."""
    seen = torch.zeros(block.num_sources, dtype=torch.bool)
    for sources in chunk_sources(block, bounds, loops=True):
        yield sources[~seen[sources]]
        seen[sources] = True


def assigned(ids: Tensor, *, rank: int, size: int) -> RowSet:
    """Ascending vertices as a set of rows, vertex v being row v // P of rank v % P."""
    return row_set(ids, ids % size, ids // size, rank, size)


@dataclass(frozen=True, kw_only=True)
class AssignedRelations:
    """The relation rows, each answered for by the rank that answers for its vertex.

    local: those of this rank. place: int64 [M], where each of them stands there.
    """

    rows: RelationIndex
    local: OwnRelationRows
    place: Tensor
    rank: int
    size: int

    def assigned(self, ids: Tensor) -> RowSet:
        """Ascending relation rows as a set of rows."""
        on_host = ids.cpu()
        owner, place = self.rows.vertex[on_host] % self.size, self.place[on_host]
        return row_set(ids, owner.to(ids.device), place.to(ids.device), self.rank, self.size)


def row_set(ids: Tensor, owner: Tensor, place: Tensor, rank: int, size: int) -> RowSet:
    """A set of rows, each with the rank that answers for it and its place there."""
    return RowSet(
        ids=ids[owner.argsort(stable=True)],
        counts=tuple(torch.bincount(owner, minlength=size).tolist()),
        own=place[owner == rank],
    )


class Receives:
    """Sets of rows that arrive one by one while the caller works on those before; `ahead` of them at a time, or all.

    start: begins an exchange of the set of a number, from 0.
    """

    def __init__(
        self, sets: Sequence[RowSet | None], start: Callable[[int, RowSet], RowsToCols], *, ahead: int | None
    ) -> None:
        self._sets, self._start = enumerate(sets), start
        self._coming: deque[tuple[RowSet, RowsToCols] | None] = deque()
        self._begin(len(sets) if ahead is None else ahead)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """The next set's ids and rows, if one is due; another set begins to arrive."""
        due = self._coming.popleft()
        arrived = None if due is None else (due[0].ids, due[1].wait())
        self._begin(1)
        return arrived

    def _begin(self, number: int) -> None:
        for place, rows in islice(self._sets, number):
            self._coming.append(None if rows is None else (rows, self._start(place, rows)))


class Sends:
    """Sets of rows that leave one by one while the caller works on the next, and what arrives of them here.

    start: begins an exchange of the set of a number, from 0. behind: how many may be under way at once; None: all.
    """

    def __init__(
        self, start: Callable[[int, RowSet, Tensor], ColsToRows], result: Tensor, *, behind: int | None
    ) -> None:
        self._start, self._result, self._behind = start, result, behind
        self._places = count()
        self._under_way: deque[tuple[RowSet, ColsToRows]] = deque()

    def send(self, rows: RowSet | None, columns: Callable[[Tensor], Tensor]) -> None:
        """Begins to send a set, if one is due; columns: those here of some vertices, by their ids."""
        if self._behind is not None:
            self._wait(self._behind - 1)
        place = next(self._places)
        if rows is not None:
            self._under_way.append((rows, self._start(place, rows, columns(rows.ids))))

    def finish(self) -> Tensor:
        """Waits for all; what has arrived of them."""
        self._wait(0)
        return self._result

    def _wait(self, left: int) -> None:
        while len(self._under_way) > left:
            rows, coming = self._under_way.popleft()
            self._result[rows.own] = coming.wait()
