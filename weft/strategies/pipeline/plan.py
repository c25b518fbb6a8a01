"""Plan of `pipeline`: chunks overlap over ranks and layers (G3, section 5), exact, since rows are never old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.parallel.blocks.vertex_blocks import VertexBlocks
from weft.parallel.chunks.cut.ranges import VERTEX_COST
from weft.parallel.chunks.cut.rank_chunks import RankChunks
from weft.strategies.base import VertexOptions
from weft.strategies.offload.chunked_plan import ChunkedPlan
from weft.strategies.offload.cutter import Cutter, Orders
from weft.strategies.offload.estimate import OffloadEstimate
from weft.strategies.offload.moves import MoveSizes
from weft.strategies.offload.options import ChunkOptions
from weft.strategies.pipeline.row_order import OrderedRank, halo_plan, order_ranks

CHUNKS = range(4, 9)
"""Default range of the number of chunks of a rank.

With fewer, communication begins late; if there is not enough work for the smallest number, a rank has one chunk.
"""
CHUNK_COST = 1 << 17
"""Work of a chunk, in edges with a target counted as VERTEX_COST edges, above which its fixed cost is small."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(ChunkOptions, VertexOptions):
    """Options of `pipeline`: chunks, and the partition of the vertices."""


class PipelinePlan(ChunkedPlan):
    """Plan of `pipeline`: each chunk runs as soon as its source rows have arrived, and sends its results at once."""

    name = "pipeline"
    options_type = PipelineOptions
    partition = "balanced"
    optimisations = ("keep", "inter", "prefetch", "priority", "eager")
    options: PipelineOptions

    def solve(self, state: Any) -> None:
        self._ranks: list[OrderedRank] = []
        super().solve(state)

    def make_vertices(self) -> VertexBlocks:
        return self.vertex_blocks(self.options.partition, ratio=0.0, max_bytes=None)

    @property
    def min_chunks(self) -> int:
        stats = self.work.stats
        affordable = (stats.num_edges + VERTEX_COST * stats.num_vertices) // (self.size * CHUNK_COST)
        default = min(affordable, CHUNKS[-1]) if self.size > 1 and affordable >= CHUNKS[0] else 1
        return min(self.options.chunks or default, self.max_chunks)

    @property
    def _ordered(self) -> list[OrderedRank]:
        if not self._ranks:
            self._ranks = order_ranks(self.vertices.all_dependencies, priority=self.work.optimisations.priority)
        return self._ranks

    def make_cutters(self) -> list[Cutter]:
        return [self.make_cutter([rank.needed]) for rank in self._ordered]

    def release(self) -> None:
        self._ranks = []
        super().release()

    def cut_rank(self, rank: int, count: int, orders: Orders | None) -> RankChunks:
        bounds = [cutter.bounds(count) for cutter in self.cutters]
        # The order is fixed: rows that other ranks read come first.
        chunks = self.cutters[rank].cut(0, bounds[rank], orders)
        return replace(chunks, halo=self._halo(rank, [rank_bounds[0][0] for rank_bounds in bounds if rank_bounds[0]]))

    def _halo(self, rank: int, bounds: Sequence[Sequence[int]]) -> Any:
        return halo_plan(self._ordered, bounds, rank, at_once=not self.work.optimisations.inter)

    def estimate(self, rank: int, chunks: RankChunks) -> OffloadEstimate:
        """Estimate the memory of a rank, and the bytes that it moves.

        This includes the widest rows in transit, which stay on the device until they are delivered and read.

        Args:
            rank: The rank.
            chunks: Chunks of the rank.
        """
        estimate, halo = super().estimate(rank, chunks), chunks.halo
        widest = max(segment.source_width for program in self.programs.values() for segment in program.segments)
        rows = halo.num_sent + halo.num_received if halo is not None else 0
        return replace(estimate, device=estimate.device + rows * widest * self.work.dtype.itemsize)

    def _sizes(self, rank: int) -> MoveSizes:
        return replace(super()._sizes(rank), halo=self.chunks(rank).halo)
