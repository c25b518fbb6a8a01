"""Trace of `offload`: what a pass moves and computes, by formulas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.cost import Operation, all_reduce, transfer
from weft.nn import DenseFlops, Total, WholeLayer
from weft.parallel.blocks.blocks import BlockStats
from weft.parallel.chunks.cut.rank_chunks import HopSchedule, RankChunks
from weft.parallel.chunks.program.chunk_program import Segment, differentiable_ports
from weft.parallel.chunks.program.segment_flops import SegmentFlops
from weft.parallel.chunks.program.stages import AggregateStep, PassStage
from weft.parallel.chunks.run.chunk_aggregates import layout_of
from weft.parallel.chunks.run.chunk_halos import HaloPlan
from weft.parallel.chunks.run.rounds import RoundSizes
from weft.parallel.chunks.run.slots import SlotLayout, Way, edge_bytes
from weft.runtime.kernel_call import KernelCall, backward_of, merged

LOADED, WRITTEN_BACK = 2, 3
"""Number of times that a row is moved by index.

Loaded rows: read on the host, written to slots. Gradients written back: read from slots, added on the host, and set to
0 in the slots.
"""
Calls = tuple[KernelCall, ...] | None


@dataclass(frozen=True, kw_only=True)
class MoveSizes:
    """Sizes that formulas need in addition to a rank's chunks."""

    size: int
    """Number of ranks."""
    itemsize: int
    """Bytes of an element of a row."""
    sum_itemsize: int
    """Bytes of an element of a gradient or a sum of rows."""
    weight: int
    """Bytes of an edge's weight; 0 if edges have none."""
    embedded: BlockStats
    """Number of embedding rows that ranks exchange."""
    embedded_width: int
    """Number of columns of embedding rows."""
    fresh_share: float
    """Share of edges whose source row comes from memory, see `Adjacency.fresh_share`."""
    share: bool
    """True if ranks share what they load."""
    edge_ids: bool
    """True if edges have types or features."""
    halo: HaloPlan | None = None
    """Rows that each chunk sends as soon as it is computed (`pipeline`); None: a round exchanges its rows."""


class Moves:
    """Operations of one training step or evaluation of a rank.

    Args:
        plan: Chunks of the rank.
        sizes: Sizes that formulas need in addition.
        training: True for a training step.
        flops: Work of dense layers; None: leave them out.
    """

    def __init__(
        self, plan: RankChunks, sizes: MoveSizes, *, training: bool, flops: SegmentFlops | None = None
    ) -> None:
        self.plan, self.sizes, self.training, self.flops = plan, sizes, training, flops
        self.segments, self.stages = plan.programs[training].segments, plan.stages[training]
        self._operations: list[Operation] = []

    def operations(self) -> list[Operation]:
        """Return all operations, except for the all-reduce of the parameters' gradients."""
        fetched, width = self.sizes.embedded, self.sizes.embedded_width
        if fetched.exchanged:
            self._add_exchange(fetched.num_sent, fetched.num_received, width, self.sizes.sum_itemsize)
        for stage in self.stages.forward:
            self._forward(stage)
        for stage in self.stages.backward:
            self._backward(stage)
        if self.training and fetched.exchanged:
            self._add_exchange(fetched.num_received, fetched.num_sent, width, self.sizes.sum_itemsize)
        return self._operations

    def _forward(self, stage: PassStage) -> None:
        number, segment, before = stage.number, self.segments[stage.number], self._before(stage)
        dense = self._dense(number) if stage.runs else None
        stored = sum(buffer.width for buffer in stage.makes)
        if stage.step is not None:
            self._add_aggregate(stage.step, dense, stored=stored)
            if not stage.runs:
                self._add_halo(stage.step.segment.width)
        else:
            self._add_ranges(segment, before, dense, stored=stored)
        if not stage.runs:
            return
        if segment.aggregates:
            self._add_halo(segment.source_width)
        if segment.boundary is not None and isinstance(segment.op, Total):
            self._add_total(segment)

    def _backward(self, stage: PassStage) -> None:
        segment, before, step = self.segments[stage.number], self._before(stage), stage.step
        with_grads = [] if before is None or before.constant else differentiable_ports(before)
        dense = self._dense(stage.number, backward=True) if stage.runs else None
        read_grads = (
            self._width(segment, differentiable_ports(segment)) if stage.runs else before.width if before else 0
        )
        written_grads = (
            self._width(before, {*with_grads} & {*before.rows.values()}) if stage.runs and before is not None else 0
        )
        if step is None:
            self._add_ranges(
                segment,
                None if self.plan.in_memory else before,
                dense,
                read_grads=read_grads,
                written_grads=written_grads,
            )
            if before is not None and isinstance(before.op, Total) and before.differentiable:
                self._add_total(before)
            return
        assert before is not None
        self._add_aggregate(step, dense, read_grads=read_grads, written_grads=written_grads)
        ports = {*before.source_ports} & {*with_grads}
        self._add_halo(before.width * before.differentiable if step.step else self._width(before, ports), back=True)

    def _before(self, stage: PassStage) -> Segment | None:
        """Return the segment that precedes a stage's segment; None for the first."""
        return self.segments[stage.number - 1] if stage.number else None

    def _add_ranges(
        self,
        segment: Segment,
        before: Segment | None,
        dense: Operation | None,
        *,
        stored: int = 0,
        read_grads: int = 0,
        written_grads: int = 0,
    ) -> None:
        """Add the operations of a stage without an aggregate, range by range.

        `before` is the segment whose rows are read. For the other arguments see `_add_aggregate`.
        """
        spans = self.plan.spans(self.plan.num_rows(segment.hop))
        read_width = 0
        if before is not None:
            read_width = self._width(before, before.rows.values()) + self._result_width(before)
        for number, (span, piece) in enumerate(zip(spans, split_operation(dense, len(spans)), strict=True)):
            rows = span.stop - span.start
            self._load("rows", rows * read_width, ahead=self.plan.prefetch and number > 0)
            self._load("gradients", rows * read_grads)
            self._operations += piece
            self._store("rows", rows * stored)
            self._store("gradients", rows * written_grads)

    def _add_aggregate(
        self,
        step: AggregateStep,
        dense: Operation | None,
        *,
        stored: int = 0,
        read_grads: int = 0,
        written_grads: int = 0,
    ) -> None:
        """Add the operations of one aggregate over all rounds.

        Args:
            step: The aggregate.
            dense: Dense layers of the segment that runs with it; None if there are none.
            stored: Columns of each target's rows that are written to the host.
            read_grads: In the backward pass, columns of the gradients that are read from the host.
            written_grads: In the backward pass, columns of the gradients that are written, without those of the
                aggregate.
        """
        segment, backward = step.segment, step.edges != "forward"
        schedule, width = self._schedule(segment.hop + step.step), segment.aggregated.width
        widths = self._source_widths(step)
        grad_widths = [width for width, needed in widths if needed]
        read_width, grad_width = sum(width for width, _ in widths), sum(grad_widths)
        target_width = self._width(segment, step.target_ports) + (segment.total_saved_width if step.saved else 0)
        rounds = schedule.schedule.sizes
        layer_pieces = split_operation(self._dense_of_layer(segment, schedule, backward=backward), len(rounds))
        pieces = split_operation(dense, len(rounds))
        # Each round loads rows and edges, exchanges source rows, aggregates, runs dense layers, and stores their rows.
        # Backward, the dense layers come before the adjoint of the aggregate, and gradients of sources are exchanged.
        # If ranks do not share loads, each also reads the rows that it sends from the host, and adds gradients there.
        for number, (round_, missing) in enumerate(zip(rounds, schedule.missing_loops, strict=True)):
            rows, edges = round_.num_targets, round_.num_edges
            ahead = self.plan.prefetch and number > 0
            self._load("rows", rows * target_width, ahead=ahead)
            num_bytes = self.edge_bytes(layout_of(segment.op), schedule, round_, missing, step.edges)
            round_call = (KernelCall("round", ()),)
            self._operations.append(
                Operation(kind="transfer", tag="edges", bytes_received=num_bytes, calls=round_call, ahead=ahead)
            )
            if step.values:
                for_others = 0 if self.sizes.share else sum(round_.send_row_counts)
                columns = [width for width, _ in widths]
                gathers = self._gather_calls(round_.num_loads + for_others, columns, LOADED, self.sizes.itemsize)
                self._load("sources", (round_.num_loads + for_others) * read_width, ahead=ahead, calls=gathers)
                self._exchange_round(round_.send_row_counts, round_.recv_row_counts, read_width, self.sizes.itemsize)
            self._operations += layer_pieces[number]
            num_fresh = round(self.sizes.fresh_share * edges)
            sizes = edges, rows, schedule.schedule.num_slots, num_fresh, width, segment.op.heads
            call = KernelCall(type(segment.op).__name__, sizes)
            if step.values and not step.saved:
                self._add_kernel(edges * width, call)
            self._load("gradients", rows * read_grads)
            self._operations += pieces[number]
            if backward and segment.differentiable and (grad_widths or not segment.op.linear):
                self._add_kernel(edges * width, backward_of(call))
            if backward and grad_widths:
                grad_counts = round_.send_grad_counts, round_.recv_grad_counts
                self._exchange_round(*grad_counts, grad_width, self.sizes.sum_itemsize)
                for_others = 0 if self.sizes.share else sum(round_.recv_grad_counts)
                moved = round_.num_write_backs + for_others
                gathers = self._gather_calls(moved, grad_widths, WRITTEN_BACK, self.sizes.sum_itemsize)
                self._store("gradients", moved * grad_width, calls=gathers)
            if backward:
                targets = (port for port in segment.targets.values() if segment.live[port].differentiable)
                self._store("gradients", rows * (written_grads + sum(segment.live[port].width for port in targets)))
            self._store("rows", rows * stored)

    def _dense(self, number: int, *, backward: bool = False) -> Operation | None:
        """Return the dense layers of a segment on all ranges; in the backward pass, they first run forward again."""
        if self.flops is None:
            return None
        segment, before = self.segments[number], self.segments[number - 1] if number else None
        calls = len(self.plan.spans(self.plan.num_rows(segment.hop)))
        if before is not None and before.aggregates and not before.constant:
            calls = len(self._schedule(before.hop + before.steps - 1).schedule.sizes)
        return dense_operation(self.flops.segment(number, calls), backward=backward, retained=self.plan.in_memory)

    def _dense_of_layer(self, segment: Segment, schedule: HopSchedule, *, backward: bool) -> Operation | None:
        """Return the dense layers inside an aggregate that is a whole layer, on all chunks."""
        if self.flops is None or not isinstance(segment.op, WholeLayer):
            return None
        number = next(number for number, candidate in enumerate(self.segments) if candidate is segment)
        sources = sum(shape.targets + shape.slots for shape in schedule.shapes())
        return dense_operation(self.flops.layer(number, sources, len(schedule.schedule.sizes)), backward=backward)

    def _schedule(self, hop: int) -> HopSchedule:
        """Return the schedule of an aggregate."""
        return self.plan.schedules[self.plan.schedule_of[hop]]

    def edge_bytes(self, layout: SlotLayout, schedule: HopSchedule, round_: RoundSizes, missing: int, way: Way) -> int:
        """Return the bytes of a round's edges as they are stored for an aggregate.

        Args:
            layout: Layout of the edges.
            schedule: Schedule of the aggregate.
            round_: Sizes of the round.
            missing: Number of targets without a self-loop.
            way: Direction in which the edges are used.
        """
        index, rows = schedule.hop.block.indices.itemsize, round_.num_targets
        edges = round_.num_edges + (missing if layout == "looped" else 0)
        sources = schedule.schedule.num_slots + (rows if layout == "whole" else 0)
        return edge_bytes(way, rows, sources, edges, index, self.sizes.weight)

    def _source_widths(self, step: AggregateStep) -> list[tuple[int, bool]]:
        """Return the width of each row that an aggregate reads at a source, and whether it has a gradient."""
        segment = step.segment
        widths = [(segment.live[port].width, segment.live[port].differentiable) for port in step.source_ports]
        return [*widths, (segment.width, segment.differentiable)] if step.step else widths

    def _add_total(self, segment: Segment) -> None:
        if self.sizes.size > 1:
            self._operations.append(all_reduce("statistics", segment.width, self.sizes.sum_itemsize, self.sizes.size))

    def _result_width(self, segment: Segment) -> int:
        return segment.width if segment.aggregates else 0

    def _width(self, segment: Segment, live: Iterable[int]) -> int:
        return sum(segment.live[port].width for port in set(live))

    def _exchange_round(self, sent: Sequence[int], received: Sequence[int], width: int, itemsize: int) -> None:
        if len(sent) > 1:
            self._add_exchange(sum(sent), sum(received), width, itemsize)

    def _add_halo(self, width: int, *, back: bool = False) -> None:
        """Add the exchange of rows that each chunk sends as soon as it is computed, or of their gradients."""
        halo = self.sizes.halo
        if halo is not None and self.sizes.size > 1 and width:
            sent, received = (halo.num_sent, halo.num_received)[:: -1 if back else 1]
            itemsize = self.sizes.sum_itemsize if back else self.sizes.itemsize
            self._add_exchange(sent, received, width, itemsize, ahead=not halo.at_once, messages=halo.num_messages)

    def _add_exchange(
        self, sent: int, received: int, width: int, itemsize: int, *, ahead: bool = False, messages: int = 0
    ) -> None:
        """Add an exchange whose rows are gathered by index before, and written by index after it."""
        row = width * itemsize
        self._operations.append(
            Operation(
                kind="collective",
                tag="halo",
                bytes_sent=sent * row,
                bytes_received=received * row,
                calls=self._gather_calls(sent + received, [width], 1, itemsize),
                ahead=ahead,
                messages=messages,
            )
        )

    def _gather_calls(self, rows: int, widths: Iterable[int], times: int, itemsize: int) -> tuple[KernelCall, ...]:
        """Return the kernels that move rows of some widths by index, `times` times each."""
        sizes = [(rows, width * itemsize) for width in widths if rows * width]
        return tuple(KernelCall("gather", size, times) for size in sizes)

    def _add_kernel(self, edges: int, call: KernelCall) -> None:
        self._operations.append(Operation(kind="aggregate", edges=edges, calls=(call,)))

    def _load(self, tag: str, numbers: int, *, ahead: bool = False, calls: Calls = None) -> None:
        num_bytes = numbers * self._itemsize(tag)
        self._operations.append(transfer(tag, to_device=num_bytes, ahead=ahead, calls=calls))

    def _store(self, tag: str, numbers: int, *, calls: Calls = None) -> None:
        self._operations.append(transfer(tag, to_host=numbers * self._itemsize(tag), calls=calls))

    def _itemsize(self, tag: str) -> int:
        return self.sizes.sum_itemsize if tag == "gradients" else self.sizes.itemsize


def dense_operation(dense: DenseFlops, *, backward: bool, retained: bool = False) -> Operation | None:
    """Return the dense layers of a segment as one operation; None if there are none.

    Args:
        dense: Work of the dense layers.
        backward: True for the backward pass, which first runs them forward again.
        retained: True if the autograd graph was kept, so that nothing is recomputed.
    """
    forward = not (backward and retained)
    flops = dense.forward * forward + dense.backward * backward
    calls = dense.calls * forward + dense.backward_calls * backward
    return Operation(kind="dense", flops=flops, calls=calls) if flops or calls else None


def split_operation(operation: Operation | None, count: int) -> list[list[Operation]]:
    """Return an operation in `count` pieces of about the same size.

    Args:
        operation: The operation; None if there is none.
        count: Number of pieces.
    """
    if operation is None:
        return [[]] * count
    calls = [call._replace(number=1) for call in operation.calls for _ in range(call.number)]
    pieces = [merged(calls[index::count]) for index in range(count)]
    return [[replace(operation, flops=sum(call.flops for call in piece), calls=piece)] for piece in pieces]
