"""Assignment of an attention's columns to ranks, and the movement of its logits (NeutronTP, section 4.1.1).

Columns are assigned evenly and may cut a head. Every rank that has a column of a head needs the head's logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from weft.comm import ColumnLayout, count_shared, even_bounds
from weft.comm.columns import Range
from weft.nn import AttendEdges, EdgeSoftmax


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """Distribution of an attention over h [N, width] on some ranks.

    Logits are computed from `logit_width` columns of sources and as many of targets. If the sources' columns are h
    itself, there are two ways to get the logits of a head that is cut: all its ranks receive its whole vectors, or each
    rank computes its columns' part of the logits, by edge, and the ranks add up the parts.
    """

    rows: tuple[int, ...]
    """Bounds of the rows of each rank."""
    num_edges: int
    """Number of edges."""
    width: int
    """Number of columns of h."""
    heads: int
    """Number of heads."""
    logit_width: int
    """Number of columns of a source, and of a target, from which logits are computed."""
    separate_left: bool
    """True if the sources' columns for logits are a tensor of their own, next to h; False if they are h."""
    may_sum: bool = True
    """True if ranks may add up parts of logits.

    They may not chunk by chunk, nor if successive aggregates have different rows.
    """

    @classmethod
    def of(cls, op: EdgeSoftmax, *, rows: tuple[int, ...], num_edges: int, may_sum: bool) -> AttentionPlan:
        """Return the distribution of an attention that has all columns of every head.

        Args:
            op: The attention.
            rows: Bounds of the rows of each rank.
            num_edges: Number of edges.
            may_sum: True if ranks may add up parts of logits.
        """
        return cls(
            rows=rows,
            num_edges=num_edges,
            width=op.bounds[-1],
            heads=op.heads,
            logit_width=op.logit_width,
            separate_left=op.separate_logit_width > 0,
            may_sum=may_sum,
        )

    def rank_part(self, op: EdgeSoftmax, rank: int) -> EdgeSoftmax:
        """Return the attention on the columns of a rank, with separate columns for the logits.

        Args:
            op: The attention on all columns.
            rank: The rank.
        """
        bounds, (first_head, _) = tuple(self.bounds(rank)), self.heads_of_ranks[rank]
        dropout = op.dropout and op.dropout._replace(first_head=first_head)
        if isinstance(op, AttendEdges):
            logit_bounds = tuple(self.logit_bounds(rank))
            return replace(op, bounds=bounds, logit_bounds=logit_bounds, separate_left=True, dropout=dropout)
        return replace(op, bounds=bounds, dropout=dropout)

    @property
    def num_vertices(self) -> int:
        """Number of rows."""
        return self.rows[-1]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.rows) - 1

    @cached_property
    def columns(self) -> list[Range]:
        """Columns of h that each rank has."""
        return list(pairwise(even_bounds(self.width, self.size)))

    @cached_property
    def heads_of_ranks(self) -> list[Range]:
        """Range of the heads of which each rank has a column."""
        head_width = self.width // self.heads
        firsts = [start // head_width for start, _ in self.columns]
        spans = zip(firsts, self.columns, strict=True)
        return [(first, -(-stop // head_width) if stop > start else first) for first, (start, stop) in spans]

    @cached_property
    def sums(self) -> bool:
        """True if ranks that share a head add up parts of its logits, because that sends less than whole vectors."""
        return self.may_sum and not self.separate_left and self._num_sent(sums=True) < self._num_sent(sums=False)

    def logit_columns(self, *, sums: bool) -> list[Range]:
        """Return the columns of sources, and of targets, from which each rank computes logits."""
        head_columns = self.logit_width // self.heads
        return (
            self.columns
            if sums
            else [(first * head_columns, last * head_columns) for first, last in self.heads_of_ranks]
        )

    def layout(self, *, sums: bool) -> ColumnLayout:
        """Return the distribution of the columns of the concatenated inputs: h, left if it is separate, and right."""
        assigned: list[tuple[Range, ...]] = []
        for columns, (start, stop) in zip(self.columns, self.logit_columns(sums=sums), strict=True):
            left, right = self.width + start, self.width + self.logit_width * self.separate_left + start
            right_columns = (right, right + stop - start)
            assigned.append(
                (columns, (left, left + stop - start), right_columns)
                if self.separate_left
                else ((start, stop), right_columns)
            )
        return ColumnLayout(rows=self.rows, columns=tuple(assigned))

    def own_columns(self, rank: int) -> tuple[slice, slice, slice]:
        """Return the positions of h, of the sources' and of the targets' columns for logits in a rank's columns.

        The rank's columns are those of the layout with whole vectors.
        """
        (start, stop), (first, last) = self.columns[rank], self.logit_columns(sums=False)[rank]
        shift, left = (start, stop - start) if self.separate_left else (first, 0)
        right, end = left + last - first, left + 2 * (last - first)
        return slice(start - shift, stop - shift), slice(left, right), slice(right, end)

    def bounds(self, rank: int) -> list[int]:
        """Return the bounds of the heads in the columns of h that a rank has."""
        return self._head_bounds(rank, self.width, self.columns[rank])

    def logit_bounds(self, rank: int) -> list[int]:
        """Return the bounds of the heads in the columns from which a rank computes logits."""
        return self._head_bounds(rank, self.logit_width, self.logit_columns(sums=self.sums)[rank])

    def explain(self, itemsize: int, num_remote: int) -> str:
        """Return the chosen way to get logits, and the bytes that all ranks send in a forward pass by each way.

        Args:
            itemsize: Bytes of an element.
            num_remote: Rows that ranks lack for the in-edges of their own rows; -1 if unknown.
        """
        if self.separate_left:
            numbers_by_way = {"logits of vertices": self._num_sent(sums=False)}
        elif not self.may_sum:
            numbers_by_way = {"whole vectors, because parts cannot be added up": self._num_sent(sums=False)}
        else:
            numbers_by_way = {"whole vectors": self._num_sent(sums=False), "partial sums": self._num_sent(sums=True)}
        chosen = list(numbers_by_way)[self.sums]
        if num_remote >= 0:
            numbers_by_way["data-parallel"] = self._num_sent_data_parallel(num_remote)
        return f"{chosen}, of " + ", ".join(
            f"{way} {numbers * itemsize:,} B" for way, numbers in numbers_by_way.items()
        )

    def _num_sent(self, *, sums: bool) -> int:
        """Return the elements that all ranks send for logits in a forward pass, in addition to their columns of h."""
        layout = self.layout(sums=sums)
        numbers = 0
        for rank, (start, stop) in enumerate(self.columns):
            numbers += (self.num_vertices - layout.num_rows(rank)) * (layout.width(rank) - (stop - start))
            numbers += sum(count_shared(self.heads_of_ranks, self.num_logits, rank)) * sums
        return numbers

    @property
    def num_logits(self) -> int:
        """Number of logits of a head: one for each edge, and one for each vertex's self-loop."""
        return self.num_edges + self.num_vertices

    def _num_sent_data_parallel(self, num_remote: int) -> int:
        """Return the elements that the paper's method sends.

        A rank fetches the sources of its own in-edges, and sends their logits to the ranks that need them.
        """
        others = self.num_logits * (self.size - 1) // self.size
        return num_remote * self.logit_width + others * sum(last - first for first, last in self.heads_of_ranks)

    def _head_bounds(self, rank: int, width: int, columns: Range) -> list[int]:
        """Return the bounds of a rank's heads, of `width` columns in total, within its columns."""
        (first, last), (start, stop) = self.heads_of_ranks[rank], columns
        return [min(max(width // self.heads * head, start), stop) - start for head in range(first, last + 1)]
