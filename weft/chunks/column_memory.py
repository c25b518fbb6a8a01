"""What an aggregate over columns, made chunk by chunk, takes of memory: a `ColumnPass` on numbers of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.chunks.chunking import CutSizes
from weft.comm import Layout, RowSet
from weft.nn import Aggregate, AttendEdges, Footprint, kernel_footprint


class SetSize(NamedTuple):
    """Rows that cross together: those of all ranks, and those that this one answers for."""

    rows: int
    own: int

    @classmethod
    def of(cls, rows: RowSet | None) -> SetSize:
        """Those of a set; None: there are none."""
        return cls(0, 0) if rows is None else cls(len(rows.ids), len(rows.own))


class Crossing(NamedTuple):
    """Columns of rows that cross: of a whole row, of what all ranks get of one, and of what this rank has of it."""

    row: int
    all_ranks: int
    here: int

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Crossing:
        """Those of a layout on a rank."""
        return cls(layout.num_columns, sum(map(layout.width, range(len(layout.columns)))), layout.width(rank))


@dataclass(frozen=True, kw_only=True)
class PassSizes:
    """A `ColumnPass` on its rank. Widths are numbers of columns."""

    op: Aggregate
    """On this rank's columns."""
    steps: int
    cut: CutSizes
    edges: Sequence[int]
    """Of each chunk."""
    results: Sequence[int]
    """Its rows of results."""
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
    on_cpu: bool
    """Whether what a chunk has on the device counts, if that is limited."""
    keeps: bool
    """See `Chunking.keeps`."""
    packed: bool
    """Whether what is read is put together before."""
    itemsize: int

    def footprint(self) -> Footprint:
        """That of a forward pass, and of its backward pass."""
        forward, backward = _Run(self), _Run(self)
        forward.forward()
        backward.backward()
        saved = self.saved * self.itemsize
        result, grads = self.num_local * self.going.row, self.num_own * self.coming.row * self.split
        return Footprint(
            forward=max(forward.most - result * self.itemsize - saved, 0),
            saved=saved,
            backward=max(backward.most - grads * self.itemsize, 0),
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
        here = self.alone or not self.split
        return 0 if here and len(self.ports) == 1 else self.num_rows * sum(self.ports)

    @property
    def saved(self) -> int:
        """Numbers that are there until the backward pass has come by."""
        if self.op.linear or not self.in_memory:
            return 0
        own = self.alone and len(self.ports) == 1
        between = (self.steps - 1) * self.num_results * self.going.here
        kept = self.num_results * (self.going.here * (2 - self.alone) + 2 * self.op.heads) if self.keeps else 0
        return self.arrays + between + kept + own * self.num_rows * self.coming.here


class _Run:
    """Numbers alive, and the most of them, in bytes."""

    def __init__(self, sizes: PassSizes) -> None:
        self.sizes, self.alive, self.most = sizes, 0, 0
        self.slots = 0 if sizes.cut.in_place else sizes.cut.num_slots
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
            slots = self.slots * self.read_width(step) * one.in_memory
            self.take(slots)
            for number in range(len(one.results)):
                if step == 0:
                    coming.arrive()
                self.passing(self.round_forward(number, step))
                if step == last and going:
                    going.send(one.sends[number])
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
            slots = self.slots * self.read_width(step) * (1 + (not one.op.linear)) * one.in_memory
            self.take(into + slots)
            for number in reversed(range(len(one.results))):
                if step == one.steps - 1:
                    coming.arrive()
                self.passing(self.round_backward(number, step))
                if step == 0 and going:
                    here, asked = one.coming.here, one.receives[number]
                    self.passing(asked.rows * (sum(one.ports) + here))
                    going.send(asked)
            self.take(-slots)
            if not (one.alone and step == one.steps - 1):
                self.take(-y)
        if going:
            going.finish()
        elif len(one.ports) > 1:
            self.take(one.num_rows * one.coming.here)

    def read_width(self, step: int) -> int:
        """Columns that a step reads at sources."""
        one = self.sizes
        widths = one.ports[: len(one.op.source)]
        return sum(widths) if not step else sum(widths[1:]) + one.going.here

    def round_forward(self, number: int, step: int) -> int:
        """Numbers of a chunk beside its slots."""
        one = self.sizes
        if not one.in_memory:
            return one.cut.num_bytes // one.itemsize * one.on_cpu
        result = one.results[number] * (one.going.here + one.op.heads)
        more = one.results[number] * (one.going.here + one.op.heads) * (one.keeps and step == one.steps - 1)
        logits = one.edges[number] * one.op.heads * 2 * isinstance(one.op, AttendEdges)
        return max(one.cut.loads[number] * max(one.ports, default=0), result + more + logits)

    def round_backward(self, number: int, step: int) -> int:
        """The same backward."""
        one, targets = self.sizes, self.sizes.results[number]
        if not one.in_memory:
            return one.cut.num_bytes // one.itemsize * one.on_cpu
        moved = one.cut.flushes[number] * max(one.ports, default=0)
        if one.op.linear:
            return moved
        own = sum(one.ports[len(one.op.source) :])
        if one.keeps:
            return max(moved, targets * (3 * one.op.heads + 2 * own))
        made = kernel_footprint(
            one.op,
            num_targets=targets,
            num_edges=one.edges[number],
            width=one.going.here,
            itemsize=one.itemsize,
        )
        twice = isinstance(one.op, AttendEdges) and not one.op.apart
        found = self.sources * (self.read_width(step) + twice * one.going.here) + targets * own
        return max(moved, targets * one.going.here + (made.saved + made.backward) // one.itemsize + found)

    def take(self, numbers: int) -> None:
        """So many more are alive, or less."""
        self.alive += numbers * self.sizes.itemsize
        self.most = max(self.most, self.alive)

    def passing(self, numbers: int) -> None:
        """So many more are alive for a moment."""
        self.most = max(self.most, self.alive + numbers * self.sizes.itemsize)


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
            self.run.passing(one.own * self.crossing.row + 2 * sent + come)
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

    def send(self, one: SetSize) -> None:
        if not self.run.sizes.in_memory:
            self.finish()
        taken = one.rows * self.crossing.here + one.own * self.crossing.all_ranks
        self.run.take(taken)
        self.under_way.append((taken, one.own * self.crossing.row))

    def finish(self) -> None:
        while self.under_way:
            taken, joined = self.under_way.popleft()
            self.run.passing(joined)
            self.run.take(-taken)
