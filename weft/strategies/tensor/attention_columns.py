"""How tensor parallelism deals out an attention, and how its logits get to where they are needed (NeutronTP, 4.1.1).

Columns are assigned evenly and may cut a head; every rank that holds a column of a head needs the head's logits.
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
    """Of h [N, width] over some ranks, for logits of `logit_width` columns of sources and as many of targets.

    rows: where each rank's begin and end. left_apart: the sources' columns come beside h; otherwise they are h, and
    there are two ways to the logits of a head that is cut. Either all its ranks get its whole vectors, or each adds up
    what its own columns contribute, by edge, where it may (not chunk by chunk, nor where hops differ in their rows).
    """

    rows: tuple[int, ...]
    num_edges: int
    width: int
    heads: int
    logit_width: int
    separate_left: bool
    may_sum: bool = True

    @classmethod
    def of(cls, op: EdgeSoftmax, *, rows: tuple[int, ...], num_edges: int, may_sum: bool) -> AttentionPlan:
        """That of an attention with all columns of every head."""
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
        """The attention on the columns that a rank holds, logits made of columns apart."""
        bounds, (first_head, _) = tuple(self.bounds(rank)), self.heads_of_ranks[rank]
        dropout = op.dropout and op.dropout._replace(first_head=first_head)
        if isinstance(op, AttendEdges):
            logit_bounds = tuple(self.logit_bounds(rank))
            return replace(op, bounds=bounds, logit_bounds=logit_bounds, separate_left=True, dropout=dropout)
        return replace(op, bounds=bounds, dropout=dropout)

    @property
    def num_vertices(self) -> int:
        return self.rows[-1]

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.rows) - 1

    @cached_property
    def columns(self) -> list[Range]:
        """The columns of h that each rank holds."""
        return list(pairwise(even_bounds(self.width, self.size)))

    @cached_property
    def heads_of_ranks(self) -> list[Range]:
        """The heads of which each rank holds a column."""
        head_width = self.width // self.heads
        firsts = [start // head_width for start, _ in self.columns]
        spans = zip(firsts, self.columns, strict=True)
        return [(first, -(-stop // head_width) if stop > start else first) for first, (start, stop) in spans]

    @cached_property
    def sums(self) -> bool:
        """Whether ranks that share a head add up parts of its logits, as this sends less than its vectors."""
        return self.may_sum and not self.separate_left and self._numbers(sums=True) < self._numbers(sums=False)

    def logit_columns(self, *, sums: bool) -> list[Range]:
        """The columns, of sources and of targets, that each rank makes logits of."""
        each = self.logit_width // self.heads
        return self.columns if sums else [(first * each, last * each) for first, last in self.heads_of_ranks]

    def layout(self, *, sums: bool) -> ColumnLayout:
        """Of [h | right], or with left apart of [h | left | right]."""
        assigned: list[tuple[Range, ...]] = []
        for columns, (start, stop) in zip(self.columns, self.logit_columns(sums=sums), strict=True):
            left, right = self.width + start, self.width + self.logit_width * self.separate_left + start
            beside = (right, right + stop - start)
            assigned.append(
                (columns, (left, left + stop - start), beside) if self.separate_left else ((start, stop), beside)
            )
        return ColumnLayout(rows=self.rows, columns=tuple(assigned))

    def own_columns(self, rank: int) -> tuple[slice, slice, slice]:
        """Where h, and what logits of sources and of targets are made of, stand in a rank's share of the layout.

        That is with whole vectors.
        """
        (start, stop), (first, last) = self.columns[rank], self.logit_columns(sums=False)[rank]
        shift, left = (start, stop - start) if self.separate_left else (first, 0)
        right, end = left + last - first, left + 2 * (last - first)
        return slice(start - shift, stop - shift), slice(left, right), slice(right, end)

    def bounds(self, rank: int) -> list[int]:
        """Where the heads begin and end in the columns of h that a rank holds."""
        return self._ends(rank, self.width, self.columns[rank])

    def logit_bounds(self, rank: int) -> list[int]:
        """Where they do in the columns that it makes logits of."""
        return self._ends(rank, self.logit_width, self.logit_columns(sums=self.sums)[rank])

    def explain(self, itemsize: int, num_remote: int) -> str:
        """The way that is taken, and the bytes that all ranks send for logits in a forward pass, this way and others.

        num_remote: the rows that ranks lack for the in-edges of their own; -1: unknown.
        """
        if self.separate_left:
            ways = {"logits of vertices": self._numbers(sums=False)}
        elif not self.may_sum:
            ways = {"whole vectors, since parts are not added up": self._numbers(sums=False)}
        else:
            ways = {"whole vectors": self._numbers(sums=False), "partial sums": self._numbers(sums=True)}
        taken = list(ways)[self.sums]
        if num_remote >= 0:
            ways["data-parallel"] = self._data_parallel(num_remote)
        return f"{taken}, of " + ", ".join(f"{way} {numbers * itemsize:,} B" for way, numbers in ways.items())

    def _numbers(self, *, sums: bool) -> int:
        """What all ranks send for logits in a forward pass, besides the columns of h that are theirs."""
        layout = self.layout(sums=sums)
        numbers = 0
        for rank, (start, stop) in enumerate(self.columns):
            numbers += (self.num_vertices - layout.num_rows(rank)) * (layout.width(rank) - (stop - start))
            numbers += sum(count_shared(self.heads_of_ranks, self.num_logits, rank)) * sums
        return numbers

    @property
    def num_logits(self) -> int:
        """Of a head: one for each edge, and for each vertex's own."""
        return self.num_edges + self.num_vertices

    def _data_parallel(self, num_remote: int) -> int:
        """The paper's way: a rank fetches the sources of its own in-edges, and sends their logits to who needs them."""
        others = self.num_logits * (self.size - 1) // self.size
        return num_remote * self.logit_width + others * sum(last - first for first, last in self.heads_of_ranks)

    def _ends(self, rank: int, width: int, columns: Range) -> list[int]:
        (first, last), (start, stop) = self.heads_of_ranks[rank], columns
        return [min(max(width // self.heads * head, start), stop) - start for head in range(first, last + 1)]
