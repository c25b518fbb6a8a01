"""What a pass of offload moves and computes, by formulas: its trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.cost import Operation, all_reduce, transfer
from weft.nn import DenseFlops, Total, WholeLayer
from weft.parallel.chunks.cut.rank_chunks import HopSchedule, RankChunks
from weft.parallel.chunks.program.chunk_program import Segment, differentiable_ports
from weft.parallel.chunks.program.segment_flops import SegmentFlops
from weft.parallel.chunks.program.stages import AggregateStep, PassStage
from weft.parallel.chunks.run.chunk_aggregates import layout_of
from weft.parallel.chunks.run.chunk_halos import HaloPlan
from weft.parallel.chunks.run.rounds import Round
from weft.parallel.chunks.run.slots import SlotLayout, Way, edge_bytes
from weft.runtime.kernel_call import KernelCall, backward_of, merged
from weft.strategies.vertex.blocks import BlockStats

LOADED, FLUSHED = 2, 3
"""How often rows are moved by index: from the host into slots; of gradients, taken, added there, and made zero here."""
Calls = tuple[KernelCall, ...] | None


@dataclass(frozen=True, kw_only=True)
class MoveSizes:
    """What formulas need beside a rank's chunks."""

    size: int
    """Ranks."""
    itemsize: int
    """Bytes of a number."""
    weight: int
    """Bytes of an edge's weight; 0: none."""
    embedded: BlockStats
    """Rows of embeddings that cross ranks."""
    embedded_width: int
    fresh_share: float
    """See `Adjacency.fresh_share`."""
    share: bool
    """Whether ranks share what they load."""
    edge_ids: bool
    """Whether the edges have types or features."""
    halo: HaloPlan | None = None
    """What leaves and comes by itself before an aggregate; None: chunks of a round exchange what they read."""


class Moves:
    """The operations of one training step, or of one evaluation; maps are among them where their flops are given."""

    def __init__(
        self, plan: RankChunks, sizes: MoveSizes, *, training: bool, flops: SegmentFlops | None = None
    ) -> None:
        self.plan, self.sizes, self.training, self.flops = plan, sizes, training, flops
        self.segments, self.stages = plan.programs[training].segments, plan.stages[training]
        self.made: list[Operation] = []

    def operations(self) -> list[Operation]:
        """All of them, but the sum of the parameters' gradients."""
        fetched, width = self.sizes.embedded, self.sizes.embedded_width
        if fetched.exchanged:
            self._rows_cross(fetched.num_sent, fetched.num_received, width)
        for stage in self.stages.forward:
            self._forward(stage)
        for stage in self.stages.backward:
            self._backward(stage)
        if self.training and fetched.exchanged:
            self._rows_cross(fetched.num_received, fetched.num_sent, width)
        return self.made

    def _forward(self, stage: PassStage) -> None:
        number, segment, before = stage.number, self.segments[stage.number], self._before(stage)
        maps = self._maps(number) if stage.runs else None
        stored = sum(one.width for one in stage.makes)
        if stage.step is not None:
            self._aggregate_step(stage.step, maps, stored=stored)
            if not stage.runs:
                self._cross(stage.step.segment.width)
        else:
            self._ranges(segment, before, maps, stored=stored)
        if not stage.runs:
            return
        if segment.aggregates:
            self._cross(segment.source_width)
        if segment.boundary is not None and isinstance(segment.op, Total):
            self._total(segment)

    def _backward(self, stage: PassStage) -> None:
        segment, before, step = self.segments[stage.number], self._before(stage), stage.step
        wanted = [] if before is None or before.constant else differentiable_ports(before)
        maps = self._maps(stage.number, backward=True) if stage.runs else None
        grads = self._width(segment, differentiable_ports(segment)) if stage.runs else before.width if before else 0
        given = self._width(before, {*wanted} & {*before.rows.values()}) if stage.runs and before is not None else 0
        if step is None:
            self._ranges(segment, None if self.plan.in_memory else before, maps, grads=grads, given=given)
            if before is not None and isinstance(before.op, Total) and before.differentiable:
                self._total(before)
            return
        assert before is not None
        self._aggregate_step(step, maps, grads=grads, given=given)
        ports = {*before.source_ports} & {*wanted}
        self._cross(before.width * before.differentiable if step.step else self._width(before, ports), back=True)

    def _before(self, stage: PassStage) -> Segment | None:
        """The segment before that of a stage."""
        return self.segments[stage.number - 1] if stage.number else None

    def _ranges(
        self,
        segment: Segment,
        before: Segment | None,
        maps: Operation | None,
        *,
        stored: int = 0,
        grads: int = 0,
        given: int = 0,
    ) -> None:
        """What follows no aggregate, range by range; before: whose rows are read; else as `_aggregate_step`."""
        spans = self.plan.spans(self.plan.num_rows(segment.hop))
        read = 0
        if before is not None:
            read = self._width(before, before.rows.values()) + self._result_width(before)
        for number, (span, piece) in enumerate(zip(spans, dealt(maps, len(spans)), strict=True)):
            rows = span.stop - span.start
            self._load("rows", rows * read, ahead=self.plan.prefetch and number > 0)
            self._load("gradients", rows * grads)
            self.made += piece
            self._store("rows", rows * stored)
            self._store("gradients", rows * given)

    def _aggregate_step(
        self, step: AggregateStep, maps: Operation | None, *, stored: int = 0, grads: int = 0, given: int = 0
    ) -> None:
        """One pass over all rounds.

        maps: of the segment behind it, if that is run with it. stored: columns of the rows that a target leaves on the
        host; backward, grads: of the gradients that it reads there, and given: of those that it leaves beside the
        aggregate's.
        """
        segment, backward = step.segment, step.edges != "forward"
        planned, first = self._scheduled(segment.hop + step.step), segment.aggregated.width
        widths = self._source_widths(step)
        wanted = [width for width, needed in widths if needed]
        read, spread = sum(width for width, _ in widths), sum(wanted)
        own = self._width(segment, step.target_ports) + (segment.total_saved_width if step.saved else 0)
        rounds = planned.schedule.rounds
        inside = dealt(self._layer_maps(segment, planned, backward=backward), len(rounds))
        pieces = dealt(maps, len(rounds))
        for number, (round_, missing) in enumerate(zip(rounds, planned.missing_loops, strict=True)):
            rows, edges = round_.targets.stop - round_.targets.start, round_.edges.stop - round_.edges.start
            ahead = self.plan.prefetch and number > 0
            self._load("rows", rows * own, ahead=ahead)
            num_bytes = self.edge_bytes(layout_of(segment.op), planned, round_, missing, step.edges)
            begun = (KernelCall("round", ()),)
            self.made.append(
                Operation(kind="transfer", tag="edges", bytes_received=num_bytes, calls=begun, ahead=ahead)
            )
            if step.values:
                again = 0 if self.sizes.share else sum(round_.send_row_counts)
                picked = self._picked(len(round_.load) + again, [width for width, _ in widths], LOADED)
                self._load("sources", (len(round_.load) + again) * read, ahead=ahead, calls=picked)
                self._exchange(round_.send_row_counts, round_.recv_row_counts, read)
            self.made += inside[number]
            fresh = round(self.sizes.fresh_share * edges)
            sizes = edges, rows, len(round_.slot_sources), fresh, first, segment.op.heads
            call = KernelCall(type(segment.op).__name__, sizes)
            if step.values and not step.saved:
                self._aggregate(edges * first, call)
            self._load("gradients", rows * grads)
            self.made += pieces[number]
            if backward and segment.differentiable and (wanted or not segment.op.linear):
                self._aggregate(edges * first, backward_of(call))
            if backward and wanted:
                self._exchange(round_.send_grad_counts, round_.recv_grad_counts, spread)
                again = 0 if self.sizes.share else sum(round_.recv_grad_counts)
                picked = self._picked(len(round_.write_back) + again, wanted, FLUSHED)
                self._store("gradients", (len(round_.write_back) + again) * spread, calls=picked)
            if backward:
                targets = (port for port in segment.targets.values() if segment.live[port].differentiable)
                self._store("gradients", rows * (given + sum(segment.live[port].width for port in targets)))
            self._store("rows", rows * stored)

    def _maps(self, number: int, *, backward: bool = False) -> Operation | None:
        """The maps of a segment, on all ranges; backward they are made again first."""
        if self.flops is None:
            return None
        segment, before = self.segments[number], self.segments[number - 1] if number else None
        calls = len(self.plan.spans(self.plan.num_rows(segment.hop)))
        if before is not None and before.aggregates and not before.constant:
            calls = len(self._scheduled(before.hop + before.steps - 1).schedule.rounds)
        return mapped(self.flops.segment(number, calls), backward=backward, retained=self.plan.in_memory)

    def _layer_maps(self, segment: Segment, planned: HopSchedule, *, backward: bool) -> Operation | None:
        """Those inside an aggregate that is a layer run as a whole, on all chunks."""
        if self.flops is None or not isinstance(segment.op, WholeLayer):
            return None
        number = next(number for number, one in enumerate(self.segments) if one is segment)
        sources = sum(shape.targets + shape.slots for shape in planned.shapes())
        return mapped(self.flops.layer(number, sources, len(planned.schedule.rounds)), backward=backward)

    def _scheduled(self, hop: int) -> HopSchedule:
        return self.plan.schedules[self.plan.schedule_of[hop]]

    def edge_bytes(self, layout: SlotLayout, planned: HopSchedule, round_: Round, missing: int, way: Way) -> int:
        """The bytes of a round's edges as they are stored for an aggregate."""
        index, rows = planned.hop.block.indices.itemsize, round_.targets.stop - round_.targets.start
        edges = round_.edges.stop - round_.edges.start + (missing if layout == "looped" else 0)
        sources = planned.schedule.num_slots + (rows if layout == "whole" else 0)
        return edge_bytes(way, rows, sources, edges, index, self.sizes.weight)

    def _source_widths(self, step: AggregateStep) -> list[tuple[int, bool]]:
        """Of the rows that an aggregate reads at sources, each once, their width and whether they have a gradient."""
        segment = step.segment
        found = [(segment.live[port].width, segment.live[port].differentiable) for port in step.source_ports]
        return [*found, (segment.width, segment.differentiable)] if step.step else found

    def _total(self, segment: Segment) -> None:
        if self.sizes.size > 1:
            self.made.append(all_reduce("statistics", segment.width, self.sizes.itemsize, self.sizes.size))

    def _result_width(self, segment: Segment) -> int:
        return segment.width if segment.aggregates else 0

    def _width(self, segment: Segment, live: Iterable[int]) -> int:
        return sum(segment.live[port].width for port in set(live))

    def _exchange(self, sent: Sequence[int], received: Sequence[int], width: int) -> None:
        if len(sent) > 1:
            self._rows_cross(sum(sent), sum(received), width)

    def _cross(self, width: int, *, back: bool = False) -> None:
        """Rows of a level that cross by themselves, or their gradients, if they do."""
        halo = self.sizes.halo
        if halo is not None and self.sizes.size > 1 and width:
            sent, received = (halo.num_sent, halo.num_received)[:: -1 if back else 1]
            self._rows_cross(sent, received, width, ahead=not halo.at_once, messages=halo.num_messages)

    def _rows_cross(self, sent: int, received: int, width: int, *, ahead: bool = False, messages: int = 0) -> None:
        """So many rows leave and come, picked by index and put by index."""
        row = width * self.sizes.itemsize
        self.made.append(
            Operation(
                kind="collective",
                tag="halo",
                bytes_sent=sent * row,
                bytes_received=received * row,
                calls=self._picked(sent + received, [width], 1),
                ahead=ahead,
                messages=messages,
            )
        )

    def _picked(self, rows: int, widths: Iterable[int], times: int) -> tuple[KernelCall, ...]:
        """The kernels that move rows of these widths by index, so many times each."""
        sizes = [(rows, width * self.sizes.itemsize) for width in widths if rows * width]
        return tuple(KernelCall("gather", one, times) for one in sizes)

    def _aggregate(self, edges: int, call: KernelCall) -> None:
        self.made.append(Operation(kind="aggregate", edges=edges, calls=(call,)))

    def _load(self, tag: str, numbers: int, *, ahead: bool = False, calls: Calls = None) -> None:
        self.made.append(transfer(tag, to_device=numbers * self.sizes.itemsize, ahead=ahead, calls=calls))

    def _store(self, tag: str, numbers: int, *, calls: Calls = None) -> None:
        self.made.append(transfer(tag, to_host=numbers * self.sizes.itemsize, calls=calls))


def mapped(made: DenseFlops, *, backward: bool, retained: bool = False) -> Operation | None:
    """Maps forward, or backward; retained: where nothing is made again for that."""
    again = not (backward and retained)
    flops = made.forward * again + made.backward * backward
    calls = made.calls * again + made.backward_calls * backward
    return Operation(kind="dense", flops=flops, calls=calls) if flops or calls else None


def dealt(made: Operation | None, count: int) -> list[list[Operation]]:
    """An operation in so many pieces that are nearly alike."""
    if made is None:
        return [[]] * count
    each = [call._replace(number=1) for call in made.calls for _ in range(call.number)]
    pieces = [merged(each[place::count]) for place in range(count)]
    return [[replace(made, flops=sum(call.flops for call in piece), calls=piece)] for piece in pieces]
