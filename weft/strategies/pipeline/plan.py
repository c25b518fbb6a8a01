"""Pipelines over chunks and ranks (G3, section 5), exact: no row is used before it is made, none is old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from weft.parallel.chunks.cut.ranges import VERTEX_COST
from weft.parallel.chunks.cut.rank_chunks import RankChunks
from weft.strategies.offload.cutter import Cutter, Orders
from weft.strategies.offload.estimate import OffloadEstimate
from weft.strategies.offload.moves import MoveSizes
from weft.strategies.offload.options import ChunkOptions
from weft.strategies.offload.plan import OffloadPlan
from weft.strategies.pipeline.row_order import OrderedRank, halo_plan, order_ranks
from weft.strategies.vertex.plan import CommunicatedPlan, VertexOptions, VertexPlan

CHUNKS = range(4, 9)
"""Of a rank, where nobody says how many: enough for the network to begin early; one if there is work for fewer."""
CHUNK_COST = 1 << 17
"""Edges of a chunk, a target as VERTEX_COST of them, beside which what a chunk costs in itself is little."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(ChunkOptions, VertexOptions):
    """What can be said of chunks, and of where vertices live."""


class PipelinePlan(OffloadPlan):
    """Vertex parallelism in chunks: each sends its rows when it is done, and runs as soon as what it reads is there."""

    name = "pipeline"
    options_type = PipelineOptions
    flags = ()
    partition = "balanced"
    optimisations = ("keep", "inter", "prefetch", "priority", "eager")
    options: PipelineOptions

    def make_vertices(self) -> VertexPlan:
        return CommunicatedPlan(self.work, self.size, VertexOptions(partition=self.options.partition))

    @property
    def min_chunks(self) -> int:
        stats = self.work.stats
        worth = (stats.num_edges + VERTEX_COST * stats.num_vertices) // (self.size * CHUNK_COST)
        some = min(worth, CHUNKS[-1]) if self.size > 1 and worth >= CHUNKS[0] else 1
        return min(self.options.chunks or some, self.max_chunks)

    @cached_property
    def _ordered(self) -> list[OrderedRank]:
        return order_ranks(self.vertices.all_dependencies, priority=self.work.optimisations.priority)

    def make_cutters(self) -> list[Cutter]:
        return [self.make_cutter([one.needed]) for one in self._ordered]

    def release(self) -> None:
        self.__dict__.pop("_ordered", None)
        super().release()

    def choose_orders(self, count: int) -> Orders | None:
        del count  # rows that cross come first
        return None

    def cut_rank(self, rank: int, count: int, orders: Orders | None) -> RankChunks:
        bounds = [cutter.bounds(count) for cutter in self.cutters]
        made = self.cutters[rank].cut(0, bounds[rank], orders)
        return replace(made, halo=self._halo(rank, [each[0][0] for each in bounds if each[0]]))

    def _halo(self, rank: int, bounds: Sequence[Sequence[int]]) -> Any:
        return halo_plan(self._ordered, bounds, rank, at_once=not self.work.optimisations.inter)

    def estimate(self, rank: int, chunks: RankChunks) -> OffloadEstimate:
        """With the widest rows that leave and come by themselves, which are held until they are there and read."""
        made, halo = super().estimate(rank, chunks), chunks.halo
        widest = max(segment.source_width for program in self.programs.values() for segment in program.segments)
        rows = halo.num_sent + halo.num_received if halo is not None else 0
        return replace(made, device=made.device + rows * widest * self.work.itemsize)

    def _sizes(self, rank: int) -> MoveSizes:
        return replace(super()._sizes(rank), halo=self.chunks(rank).halo)
