"""The strategy `single`: everything on one rank. All exact strategies compute the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from torch import Tensor

from weft.comm import Group
from weft.cost import MemoryUse, Operation
from weft.nn import ONE_DEVICE, GraphOperation, MetaTopology, ReceptiveField
from weft.nn.layers.phases import Boundary
from weft.nn.sparse_rows import SparseRows
from weft.parallel.blocks.caching_costs import EDGE_BYTES
from weft.parallel.blocks.vertex_layout import VertexLayout, VertexStepInputs
from weft.parallel.chunks.program.chunk_program import Segment
from weft.parallel.columns.streamed_columns import (
    StreamedColumns,
    aggregated_features,
    column_segments,
    feature_widths,
    rows_at_once,
)
from weft.parallel.exchange import Identity, PlacedView
from weft.parallel.layout import ROW_BYTES, Layout
from weft.parallel.operations import AggregateSize, aggregate
from weft.parallel.row_ranges import RangedRun, supports_ranges
from weft.runtime.memory.heap import release_freed_memory
from weft.runtime.memory.limit import memory_limit_bytes
from weft.storage.host_rows import rows_in_file
from weft.storage.quantized_table import FeatureTable
from weft.storage.unnamed_files import empty_in_file
from weft.strategies.base import CHECKED_SHARE, Step
from weft.strategies.resident import VERTEX_BYTES, ResidentPlaced, ResidentPlan

SOURCE_BYTES = 16
"""Bytes of a row that only the first aggregate reads, instead of ROW_BYTES: vertex and factor by degree."""
POSITION_BYTES = 4
"""Bytes of every vertex for its position among the rows, while features are read column by column."""
ROWS_SHARE = 0.75
"""Share of the memory that rows may fill. The rest is for the process, freed memory, and files that it reads."""
RETAINED_SHARE = 0.6
"""Share of the memory that rows may fill with autograd graphs of ranges, which are worth less than files in memory."""


class FieldLayout(VertexLayout):
    """The rows of a receptive field, with all of their in-edges."""

    constant_segment: Segment | None = None
    """First segment of the model, if it only passes on the features to an aggregate."""

    @property
    def by_columns(self) -> bool:
        """True if the features of the first rows are so large that they are read and aggregated column by column."""
        work, segment = self.work, self.constant_segment
        if segment is None or not work.keeps_features_in_file(len(self.layer_rows(0)[0])):
            return False
        first = [work.outline(self.traits, training=training)[0] for training in (True, False)]
        return all(work.is_cached(op) and (op.op, op.steps) == (segment.op, 1) for op in first)

    @property
    def file_row_bytes(self) -> int:
        if not self.by_columns:
            return 0
        tables = 1 + len(cast(Segment, self.constant_segment).rows)  # the aggregated features, and rows passed on
        return tables * self.work.stats.num_features * self.work.itemsize

    def resident_memory(self, rank: int, *, trains: bool = True) -> MemoryUse:
        use, width = super().resident_memory(rank, trains=trains), self.work.stats.num_features
        num_sources, num_targets = map(len, self.layer_rows(rank)[:2])
        in_file = num_targets * width * self.work.itemsize if self.by_columns else 0
        device = use.device - (ROW_BYTES - SOURCE_BYTES) * (num_sources - num_targets)
        if self.blocks.allocate:  # the edges of all aggregates are the beginning of the same file
            first, *others = (num_edges for num_edges, _ in self.resident_edges(rank))
            in_file, device = in_file + EDGE_BYTES * first, device - EDGE_BYTES * sum(others)
        return use._replace(device=device, in_file=use.in_file + in_file)

    def temporary_memory(self, rank: int, *, training: bool) -> list[int]:
        step, preparation = super().temporary_memory(rank, training=training)
        if self.by_columns:
            work, (num_sources, num_targets) = self.work, map(len, self.layer_rows(rank)[:2])
            num_rows = rows_at_once(cast(Segment, self.constant_segment).op, 1, num_sources, num_targets)
            widths = feature_widths(work, num_rows)
            preparation = max(widths) * num_rows * work.itemsize + POSITION_BYTES * work.stats.num_vertices
        return [step, preparation]


class WholeLayout(Layout):
    """Every row, column and edge on one rank."""

    def restrict(self, field: ReceptiveField) -> FieldLayout:
        work = self.work.restrict(field)
        allocate = empty_in_file if work.keeps_features_in_file(field.rows[0]) else None
        return FieldLayout.of_receptive_field(work, self.traits, allocate)

    def meta_exchanges(self, rank: int, *, training: bool) -> Sequence[Identity]:
        del training
        group, stats = Group(rank, self.size, device="meta"), self.work.stats
        num_vertices, relation_rows = stats.num_vertices, (stats.relation_rows,)
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

    def __init__(self, plan: SinglePlan, group: Group, *, seed: int) -> None:
        if group.device.type != "cpu":  # the plan looks at the memory of the host
            for layout in plan.layouts.values():
                layout.in_ranges = False
        super().__init__(plan, group, seed=seed)

    def describe(self) -> dict[str, Any]:
        in_ranges = True in self.plan.layouts and self.plan.layouts[True].in_ranges  # a step may read files
        return super().describe() | (self.describe_planned_bytes() if in_ranges else {})

    def exchange(self, stage: int) -> Identity:
        del stage
        return Identity(self.topology, self.topology.ids, self.graph.num_vertices, self.group)

    def make_step_inputs(self, layout: Layout) -> VertexStepInputs:
        assert isinstance(layout, FieldLayout)
        if self.group.device.type != "cpu" or not layout.by_columns:
            return VertexStepInputs.of(layout, self, self.make_inputs)
        # The features are read in order, column by column; only those of targets that later layers read are copied.
        segment, table = cast(Segment, layout.constant_segment), cast(FeatureTable, self.graph.x)
        vertices, targets = layout.layer_rows(0)[:2]
        rows = rows_in_file(table, vertices, self.work.row_dtype, len(targets) if segment.rows else 0)
        inputs = replace(self.make_inputs(vertices[:0]), rows=SparseRows.of(rows, self.work.density))
        step_inputs = VertexStepInputs.of(layout, self, lambda _: inputs)
        topology = step_inputs.exchanges[cast(Boundary, segment.boundary).stage].topology
        release_freed_memory()  # of the blocks' creation: the columns fill much of the memory
        with self.group.meter.during("setup"):
            inputs.cached[segment.op, 1] = aggregated_features(self.work, segment.op, topology, vertices)
            self.group.meter.aggregate(topology.adjacency.num_edges, table.shape[1])
        release_freed_memory()
        return step_inputs

    def begin(self, step: Step) -> tuple[RangedRun | None, list[PlacedView], Tensor]:
        layout = self.plan.layouts.get(True, self.plan.layout)
        if layout.in_ranges and not layout.retained_share:
            release_freed_memory()  # arrays of the step before; those of this one have other sizes and places
        return super().begin(step)

    def logit_ranges(self, step: Step) -> Iterator[tuple[slice, Tensor]]:
        segments, on_cpu = self.plan.segments[False], self.group.device.type == "cpu"
        in_ranges = self.layout_of(step).logits_in_ranges
        if in_ranges or not on_cpu or step.vertices is not None or segments is None or self.plan.fits_memory:
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
        for layout in layouts.values():
            if isinstance(layout, FieldLayout):
                layout.constant_segment = self.constant_segment
        if not self._fit_memory(layouts) and all(each and supports_ranges(each) for each in self.segments.values()):
            for layout in layouts.values():
                layout.in_ranges = True
            if True in layouts:
                layouts[True].retained_share = self._retained_share(layouts)
        return layouts

    def _retained_share(self, layouts: dict[bool, Layout]) -> float:
        """Return the share of the rows of ranges whose autograd graphs fit in the memory.

        Args:
            layouts: Layout of training steps (True) and evaluations (False).
        """
        layout, steps = layouts[True], []
        for layout.retained_share in (0.0, 1.0):
            steps.append(layout.temporary_memory(0, training=True)[0])
        least, most = steps
        free = RETAINED_SHARE * memory_limit_bytes() - self._lasting_memory(layouts) - least
        return min(max(free / max(most - least, 1), 0.0), 1.0)

    @cached_property
    def segments(self) -> dict[bool, Sequence[Segment] | None]:
        """Segments of training steps (True) and evaluations (False), see `column_segments`."""
        return {training: column_segments(self.work, training=training) for training in (True, False)}

    @property
    def constant_segment(self) -> Segment | None:
        """First segment, if it only passes on the features to an aggregate; None if it does more."""
        first = [segments[0] for segments in self.segments.values() if segments]
        return first[0] if len(first) == 2 and all(each.constant and each.steps == 1 for each in first) else None

    @property
    def streams(self) -> bool:
        return self.segments[False] is not None

    @cached_property
    def fits_memory(self) -> bool:
        """True if an evaluation of all rows fits in the memory of this process."""
        return not self.layout.in_ranges and self._fit_memory({False: self.layout})

    def _fit_memory(self, layouts: dict[bool, Layout]) -> bool:
        """Return whether steps with given layouts fit in the memory of this process.

        Args:
            layouts: Layout of training steps (True) and evaluations (False).
        """
        limit = memory_limit_bytes()
        if not self.work.has_graph or self.work.rough_bytes < CHECKED_SHARE * limit:
            return True
        temporary = (layout.temporary_memory(0, training=training) for training, layout in layouts.items())
        return self._lasting_memory(layouts) + max(map(max, temporary)) <= ROWS_SHARE * limit

    def _lasting_memory(self, layouts: dict[bool, Layout]) -> int:
        """Return the bytes of memory that stay between steps with given layouts.

        Args:
            layouts: Layout of training steps (True) and evaluations (False).
        """
        stats = self.work.stats
        trains = {layout: training for training, layout in sorted(layouts.items())}
        uses = [layout.resident_memory(0, trains=training) for layout, training in trains.items()]
        rows = sum(use.device - use.shared - use.in_file for use in uses)
        return rows + VERTEX_BYTES * stats.num_vertices + (0 if self.work.graph.path else stats.num_bytes)
