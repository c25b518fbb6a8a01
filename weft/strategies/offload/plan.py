"""Plan of `offload` (HongTu): ranks load the rows of a chunk together, and a rank may recompute remote sources."""

from __future__ import annotations

from functools import cached_property

from weft.cost import NOMINAL_RATES
from weft.nn import ReceptiveField, embeddings
from weft.parallel.blocks.vertex_blocks import VertexBlocks
from weft.parallel.chunks.cut.rank_chunks import RankChunks
from weft.strategies.offload.chunked_plan import ChunkedPlan
from weft.strategies.offload.cutter import Cutter, Orders
from weft.strategies.offload.options import OffloadOptions
from weft.strategies.step_pruning import find_receptive_field, reason_for_all_rows


class OffloadPlan(ChunkedPlan):
    """Plan of `offload`, exact: rows and saved activations on the host, the device has one chunk at a time."""

    name = "offload"
    options_type = OffloadOptions
    flags = ("machine",)
    optimisations = ("reach", "share", "keep", "reorder", "prefetch")
    options: OffloadOptions

    def make_vertices(self) -> VertexBlocks:
        options = self.options
        # Without a ratio and a profile of the machine, nothing is cached: nominal costs do not know the host link.
        ratio = 0.0 if options.ratio is None and self.machine is None else options.ratio
        vertices = self.vertex_blocks(options.partition, ratio=ratio, max_bytes=options.cache_bytes)
        field = self.receptive_field
        return vertices.restrict(self.work.restrict(field)) if isinstance(field, ReceptiveField) else vertices

    @cached_property
    def receptive_field(self) -> ReceptiveField | str:
        field = find_receptive_field(self.work, self.traits, training=False)
        if isinstance(field, str):
            return field
        if embeddings(self.work.model) or self.work.graph.relations:
            return "vertex and edge types are those of the whole graph"
        return reason_for_all_rows(self.work, self.traits, training=True) or field

    def make_cutters(self) -> list[Cutter]:
        return [self.make_cutter(self.vertices.all_dependencies)]

    def cut_rank(self, rank: int, count: int, orders: Orders | None) -> RankChunks:
        (cutter,) = self.cutters
        return cutter.cut(rank, cutter.bounds(count), orders)

    def choose_orders(self, count: int) -> Orders | None:
        if not self.work.optimisations.reorder:
            return None
        (cutter,) = self.cutters
        return cutter.choose_orders(cutter.bounds(count), NOMINAL_RATES)
