"""Memory and moved bytes of `offload`, estimated before anything large is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from weft.cost import Trace
from weft.data import Graph
from weft.parallel.chunks.cut.rank_chunks import RankChunks
from weft.parallel.chunks.program.stages import Buffer, PassStage
from weft.runtime.streams import pinned_bytes
from weft.storage.unnamed_files import is_mapped
from weft.strategies.base import CHECKPOINT_COPIES, PARAMETER_COPIES
from weft.strategies.offload.cutter import MAX_REORDERED
from weft.strategies.offload.moves import Moves, MoveSizes
from weft.utils.units import format_bytes

PLANNED_EDGE_BYTES, PLANNED_SLOT_BYTES = 24, 48
"""Bytes of an edge, and of a row in the buffer, of the chunk whose round is computed."""


@dataclass(frozen=True, kw_only=True)
class OffloadEstimate:
    """Estimated bytes of one rank."""

    chunks: int
    """Number of chunks of the first aggregate."""
    device: int
    """Peak bytes on the device."""
    host: int
    """Bytes in the host's memory."""
    disk: int
    """Bytes in files."""
    to_device: int
    """Bytes copied from the host to the device in an epoch's training step."""
    to_host: int
    """Bytes copied from the device to the host in an epoch's training step."""
    network: int
    """Bytes sent to other ranks in an epoch's training step."""

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
    """Estimate the bytes of a rank, except for those on the device.

    Args:
        graph: The graph.
        model: The model.
        plan: Chunks of the rank.
        sizes: Sizes that formulas need in addition to the chunks.
        trace: Operations of a training step.
        pinned: True if rows are in pinned memory.
    """
    moves = Moves(plan, sizes, training=True)
    return OffloadEstimate(
        chunks=plan.num_chunks,
        device=0,
        host=host_bytes(graph, model, plan, sizes.sum_itemsize),
        disk=max(row_file_bytes(plan, sizes, pinned=pinned), planning_file_bytes(plan))
        + array_file_bytes(graph, plan, moves),
        to_device=trace.to_device.total(),
        to_host=trace.to_host.total(),
        network=trace.bytes_sent.total(),
    )


def row_file_bytes(plan: RankChunks, sizes: MoveSizes, *, pinned: bool = False) -> int:
    """Return the bytes of the files of rows, which successive passes reuse.

    Args:
        plan: Chunks of the rank.
        sizes: Bytes of an element.
        pinned: True if rows are in pinned memory instead of files.
    """
    pool = Pool(sizes, pinned=pinned)
    for training in (True, False, True):  # buffers that an evaluation keeps are not free for the next step
        stages = plan.stages[training]
        if stages.once and not pool.in_use:  # under dropout of the inputs, only evaluations have constants
            for stage in stages.once:
                pool.run(stage)
            pool.close_free()
        before = [*pool.in_use]
        for stage in stages.forward:
            pool.run(stage)
        if training:
            pool.alloc(stages.forward[-1].makes[0]._replace(kind="grads"))  # of the logits
        for stage in stages.backward:
            pool.run(stage)
        pool.free(rows for rows in [*pool.in_use] if rows not in before)
    return pool.most_bytes


class Pool:
    """Rows by shape and type: released rows are reused by later requests for the same ones.

    Args:
        sizes: Bytes of an element.
        pinned: True if rows are in pinned memory instead of files.
    """

    def __init__(self, sizes: MoveSizes, *, pinned: bool) -> None:
        self.sizes, self.pinned = sizes, pinned
        self._spare = Counter[tuple[int, int, int]]()
        self.in_use = set[Buffer]()
        """Buffers that are allocated and not released."""
        self.num_bytes = self.most_bytes = 0
        """Bytes of all buffers, released ones included: now, and at most so far."""

    def run(self, stage: PassStage) -> None:
        """Allocate the rows that a stage produces, and release those that it frees."""
        for rows in stage.makes:
            self.alloc(rows)
        self.free(stage.frees)

    def alloc(self, rows: Buffer) -> None:
        """Allocate a buffer of rows; reuse a released one of the same shape and type if there is one."""
        shape = self._shape(rows)
        self.in_use.add(rows)
        if self._spare[shape]:
            self._spare[shape] -= 1
        else:
            self.num_bytes += self._bytes_of(*shape)
            self.most_bytes = max(self.most_bytes, self.num_bytes)

    def free(self, buffers: Iterable[Buffer]) -> None:
        """Release buffers of rows for reuse."""
        for rows in buffers:
            self.in_use.remove(rows)
            self._spare[self._shape(rows)] += 1

    def close_free(self) -> None:
        """Give back the space of all released buffers; PyTorch keeps that of pinned ones."""
        if not self.pinned:
            self.num_bytes -= sum(count * self._bytes_of(*shape) for shape, count in self._spare.items())
            self._spare.clear()

    def _shape(self, rows: Buffer) -> tuple[int, int, int]:
        """Return the number of rows, of columns, and of bytes of an element, which are those of a type."""
        return rows.num_rows, rows.width, self.sizes.sum_itemsize if rows.in_sum_dtype else self.sizes.itemsize

    def _bytes_of(self, num_rows: int, width: int, itemsize: int) -> int:
        num_bytes = num_rows * width * itemsize
        return pinned_bytes(num_bytes) if self.pinned else num_bytes


def array_file_bytes(graph: Graph, plan: RankChunks, moves: Moves) -> int:
    """Return the bytes of the file of index sets and edges.

    Args:
        graph: The graph.
        plan: Chunks of the rank.
        moves: Sizes of transfers.
    """
    index = 4 if plan.dependencies.rows.numel() < 1 << 31 else 8
    total = 0
    for schedule in plan.schedules:
        for round_, missing in zip(schedule.schedule.sizes, schedule.missing_loops, strict=True):
            edges = round_.num_edges
            total += index * (round_.num_targets + schedule.schedule.num_slots)
            total += index * (round_.num_forward_ids + round_.num_backward_ids)
            total += 8 * edges if moves.sizes.edge_ids else 0
            for layout in schedule.layouts:
                total += moves.edge_bytes(layout, schedule, round_, missing, "both")
                spreads = layout == "looped" and graph.edge_features is not None
                total += 8 * (edges + missing) if spreads else 0
    return total


def planning_file_bytes(plan: RankChunks) -> int:
    """Return the bytes of the files that planning needs, and that are freed before rows are allocated.

    They have the source numbers of each chunk, and the next round that reads each of these rows.

    Args:
        plan: Chunks of the rank.
    """
    return sum((schedule.hop.block.indices.itemsize + 4) * schedule.volumes.neighbours for schedule in plan.schedules)


def graph_bytes(graph: Graph) -> int:
    """Return the bytes of a graph's arrays that ranks read."""
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
    return sum(array.nbytes for array in arrays if array is not None)


def host_bytes(graph: Graph, model: nn.Module, plan: RankChunks, itemsize: int) -> int:
    """Return the bytes of host memory that grow with the graph.

    Args:
        graph: The graph.
        model: The model.
        plan: Chunks of the rank.
        itemsize: Bytes of an element of a scale.
    """
    arrays = graph_bytes(graph)
    by_vertex = graph.num_vertices * (8 + 3 * itemsize)
    blocks = {schedule.hop.block.indices.data_ptr(): schedule.hop.block for schedule in plan.schedules}
    edges = sum(block.indices.nbytes for block in blocks.values() if not is_mapped(block.indices))
    largest = max((shape for shapes in plan.chunks for shape, _ in shapes), key=lambda shape: shape.edges)
    planning = 8 * max((block.num_sources for block in blocks.values()), default=0)
    planning += PLANNED_EDGE_BYTES * largest.edges + PLANNED_SLOT_BYTES * largest.slots
    planning += 8 * plan.num_chunks**2 if plan.num_chunks <= MAX_REORDERED else 0
    parameters = sum(parameter.nbytes for parameter in model.parameters()) * (PARAMETER_COPIES + CHECKPOINT_COPIES)
    return arrays + by_vertex + edges + planning + parameters
