"""What an aggregate over columns, made chunk by chunk, takes of memory: a `ColumnPass` on numbers of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.comm import ColumnLayout, RowSet
from weft.nn import Aggregate, AttendEdges, KernelMemory, estimate_kernel_memory
from weft.parallel.chunks.run.slots import Way, edge_bytes
from weft.parallel.columns.chunking import CutSizes
from weft.runtime.streams import pinned_bytes

ID_BYTES = 8
"""Of the number of a vertex, a row or a place."""
NUMBER_BYTES = 4
"""The same as it is stored."""


class SetSize(NamedTuple):
    """Rows that cross together: those of all ranks, and those that this one answers for."""

    rows: int
    own: int

    @classmethod
    def of(cls, rows: RowSet | None) -> SetSize:
        """Those of a set; None: there are none."""
        return cls(0, 0) if rows is None else cls(len(rows.ids), len(rows.own))

    @classmethod
    def between(cls, bounds: Sequence[int], rank: int) -> SetSize:
        """All rows, of which ranks answer for those between these bounds."""
        return cls(bounds[-1], bounds[rank + 1] - bounds[rank])


class Crossing(NamedTuple):
    """Columns of rows that cross: of a whole row, of what all ranks get of one, and of what this rank has of it."""

    row: int
    all_ranks: int
    here: int

    @classmethod
    def of(cls, layout: ColumnLayout, rank: int) -> Crossing:
        """Those of a layout on a rank."""
        return cls(layout.num_columns, sum(map(layout.width, range(len(layout.columns)))), layout.width(rank))


@dataclass(frozen=True, kw_only=True)
class PassSizes:
    """A `ColumnPass` on its rank. Widths are numbers of columns."""

    op: Aggregate
    """On this rank's columns."""
    steps: int
    cut: CutSizes
    results: Sequence[int]
    """Of each chunk, its rows of results."""
    num_rows: int
    num_own: int
    """Rows of which this rank has all columns before it, and behind it."""
    num_local: int
    receives: Sequence[SetSize]
    """With each chunk."""
    sends: Sequence[SetSize]
    coming: Crossing
    """What is read."""
    going: Crossing
    """The result."""
    ports: Sequence[int]
    """Widths of what is read, one for each tensor by source or target."""
    split: bool
    """Whether rows come, and not columns."""
    alone: bool
    in_memory: bool
    """Whether rows of all vertices are in memory, and not in files."""
    stored_edge: int
    """Bytes of an edge, as it is brought from a file: its source, and its weight."""
    apart: bool
    """Whether chunks are worked on in a memory of their own."""
    keeps: bool
    """See `Chunking.keeps`."""
    packed: bool
    """Whether what is read is put together before."""
    itemsize: int

    @property
    def schedule(self) -> list[tuple[SetSize, int, SetSize]]:
        """Chunk by chunk, the rows that arrive before it, its edges in all steps, and the rows that leave behind it."""
        edges = (self.steps * number for number in self.cut.edges)
        return list(zip(self.receives, edges, self.sends, strict=True))

    def read_width(self, step: int) -> int:
        """Columns that a step reads at sources."""
        widths = self.ports[: len(self.op.source)]
        return sum(widths[1:]) + self.going.here if step else sum(widths)

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass aggregates again."""
        return not (self.op.linear or self.keeps)

    @property
    def own_width(self) -> int:
        """Columns that are read of targets."""
        return sum(self.ports[len(self.op.source) :])

    @property
    def back(self) -> Way:
        """The edges that are brought backward, from files."""
        return "back" if self.op.linear else "both"

    def edge_bytes(self, number: int, way: Way) -> int:
        """What is brought of a chunk's edges."""
        edges = self.cut.edges[number] + self.cut.loops[number]
        return edge_bytes(way, self.results[number], self.cut.num_slots, edges, self.stored_edge, 0)

    def footprint(self) -> KernelMemory:
        """That of a forward pass, and of its backward pass."""
        forward, backward = _Run(self), _Run(self)
        forward.forward()
        backward.backward()
        saved = self.saved * self.itemsize
        result, grads = self.num_own * self.going.row, self.num_own * self.coming.row * self.split
        more = (self.num_local - self.num_own) * self.going.row  # gradients of results that are no rows of vertices
        return KernelMemory(
            forward=max(forward.most - result * self.itemsize - saved, 0),
            saved=saved,
            backward=max(backward.most + (more - grads) * self.itemsize, 0),
            saves_rows=int(self.reads_rows and not self.op.linear),
            saves_result=self.keeps and self.alone,
        )

    @property
    def num_results(self) -> int:
        """Rows of results, of all ranks."""
        return sum(self.results)

    @property
    def arrays(self) -> int:
        """Numbers that are read, in memory and apart from the rows that they are columns of."""
        if not self.in_memory:
            return 0
        return 0 if self.reads_rows else self.num_rows * sum(self.ports)

    @property
    def reads_rows(self) -> bool:
        """Whether chunks read the rows that are given, where they are."""
        return self.in_memory and (self.alone or not self.split) and len(self.ports) == 1

    @property
    def saved(self) -> int:
        """Numbers that are there until the backward pass has come by."""
        if self.op.linear or not self.in_memory:
            return 0
        between = (self.steps - 1) * self.num_results * self.going.here
        kept = self.num_results * (self.going.here * (2 - self.alone) + 2 * self.op.heads) if self.keeps else 0
        return self.arrays + between + kept

    @property
    def num_moved(self) -> int:
        """Rows that come into slots or leave them, of all chunks, forward and backward."""
        return sum(self.cut.loads) + sum(self.cut.flushes)

    @property
    def round_bytes(self) -> int:
        """Of the rounds as they are stored: numbers of rows in slots and of those that move, edges both ways."""
        numbers = self.cut.num_slots * len(self.cut.edges) + self.num_rows + 2 * self.num_moved
        return NUMBER_BYTES * numbers + sum(self.edge_bytes(number, "both") for number in range(len(self.cut.edges)))

    @property
    def topology_bytes(self) -> int:
        """Of what is made of rounds that are in memory, once: numbers of rows, and scalings."""
        return (self.cut.num_slots * len(self.cut.edges) + self.num_rows) * (ID_BYTES + self.itemsize)

    def row_bytes(self, passes: int) -> int:
        """Of rows in files, or pinned, of so many passes in a step, which are used again once they are free."""
        read = sum(self.stored_bytes(self.num_rows * width) for width in self.ports)
        made = self.stored_bytes(self.num_results * self.going.here)
        kept = 0 if self.op.linear else passes * (read + made * (self.steps - 1))
        return read + made * (1 + (self.steps > 1)) + kept

    def stored_bytes(self, numbers: int) -> int:
        """Of rows in a file, or pinned where chunks are worked on in a memory of their own."""
        num_bytes = numbers * self.itemsize
        return pinned_bytes(num_bytes) if self.apart else num_bytes


class _Run:
    """Numbers alive, and the most of them, in bytes."""

    def __init__(self, sizes: PassSizes) -> None:
        self.sizes, self.alive, self.most = sizes, 0, 0
        self.slots = 0 if sizes.cut.in_place or sizes.apart else sizes.cut.num_slots
        self.sources = sizes.num_rows if sizes.cut.in_place else sizes.cut.num_slots

    def forward(self) -> None:
        """As `ColumnPass.forward`."""
        one, last = self.sizes, self.sizes.steps - 1
        y = one.num_results * one.going.here * one.in_memory
        self.take(one.packed * one.num_own * one.coming.row + one.arrays)
        crosses = one.split and not one.alone
        coming = _Coming(self, one.receives if crosses else (), one.coming)
        going = None if one.alone else _Going(self, one.num_local, one.going)
        for step in range(one.steps):
            self.take(y + (2 * one.op.heads + one.going.here) * one.num_results * one.keeps)
            slots = self.slots * one.read_width(step)
            self.take(slots)
            for number in range(len(one.results)):
                if step == 0:
                    coming.arrive()
                self.passing(self.round_forward(number, step))
                if step == last and going:
                    going.send(one.sends[number], self.brought(number, back=False))
            self.take(-slots)
            if step and one.op.linear:
                self.take(-y)
        if going:
            going.finish()

    def backward(self) -> None:
        """As `ColumnPass.backward`."""
        one = self.sizes
        y, grads = one.num_results * one.going.here * one.in_memory, sum(one.ports) * one.num_rows * one.in_memory
        coming = _Coming(self, () if one.alone else one.sends[::-1], one.going)
        going = None if one.alone else _Going(self, one.num_own, one.coming)
        self.take(0 if one.alone else y)
        self.take(grads)
        for step in reversed(range(one.steps)):
            into = one.num_rows * one.going.here * bool(step) * one.in_memory
            slots = self.slots * one.read_width(step) * (1 + (not one.op.linear))
            self.take(into + slots)
            for number in reversed(range(len(one.results))):
                if step == one.steps - 1:
                    coming.arrive()
                self.passing(self.round_backward(number, step))
                if step == 0 and going:
                    here, asked = one.coming.here, one.receives[number]
                    brought = self.brought(number, back=True)
                    self.passing(asked.rows * (sum(one.ports) + here) * one.itemsize + brought)
                    going.send(asked, brought)
            self.take(-slots)
            if not (one.alone and step == one.steps - 1):
                self.take(-y)
        if going:
            going.finish()
        elif len(one.ports) > 1:
            self.take(one.num_rows * one.coming.here)

    def round_forward(self, number: int, step: int) -> int:
        """Bytes of a chunk beside its slots."""
        one = self.sizes
        if one.apart:
            return 0
        results, keeps = one.results[number], one.keeps and step == one.steps - 1
        result = results * (one.going.here + one.op.heads) * (1 + keeps)
        logits = one.cut.edges[number] * one.op.heads * 2 * isinstance(one.op, AttendEdges)
        moved = one.cut.loads[number] * max(one.ports, default=0) * one.in_memory
        return max(moved, result + logits) * one.itemsize + self.brought(number, back=False)

    def round_backward(self, number: int, step: int) -> int:
        """The same backward."""
        one, results = self.sizes, self.sizes.results[number]
        if one.apart:
            return 0
        copied = not one.in_memory and not (one.alone and step == one.steps - 1)
        brought = self.brought(number, back=True) + results * one.going.here * one.itemsize * copied
        moved = one.cut.flushes[number] * max(one.ports, default=0) * one.itemsize * one.in_memory
        if one.op.linear:
            return moved + brought
        if one.keeps:
            return max(moved, results * (3 * one.op.heads + 2 * one.own_width) * one.itemsize) + brought
        made = estimate_kernel_memory(
            one.op,
            num_targets=results,
            num_edges=one.cut.edges[number],
            width=one.going.here,
            itemsize=one.itemsize,
        )
        found = self.sources * one.read_width(step) + results * (one.going.here + one.own_width)
        return max(moved, made.saved + made.backward + found * one.itemsize) + brought

    def brought(self, number: int, *, back: bool) -> int:
        """Bytes that are brought from files for a chunk, and for the next one while it is worked on."""
        one = self.sizes
        if one.in_memory or one.apart:
            return 0
        following = number + (-1 if back else 1)
        there = one.cut.ahead and 0 <= following < len(one.results)
        return self.loaded(number, back=back) + (self.loaded(following, back=back) if there else 0)

    def loaded(self, number: int, *, back: bool) -> int:
        """Bytes of a chunk's edges, of its own rows, and of the numbers of those that move."""
        one, slots = self.sizes, self.sizes.cut.num_slots
        targets, read = one.cut.bounds[number + 1] - one.cut.bounds[number], not (back and one.op.linear)
        ends = ID_BYTES * (slots + targets) + one.itemsize * (slots + one.results[number]) * one.op.linear
        moved = one.cut.loads[number] * read + one.cut.flushes[number] * back
        edges = one.edge_bytes(number, one.back if back else "forward")
        return edges + ends + 2 * ID_BYTES * moved + targets * one.own_width * one.itemsize * read

    def take(self, numbers: int) -> None:
        """So many numbers more are alive, or less."""
        self.alive += numbers * self.sizes.itemsize
        self.most = max(self.most, self.alive)

    def passing(self, num_bytes: int) -> None:
        """So many more are alive for a moment."""
        self.most = max(self.most, self.alive + num_bytes)


class _Coming:
    """As `Receives` of sets that become columns, all at once or, of rows in files, one ahead."""

    def __init__(self, run: _Run, sets: Sequence[SetSize], crossing: Crossing) -> None:
        self.run, self.crossing = run, crossing
        self.sets, self.coming = deque(sets), deque[int]()
        self.start(len(sets) if run.sizes.in_memory else 1)

    def start(self, number: int) -> None:
        for _ in range(min(number, len(self.sets))):
            one = self.sets.popleft()
            sent, come = one.own * self.crossing.all_ranks, one.rows * self.crossing.here
            self.run.passing((one.own * self.crossing.row + 2 * sent + come) * self.run.sizes.itemsize)
            self.run.take(sent + come)
            self.coming.append(sent + come)

    def arrive(self) -> None:
        if self.coming:
            due = self.coming.popleft()
            self.start(1)
            self.run.take(-due)


class _Going:
    """As `Sends` of sets that become rows."""

    def __init__(self, run: _Run, num_rows: int, crossing: Crossing) -> None:
        self.run, self.crossing, self.under_way = run, crossing, deque[tuple[int, int]]()
        run.take(num_rows * crossing.row)

    def send(self, one: SetSize, beside: int) -> None:
        if not self.run.sizes.in_memory:
            self.finish()
        taken = one.rows * self.crossing.here + one.own * self.crossing.all_ranks
        self.run.take(taken)
        self.run.passing(beside)
        self.under_way.append((taken, one.own * self.crossing.row))

    def finish(self) -> None:
        while self.under_way:
            taken, joined = self.under_way.popleft()
            self.run.passing(joined * self.run.sizes.itemsize)
            self.run.take(-taken)
