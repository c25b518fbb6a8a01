"""Memory estimate of an aggregate over columns that runs chunk by chunk.

The estimate follows the steps of `ColumnPass` with numbers of bytes in place of tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.comm import ColumnLayout, RowSet
from weft.nn import Aggregate, AttendEdges
from weft.parallel.chunks.run.slots import Way, edge_bytes
from weft.parallel.columns.chunking import CutSizes
from weft.parallel.columns.kernel_memory import KernelMemory, rerun_bytes
from weft.runtime.streams import pinned_bytes

ID_BYTES = 8
"""Bytes of the number of a vertex, a row or a position on the device."""
STORED_ID_BYTES = 4
"""Bytes of the number of a vertex, a row or a position in an array file."""


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


class ExchangeColumns(NamedTuple):
    """Numbers of columns of rows that cross the network."""

    row: int
    """Number of columns of a whole row."""
    all_ranks: int
    """Number of columns of a row that all ranks together receive."""
    this_rank: int
    """Number of columns of a row that this rank receives."""

    @classmethod
    def of(cls, layout: ColumnLayout, rank: int) -> ExchangeColumns:
        """Return the numbers of columns of a layout.

        Args:
            layout: Assignment of columns to ranks.
            rank: This rank.
        """
        return cls(layout.num_columns, sum(map(layout.width, range(len(layout.columns)))), layout.width(rank))


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
    num_rows: int
    """Number of vertices."""
    num_own: int
    """Number of rows that this rank owns before the aggregate."""
    num_local: int
    """Number of rows that this rank owns after the aggregate."""
    receives: Sequence[SetSize]
    """Number of rows that arrive before each chunk."""
    sends: Sequence[SetSize]
    """Number of rows that leave after each chunk."""
    inbound: ExchangeColumns
    """Number of columns of the rows that the aggregate reads."""
    outbound: ExchangeColumns
    """Number of columns of the rows of the result."""
    ports: Sequence[int]
    """Widths of the tensors that the aggregate reads, those at sources first."""
    split: bool
    """True if the input is rows; False if it is columns already."""
    alone: bool
    """True if there is only one rank."""
    in_memory: bool
    """True if rows of all vertices are in memory, False if in files."""
    stored_edge: int
    """Bytes of an edge in a file: its source and its weight."""
    separate_memory: bool
    """True if chunks run on a device with a memory of its own."""
    saves_results: bool
    """True if results are saved for the backward pass; see `Chunking.saves_results`."""
    packed: bool
    """True if the tensors that the aggregate reads are concatenated before they are sent."""
    itemsize: int
    """Bytes of an element."""

    @property
    def schedule(self) -> list[tuple[SetSize, int, SetSize]]:
        """For each chunk: rows that arrive before it, its edges in all steps, and rows that leave after it."""
        edges = (self.steps * number for number in self.cut.edges)
        return list(zip(self.receives, edges, self.sends, strict=True))

    def read_width(self, step: int) -> int:
        """Return the number of columns that a step reads at sources."""
        widths = self.ports[: len(self.op.source)]
        return sum(widths[1:]) + self.outbound.this_rank if step else sum(widths)

    @property
    def recomputes(self) -> bool:
        """True if the backward pass computes the aggregate again."""
        return not (self.op.linear or self.saves_results)

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

    def kernel_memory(self) -> KernelMemory:
        """Return the memory of a forward pass and of its backward pass."""
        forward, backward = _MemoryRun(self), _MemoryRun(self)
        forward.forward()
        backward.backward()
        # The result, the saved rows and the gradients of the input are counted by the caller, so they are subtracted.
        saved = self.saved * self.itemsize
        result, grads = self.num_own * self.outbound.row, self.num_own * self.inbound.row * self.split
        more = (self.num_local - self.num_own) * self.outbound.row  # gradients of relation rows
        return KernelMemory(
            forward=max(forward.peak - result * self.itemsize - saved, 0),
            saved=saved,
            backward=max(backward.peak + (more - grads) * self.itemsize, 0),
            saves_rows=self.reads_rows and not self.op.linear,
            saves_result=self.saves_results and self.alone,
        )

    @property
    def num_results(self) -> int:
        """Number of rows of the result, all ranks together."""
        return sum(self.results)

    @property
    def arrays(self) -> int:
        """Number of elements that are copied to be read, in memory."""
        if not self.in_memory:
            return 0
        return 0 if self.reads_rows else self.num_rows * sum(self.ports)

    @property
    def reads_rows(self) -> bool:
        """True if chunks read the given rows without a copy."""
        return self.in_memory and (self.alone or not self.split) and len(self.ports) == 1

    @property
    def saved(self) -> int:
        """Number of elements saved for backward, from the end of forward until this operation's backward."""
        if self.op.linear or not self.in_memory:
            return 0
        intermediates = (self.steps - 1) * self.num_results * self.outbound.this_rank
        results = (
            self.num_results * (self.outbound.this_rank * (2 - self.alone) + 2 * self.op.heads)
            if self.saves_results
            else 0
        )
        return self.arrays + intermediates + results

    @property
    def num_moved(self) -> int:
        """Number of rows that are loaded into slots or written back, all chunks together."""
        return sum(self.cut.loads) + sum(self.cut.write_backs)

    @property
    def round_bytes(self) -> int:
        """Bytes of the stored rounds: row numbers of slots and of rows that move, and edges in both directions."""
        num_ids = self.cut.num_slots * len(self.cut.edges) + self.num_rows + 2 * self.num_moved
        return STORED_ID_BYTES * num_ids + sum(self.edge_bytes(number, "both") for number in range(len(self.cut.edges)))

    @property
    def topology_bytes(self) -> int:
        """Bytes that rounds in memory compute once: row numbers and scalings."""
        return (self.cut.num_slots * len(self.cut.edges) + self.num_rows) * (ID_BYTES + self.itemsize)

    def row_bytes(self, passes: int) -> int:
        """Return the bytes of rows in files or in pinned memory.

        Args:
            passes: Number of passes of this shape in a step; freed rows are reused by the next pass.
        """
        read = sum(self.stored_bytes(self.num_rows * width) for width in self.ports)
        results = self.stored_bytes(self.num_results * self.outbound.this_rank)
        saved = 0 if self.op.linear else passes * (read + results * (self.steps - 1))
        return read + results * (1 + (self.steps > 1)) + saved

    def stored_bytes(self, numbers: int) -> int:
        """Return the bytes of elements in a file, or in pinned memory for a device with its own memory."""
        num_bytes = numbers * self.itemsize
        return pinned_bytes(num_bytes) if self.separate_memory else num_bytes


class _MemoryRun:
    """Simulates the allocations of a pass, to find the peak of the bytes that are alive."""

    def __init__(self, sizes: PassSizes) -> None:
        self.sizes, self.alive, self.peak = sizes, 0, 0
        self.slots = 0 if sizes.cut.in_place or sizes.separate_memory else sizes.cut.num_slots
        self.sources = sizes.num_rows if sizes.cut.in_place else sizes.cut.num_slots

    def forward(self) -> None:
        """Simulate what `ColumnPass.forward` allocates and frees."""
        sizes, last = self.sizes, self.sizes.steps - 1
        result = sizes.num_results * sizes.outbound.this_rank * sizes.in_memory
        self.allocate(sizes.packed * sizes.num_own * sizes.inbound.row + sizes.arrays)
        is_exchanged = sizes.split and not sizes.alone
        inbound = _Inbound(self, sizes.receives if is_exchanged else (), sizes.inbound)
        outbound = None if sizes.alone else _Outbound(self, sizes.num_local, sizes.outbound)
        for step in range(sizes.steps):
            self.allocate(
                result + (2 * sizes.op.heads + sizes.outbound.this_rank) * sizes.num_results * sizes.saves_results
            )
            slots = self.slots * sizes.read_width(step)
            self.allocate(slots)
            for number in range(len(sizes.results)):
                if step == 0:
                    inbound.arrive()
                self.note_temporary(self.round_forward(number, step))
                if step == last and outbound:
                    outbound.send(sizes.sends[number], self.loaded_bytes(number, back=False))
            self.allocate(-slots)
            if step and sizes.op.linear:
                self.allocate(-result)
        if outbound:
            outbound.finish()

    def backward(self) -> None:
        """Simulate what `ColumnPass.backward` allocates and frees."""
        sizes = self.sizes
        result, grads = (
            sizes.num_results * sizes.outbound.this_rank * sizes.in_memory,
            sum(sizes.ports) * sizes.num_rows * sizes.in_memory,
        )
        inbound = _Inbound(self, () if sizes.alone else sizes.sends[::-1], sizes.outbound)
        outbound = None if sizes.alone else _Outbound(self, sizes.num_own, sizes.inbound)
        self.allocate(0 if sizes.alone else result)
        self.allocate(grads)
        for step in reversed(range(sizes.steps)):
            into = sizes.num_rows * sizes.outbound.this_rank * bool(step) * sizes.in_memory
            slots = self.slots * sizes.read_width(step) * (1 + (not sizes.op.linear))
            self.allocate(into + slots)
            for number in reversed(range(len(sizes.results))):
                if step == sizes.steps - 1:
                    inbound.arrive()
                self.note_temporary(self.round_backward(number, step))
                if step == 0 and outbound:
                    width, arriving = sizes.inbound.this_rank, sizes.receives[number]
                    loaded = self.loaded_bytes(number, back=True)
                    self.note_temporary(arriving.rows * (sum(sizes.ports) + width) * sizes.itemsize + loaded)
                    outbound.send(arriving, loaded)
            self.allocate(-slots)
            if not (sizes.alone and step == sizes.steps - 1):
                self.allocate(-result)
        if outbound:
            outbound.finish()
        elif len(sizes.ports) > 1:
            self.allocate(sizes.num_rows * sizes.inbound.this_rank)

    def round_forward(self, number: int, step: int) -> int:
        """Return the bytes that a chunk needs in addition to its slots.

        Args:
            number: Number of the chunk.
            step: Number of the step.
        """
        sizes = self.sizes
        if sizes.separate_memory:
            return 0
        results, saves = sizes.results[number], sizes.saves_results and step == sizes.steps - 1
        result = results * (sizes.outbound.this_rank + sizes.op.heads) * (1 + saves)
        logits = sizes.cut.edges[number] * sizes.op.heads * 2 * isinstance(sizes.op, AttendEdges)
        moved = sizes.cut.loads[number] * max(sizes.ports, default=0) * sizes.in_memory
        return max(moved, result + logits) * sizes.itemsize + self.loaded_bytes(number, back=False)

    def round_backward(self, number: int, step: int) -> int:
        """Return the bytes that the backward of a chunk needs in addition to its slots.

        Args:
            number: Number of the chunk.
            step: Number of the step.
        """
        sizes, results = self.sizes, self.sizes.results[number]
        if sizes.separate_memory:
            return 0
        copied = not sizes.in_memory and not (sizes.alone and step == sizes.steps - 1)
        loaded = self.loaded_bytes(number, back=True) + results * sizes.outbound.this_rank * sizes.itemsize * copied
        moved = sizes.cut.write_backs[number] * max(sizes.ports, default=0) * sizes.itemsize * sizes.in_memory
        if sizes.op.linear:
            return moved + loaded
        if sizes.saves_results:
            return max(moved, results * (3 * sizes.op.heads + 2 * sizes.target_width) * sizes.itemsize) + loaded
        rerun = rerun_bytes(
            sizes.op,
            num_targets=results,
            num_edges=sizes.cut.edges[number],
            width=sizes.outbound.this_rank,
            itemsize=sizes.itemsize,
        )
        grads = self.sources * sizes.read_width(step) + results * (sizes.outbound.this_rank + sizes.target_width)
        return max(moved, rerun + grads * sizes.itemsize) + loaded

    def loaded_bytes(self, number: int, *, back: bool) -> int:
        """Return the bytes loaded from files for a chunk, and for the next one that is loaded meanwhile.

        Args:
            number: Number of the chunk.
            back: In the backward pass.
        """
        sizes = self.sizes
        if sizes.in_memory or sizes.separate_memory:
            return 0
        following = number + (-1 if back else 1)
        prefetches = sizes.cut.ahead and 0 <= following < len(sizes.results)
        return self.chunk_bytes(number, back=back) + (self.chunk_bytes(following, back=back) if prefetches else 0)

    def chunk_bytes(self, number: int, *, back: bool) -> int:
        """Return the bytes of a chunk's edges, its targets' rows, and the numbers of rows that move.

        Args:
            number: Number of the chunk.
            back: In the backward pass.
        """
        sizes, slots = self.sizes, self.sizes.cut.num_slots
        targets, read = sizes.cut.bounds[number + 1] - sizes.cut.bounds[number], not (back and sizes.op.linear)
        index_bytes = ID_BYTES * (slots + targets) + sizes.itemsize * (slots + sizes.results[number]) * sizes.op.linear
        moved = sizes.cut.loads[number] * read + sizes.cut.write_backs[number] * back
        edges = sizes.edge_bytes(number, sizes.back if back else "forward")
        return edges + index_bytes + 2 * ID_BYTES * moved + targets * sizes.target_width * sizes.itemsize * read

    def allocate(self, numbers: int) -> None:
        """Add `numbers` elements to the live total (negative to free) and update the peak."""
        self.alive += numbers * self.sizes.itemsize
        self.peak = max(self.peak, self.alive)

    def note_temporary(self, num_bytes: int) -> None:
        """Update the peak by bytes that are alive only for a moment."""
        self.peak = max(self.peak, self.alive + num_bytes)


class _Inbound:
    """Simulates the memory of `Receives`: sets of rows arrive all at once or, for rows in files, one set ahead."""

    def __init__(self, run: _MemoryRun, sets: Sequence[SetSize], columns: ExchangeColumns) -> None:
        self.run, self.columns = run, columns
        self.sets, self.pending = deque(sets), deque[int]()
        self.start(len(sets) if run.sizes.in_memory else 1)

    def start(self, number: int) -> None:
        for _ in range(min(number, len(self.sets))):
            rows = self.sets.popleft()
            sent, received = rows.num_own * self.columns.all_ranks, rows.rows * self.columns.this_rank
            self.run.note_temporary((rows.num_own * self.columns.row + 2 * sent + received) * self.run.sizes.itemsize)
            self.run.allocate(sent + received)
            self.pending.append(sent + received)

    def arrive(self) -> None:
        if self.pending:
            due = self.pending.popleft()
            self.start(1)
            self.run.allocate(-due)


class _Outbound:
    """Simulates the memory of `Sends`: columns of the result are sent, and become rows of their owners."""

    def __init__(self, run: _MemoryRun, num_rows: int, columns: ExchangeColumns) -> None:
        self.run, self.columns, self.under_way = run, columns, deque[tuple[int, int]]()
        run.allocate(num_rows * columns.row)

    def send(self, rows: SetSize, temporary_bytes: int) -> None:
        if not self.run.sizes.in_memory:
            self.finish()
        allocated = rows.rows * self.columns.this_rank + rows.num_own * self.columns.all_ranks
        self.run.allocate(allocated)
        self.run.note_temporary(temporary_bytes)
        self.under_way.append((allocated, rows.num_own * self.columns.row))

    def finish(self) -> None:
        while self.under_way:
            allocated, joined = self.under_way.popleft()
            self.run.note_temporary(joined * self.run.sizes.itemsize)
            self.run.allocate(-allocated)
