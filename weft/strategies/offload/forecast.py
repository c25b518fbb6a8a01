"""What offload will take and move, before anything large is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from weft.chunks.program import Segment, differentiable
from weft.chunks.rank import RankChunks
from weft.chunks.slots import BACKWARD, FORWARD
from weft.core.units import format_bytes
from weft.cost import Trace
from weft.data import Graph
from weft.strategies.offload.cut import MAX_REORDERED
from weft.strategies.offload.moves import Moves, MoveSizes

ADAM_COPIES = 5  # of a parameter: itself, its gradient, Adam's two moments, and the best so far


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes of one rank: on the device at most; in memory of the host; in files; and moved by an epoch's training step.

    chunks: of the first aggregate.
    """

    chunks: int
    device: int
    host: int
    disk: int
    to_device: int
    to_host: int
    network: int

    def __str__(self) -> str:
        moved = f"{format_bytes(self.to_device)} to the device, {format_bytes(self.to_host)} back"
        sent = f", {format_bytes(self.network)} to other ranks" if self.network else ""
        return (
            f"{self.chunks:,} chunks; device {format_bytes(self.device)}, host {format_bytes(self.host)}, scratch "
            f"{format_bytes(self.disk)}; an epoch moves {moved}{sent}"
        )


def forecast(graph: Graph, model: nn.Module, plan: RankChunks, sizes: MoveSizes, trace: Trace) -> Forecast:
    """That of a plan, but for the device; trace: of its training step."""
    moves = Moves(plan, sizes, training=True)
    return Forecast(
        chunks=plan.num_chunks,
        device=0,
        host=host_bytes(graph, model, plan, sizes.itemsize),
        disk=array_bytes(plan, moves) + array_file_bytes(graph, plan, moves),
        to_device=trace.to_device.total(),
        to_host=trace.to_host.total(),
        network=trace.bytes_sent.total(),
    )


def array_bytes(plan: RankChunks, moves: Moves) -> int:
    """The files of rows, which one pass after the other uses: as Pass takes them and gives them back."""
    pool = Pool()
    constant: list[tuple[int, int]] = []
    for training in (True, False, True):  # what an evaluation keeps for good is not there for the next step
        own = Moves(plan, moves.sizes, training=training)
        tables: list[list[tuple[int, int]]] = []
        for number, segment in enumerate(own.segments):
            rows = own.num_rows(segment.hop)
            if segment.constant and constant:
                tables.append([])
                continue
            held = own.num_held(segment.hop) if segment.aggregates else rows
            table = pool.alloc((held, port.width) for port in segment.live)
            before = own.segments[number - 1] if number else None
            if before is not None and before.aggregates and not before.constant:
                tables[-1] += steps_of(own, before, pool)
                if training and before.hop in plan.kept:
                    tables[-1] += pool.alloc((rows, width) for width in (before.width, *before.kept_widths))
            if segment.constant:
                table += steps_of(own, segment, pool)
                table += pool.alloc([(own.num_rows(segment.hop + segment.steps), segment.width)])
                kept = [key for port, key in enumerate(table[: len(segment.live)]) if port in segment.rows.values()]
                constant = [*kept, table[-1]]
                pool.free(table[len(segment.live) : -1])
                pool.free(
                    [key for port, key in enumerate(table[: len(segment.live)]) if port not in segment.rows.values()]
                )
                table = []
            tables.append(table)
        if training:
            lent = pool.alloc([(own.num_rows(own.segments[-1].hop), own.segments[-1].live[0].width)])
            backward(own, pool)
            pool.free(lent)
        for table in tables:
            pool.free(table)
    return pool.total * moves.sizes.itemsize


def steps_of(moves: Moves, segment: Segment, pool: Pool) -> list[tuple[int, int]]:
    """What all steps of an aggregate but the last one make and leave."""
    left: list[tuple[int, int]] = []
    for step in range(segment.steps - 1):
        made = pool.alloc([(moves.num_held(segment.hop + step + 1), segment.width)])
        if segment.op.linear and step:
            pool.free([left.pop()])
        left += made
    return left


def backward(moves: Moves, pool: Pool) -> None:
    """The gradients that a backward pass has at once."""
    out: list[tuple[int, int]] = []
    for number in reversed(range(1, len(moves.segments))):
        before = moves.segments[number - 1]
        if before.constant:
            break
        rows = moves.num_held(before.hop) if before.aggregates else moves.num_rows(before.hop)
        into = pool.alloc((rows, before.live[port].width) for port in differentiable(before))
        if before.aggregates:
            grads: list[tuple[int, int]] = []
            for step in reversed(range(1, before.steps)):
                made = pool.alloc([(moves.num_held(before.hop + step), before.width)])
                pool.free(grads)
                grads = made
            pool.free(grads)
        pool.free(out)
        out = into
    pool.free(out)


class Pool:
    """Rows by their shape: what was given back is taken again. total: numbers of all that was ever made."""

    def __init__(self) -> None:
        self._spare: Counter[tuple[int, int]] = Counter()
        self.total = 0

    def alloc(self, keys: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Takes rows of these shapes."""
        found = list(keys)
        for key in found:
            if self._spare[key]:
                self._spare[key] -= 1
            else:
                self.total += key[0] * key[1]
        return found

    def free(self, keys: Iterable[tuple[int, int]]) -> None:
        """Gives them back."""
        self._spare.update(keys)


def array_file_bytes(graph: Graph, plan: RankChunks, moves: Moves) -> int:
    """The file of index sets and edges."""
    index = 4 if plan.dependencies.rows.numel() < 1 << 31 else 8
    total = 0
    for planned in plan.schedules:
        for round_, missing in zip(planned.schedule.rounds, planned.missing_loops, strict=True):
            rows, edges = round_.targets.stop - round_.targets.start, round_.edges.stop - round_.edges.start
            total += index * (rows + planned.schedule.num_slots)
            total += index * sum(len(getattr(round_, name)) for name in FORWARD + BACKWARD)
            total += 8 * edges if moves.sizes.edge_ids else 0
            for layout in planned.layouts:
                total += moves.edge_bytes(layout, planned, round_, missing, "both")
                spreads = layout == "looped" and graph.edge_features is not None
                total += 8 * (edges + missing) if spreads else 0
    return total


def host_bytes(graph: Graph, model: nn.Module, plan: RankChunks, itemsize: int) -> int:
    """Memory that grows with the graph: its arrays, numbers by vertex, and most of all, for a while, the planning."""
    arrays = (
        graph.x,
        graph.y,
        graph.in_edges.indptr,
        graph.in_edges.indices,
        graph.in_edges.weight,
        graph.edge_features,
        graph.edge_type,
        *graph.features.values(),
    )
    held = sum(one.nbytes for one in arrays if isinstance(one, Tensor))
    by_vertex = graph.num_vertices * (3 * 8 + 4 * itemsize)
    neighbours = sum(planned.volumes.neighbours for planned in plan.schedules)
    planning = 40 * neighbours + sum(planned.hop.block.num_edges for planned in plan.schedules) * 16
    planning += 8 * plan.num_chunks**2 if plan.num_chunks <= MAX_REORDERED else 0
    planning += sum(16 * one.schedule.num_slots * len(one.schedule.rounds) for one in plan.schedules)
    parameters = sum(one.nbytes for one in model.parameters()) * ADAM_COPIES
    return held + by_vertex + planning + parameters
