"""What offload will take and move, before anything large is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from weft.cost import Trace
from weft.data import Graph
from weft.parallel.chunks.cut.rank_chunks import RankChunks
from weft.parallel.chunks.program.stages import Buffer, PassStage
from weft.parallel.chunks.run.slots import BACKWARD_FIELDS, FORWARD_FIELDS
from weft.runtime.streams import pinned_bytes
from weft.strategies.base import CHECKPOINT_COPIES, PARAMETER_COPIES
from weft.strategies.offload.cutter import MAX_REORDERED
from weft.strategies.offload.moves import Moves, MoveSizes
from weft.utils.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class OffloadEstimate:
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


def estimate_offload(
    graph: Graph, model: nn.Module, plan: RankChunks, sizes: MoveSizes, trace: Trace, *, pinned: bool = False
) -> OffloadEstimate:
    """That of a plan, but for the device; trace: of its training step; pinned: whether rows are in pinned memory."""
    moves = Moves(plan, sizes, training=True)
    return OffloadEstimate(
        chunks=plan.num_chunks,
        device=0,
        host=host_bytes(graph, model, plan, sizes.itemsize),
        disk=row_file_bytes(plan, sizes.itemsize, pinned=pinned) + array_file_bytes(graph, plan, moves),
        to_device=trace.to_device.total(),
        to_host=trace.to_host.total(),
        network=trace.bytes_sent.total(),
    )


def row_file_bytes(plan: RankChunks, itemsize: int, *, pinned: bool = False) -> int:
    """The files of rows, which one pass after the other uses; pinned: memory in their place."""
    pool = Pool()
    for training in (True, False, True):  # what an evaluation keeps for good is not there for the next step
        stages = plan.stages[training]
        for stage in stages.once if not pool.held else ():
            pool.run(stage)
        held = [*pool.held]
        for stage in stages.forward:
            pool.run(stage)
        if training:
            pool.alloc(stages.forward[-1].makes[0]._replace(kind="grads"))  # of the logits
        for stage in stages.backward:
            pool.run(stage)
        pool.free(one for one in [*pool.held] if one not in held)
    return sum(pinned_bytes(one * itemsize) if pinned else one * itemsize for one in pool.made)


class Pool:
    """Rows by their shape: what was given back is taken again. made: how many numbers, of all that was ever made."""

    def __init__(self) -> None:
        self._spare = Counter[tuple[int, int]]()
        self.held = set[Buffer]()
        self.made = list[int]()

    def run(self, stage: PassStage) -> None:
        """Takes what a stage makes and gives back what it frees."""
        for one in stage.makes:
            self.alloc(one)
        self.free(stage.frees)

    def alloc(self, one: Buffer) -> None:
        """Takes rows."""
        shape = one.num_rows, one.width
        self.held.add(one)
        if self._spare[shape]:
            self._spare[shape] -= 1
        else:
            self.made.append(one.num_rows * one.width)

    def free(self, ones: Iterable[Buffer]) -> None:
        """Gives rows back."""
        for one in ones:
            self.held.remove(one)
            self._spare[one.num_rows, one.width] += 1


def array_file_bytes(graph: Graph, plan: RankChunks, moves: Moves) -> int:
    """The file of index sets and edges."""
    index = 4 if plan.dependencies.rows.numel() < 1 << 31 else 8
    total = 0
    for planned in plan.schedules:
        for round_, missing in zip(planned.schedule.rounds, planned.missing_loops, strict=True):
            rows, edges = round_.targets.stop - round_.targets.start, round_.edges.stop - round_.edges.start
            total += index * (rows + planned.schedule.num_slots)
            total += index * sum(len(getattr(round_, name)) for name in FORWARD_FIELDS + BACKWARD_FIELDS)
            total += 8 * edges if moves.sizes.edge_ids else 0
            for layout in planned.layouts:
                total += moves.edge_bytes(layout, planned, round_, missing, "both")
                spreads = layout == "looped" and graph.edge_features is not None
                total += 8 * (edges + missing) if spreads else 0
    return total


def graph_bytes(graph: Graph) -> int:
    """Of a graph's arrays that ranks read."""
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
    return sum(one.nbytes for one in arrays if isinstance(one, Tensor))


def host_bytes(graph: Graph, model: nn.Module, plan: RankChunks, itemsize: int) -> int:
    """Memory that grows with the graph: its arrays, numbers by vertex, and most of all, for a while, the planning."""
    held = graph_bytes(graph)
    by_vertex = graph.num_vertices * (3 * 8 + 4 * itemsize)
    neighbours = sum(planned.volumes.neighbours for planned in plan.schedules)
    planning = 40 * neighbours + sum(planned.hop.block.num_edges for planned in plan.schedules) * 16
    planning += 8 * plan.num_chunks**2 if plan.num_chunks <= MAX_REORDERED else 0
    planning += sum(16 * one.schedule.num_slots * len(one.schedule.rounds) for one in plan.schedules)
    parameters = sum(one.nbytes for one in model.parameters()) * (PARAMETER_COPIES + CHECKPOINT_COPIES)
    return held + by_vertex + planning + parameters
