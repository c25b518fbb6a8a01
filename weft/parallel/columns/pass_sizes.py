"""Sizes of an aggregate over columns that runs chunk by chunk: what its trace and its run without data need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from weft.comm import RowSet
from weft.nn import Aggregate
from weft.parallel.chunks.run.slots import Way, edge_bytes
from weft.parallel.columns.chunking import CutSizes
from weft.parallel.columns.exchange_plan import ExchangePlan


class SetSize(NamedTuple):
    """Numbers of rows that cross the network together."""

    rows: int
    """Number of rows of all ranks."""
    num_own: int
    """Number of rows that this rank owns."""

    @classmethod
    def of(cls, rows: RowSet | None) -> SetSize:
        """Return the size of a set of rows; None is an empty set."""
        return cls(0, 0) if rows is None else cls(len(rows.ids), len(rows.positions))

    @classmethod
    def between(cls, bounds: Sequence[int], rank: int) -> SetSize:
        """Return the size of the set of all rows.

        Args:
            bounds: Boundaries of the rows that each rank owns.
            rank: This rank.
        """
        return cls(bounds[-1], bounds[rank + 1] - bounds[rank])


@dataclass(frozen=True, kw_only=True)
class PassSizes:
    """Sizes of a `ColumnPass` on its rank. Widths are numbers of columns."""

    op: Aggregate
    """The aggregate on this rank's columns."""
    steps: int
    """Number of aggregate steps."""
    cut: CutSizes
    """Sizes of the chunks."""
    results: Sequence[int]
    """Number of rows of the result that each chunk computes."""
    exchange: ExchangePlan
    """Rows that cross the network, without data."""
    ports: Sequence[int]
    """Widths of the tensors that the aggregate reads, those at sources first."""
    width: int
    """Width of the result."""
    in_memory: bool
    """True if rows of all vertices are in memory, False if in files."""
    stored_edge: int
    """Bytes of an edge in a file: its source and its weight."""
    separate_memory: bool
    """True if chunks run on a device with a memory of its own."""
    recomputes: bool
    """True if the backward pass computes the aggregate again."""
    itemsize: int
    """Bytes of an element."""

    @property
    def schedule(self) -> list[tuple[SetSize, int, SetSize]]:
        """For each chunk: rows that arrive before it, its edges in all steps, and rows that leave after it."""
        receives, sends = (map(SetSize.of, sets) for sets in (self.exchange.receives, self.exchange.sends))
        edges = (self.steps * number for number in self.cut.edges)
        return list(zip(receives, edges, sends, strict=True))

    @cached_property
    def result_ranges(self) -> list[slice]:
        """Range of the result's rows that each chunk computes."""
        return [slice(*ends) for ends in pairwise(accumulate(self.results, initial=0))]

    def read_width(self, step: int) -> int:
        """Return the number of columns that a step reads at sources."""
        widths = self.ports[: len(self.op.source)]
        return sum(widths[1:]) + self.width if step else sum(widths)

    @property
    def target_width(self) -> int:
        """Number of columns that are read at targets."""
        return sum(self.ports[len(self.op.source) :])

    @property
    def back(self) -> Way:
        """Edge arrays that the backward pass loads from files."""
        return "back" if self.op.linear else "both"

    def edge_bytes(self, number: int, way: Way) -> int:
        """Return the bytes of edges that a chunk loads.

        Args:
            number: Number of the chunk.
            way: Edge arrays to load.
        """
        edges = self.cut.edges[number] + self.cut.loops[number]
        return edge_bytes(way, self.results[number], self.cut.num_slots, edges, self.stored_edge, 0)
