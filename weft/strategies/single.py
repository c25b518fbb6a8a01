"""The strategy `single`: everything on one rank. All exact strategies compute the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from torch import Tensor

from weft.comm import Group
from weft.cost import Operation
from weft.nn import ONE_DEVICE, GraphOperation, MetaTopology, ReceptiveField
from weft.parallel.blocks.vertex_layout import VertexLayout, VertexStepInputs
from weft.parallel.chunks.program.chunk_program import Segment
from weft.parallel.columns.streamed_columns import StreamedColumns, column_segments
from weft.parallel.exchange import Identity
from weft.parallel.layout import Layout
from weft.parallel.operations import AggregateSize, aggregate
from weft.parallel.row_ranges import supports_ranges
from weft.runtime.memory.limit import memory_limit_bytes
from weft.strategies.base import CHECKED_SHARE, Step
from weft.strategies.resident import VERTEX_BYTES, ResidentPlaced, ResidentPlan


class WholeLayout(Layout):
    """Every row, column and edge on one rank."""

    def restrict(self, field: ReceptiveField) -> VertexLayout:
        return VertexLayout.of_receptive_field(self.work.restrict(field), self.traits)

    def meta_exchanges(self, rank: int, *, training: bool) -> Sequence[Identity]:
        del training
        group, stats = Group(rank, self.size, device="meta"), self.work.stats
        num_vertices, relation_rows = stats.num_vertices, (stats.num_relation_rows,)
        whole = MetaTopology(self.work, num_vertices, num_vertices, stats.num_edges, relation_rows=relation_rows)
        return [Identity(whole, whole.ids, num_vertices, group)] * self.work.num_stages

    def forward_operations(self, op: GraphOperation, rank: int) -> list[Operation]:
        del rank
        if not op.is_aggregate:
            return []
        stats = self.work.stats
        return [aggregate(op, stats.num_edges, AggregateSize.whole(stats), steps=op.steps)]


class PlacedSingle(ResidentPlaced):
    """The whole graph on this rank."""

    capturable = True
    plan: SinglePlan

    def exchange(self, stage: int) -> Identity:
        del stage
        return Identity(self.topology, self.topology.ids, self.graph.num_vertices, self.group)

    def make_step_inputs(self, layout: Layout) -> VertexStepInputs:
        assert isinstance(layout, VertexLayout)
        return VertexStepInputs.of(layout, self, self.make_inputs)

    def logit_ranges(self, step: Step) -> Iterator[tuple[slice, Tensor]]:
        segments, on_cpu = self.plan.segments, self.group.device.type == "cpu"
        if not on_cpu or step.vertices is not None or segments is None or self.plan.fits_memory:
            yield from super().logit_ranges(step)
            return
        self.model.train(step.training)
        for rows, logits in StreamedColumns(self.work, segments, self.model, self.topology, self.group).logits():
            yield rows, logits.to(self.work.dtype)


class SinglePlan(ResidentPlan):
    """One rank that stores every row, column and edge."""

    name = "single"
    traits = ONE_DEVICE
    max_ranks = 1
    optimisations = ("reach", "capture")
    placed_type = PlacedSingle

    def make_layout(self) -> WholeLayout:
        return WholeLayout(self.work, self.size, self.traits)

    def make_layouts(self) -> dict[bool, Layout]:
        """Return the layouts; steps run in ranges of rows if their hidden rows do not fit in memory otherwise."""
        layouts = super().make_layouts()
        if not self._fit_memory(layouts) and supports_ranges(self.work):
            for layout in layouts.values():
                layout.in_ranges = True
        return layouts

    @cached_property
    def segments(self) -> Sequence[Segment] | None:
        """Segments by which evaluations can run column by column; None if they cannot."""
        return column_segments(self.work)

    @property
    def streams(self) -> bool:
        return self.segments is not None

    @cached_property
    def fits_memory(self) -> bool:
        """True if an evaluation of all rows fits in the memory of this process."""
        return self._fit_memory({False: self.layout})

    def _fit_memory(self, layouts: dict[bool, Layout]) -> bool:
        """Return whether steps with given layouts fit in the memory of this process.

        Args:
            layouts: Layout of training steps (True) and evaluations (False).
        """
        stats, limit = self.work.stats, memory_limit_bytes()
        if not self.work.has_graph or stats.num_bytes < CHECKED_SHARE * limit:
            return True
        trains = {layout: training for training, layout in sorted(layouts.items())}
        uses = [layout.resident_memory(0, trains=training) for layout, training in trains.items()]
        rows = sum(use.device - use.shared - use.in_file for use in uses)
        temporary = (layout.temporary_memory(0, training=training) for training, layout in layouts.items())
        graph = VERTEX_BYTES * stats.num_vertices + (0 if self.work.graph.path else stats.num_bytes)
        return rows + max(map(max, temporary)) + graph <= limit
