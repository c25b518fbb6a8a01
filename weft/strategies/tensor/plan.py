"""Plan of tensor parallelism (NeutronTP, sections 3 and 4): rows for dense layers, columns for aggregates.

Every rank stores the whole topology, is responsible for N / P rows, and aggregates F / P columns of all rows.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from weft.comm import Group
from weft.cost import MemoryUse
from weft.nn import SPREAD, Aggregate, ByRelation, EdgeSoftmax, ReceptiveField
from weft.parallel.blocks.make_blocks import make_blocks
from weft.parallel.columns.chunking import least_bytes, limit_error
from weft.parallel.columns.column_pass import ColumnRounds
from weft.parallel.layout import Layout, StepInputs
from weft.strategies.resident import ResidentPlaced, ResidentPlan
from weft.strategies.tensor.column_exchange import ColumnExchange
from weft.strategies.tensor.layout import TensorLayout, TensorOptions
from weft.utils.dtypes import dtype_name
from weft.utils.errors import InputError


class PlacedTensor(ResidentPlaced):
    """Plan of `tensor` on a rank: the whole topology, N / P rows, and F / P columns of all rows.

    Args:
        plan: The plan.
        group: The ranks.
        seed: Seed of dropout.
    """

    plan: TensorPlan

    def __init__(self, plan: TensorPlan, group: Group, *, seed: int) -> None:
        super().__init__(plan, group, seed=seed)
        layout = plan.layout
        self.topology.target_parts = layout.row_bounds, group.rank
        rounds_of = assigned = None
        if layout.chunking is not None:
            device = torch.device(plan.options.device) if plan.options.device else group.device
            rounds = cache(partial(ColumnRounds, plan.work, self.topology, layout.chunking, group, device))

            def rounds_of(op: Aggregate, rank_op: Aggregate, width: int) -> ColumnRounds:
                return rounds(rank_op, layout.chunk_working_set(op, width))

            assigned = layout.chunking.relations(group.rank, group.size) if self.graph.relations else None
        self.columns = ColumnExchange(
            plan.work,
            self.topology,
            self.rows,
            layout.row_bounds,
            group,
            chunked=rounds_of,
            assigned=assigned,
            attention=layout.attention,
        )

    def make_step_inputs(self, layout: Layout) -> StepInputs:
        assert isinstance(layout, TensorLayout)
        assert layout.pruned is not None
        group, whole, needed = self.group, self.topology, layout.pruned.blocks.dependencies(0)
        blocks = make_blocks(self, needed, (), (), layout.pruned.make_halo)
        rows, *_, last = layout.layer_rows(group.rank)
        assert isinstance(last, Tensor)
        row_ids = whole.ids[rows].to(group.device)
        exchanges = layout.pruned_exchanges(blocks, whole, row_ids, group)
        return StepInputs(input_rows=rows, inputs=self.make_inputs(rows), exchanges=exchanges, vertices=last)

    def exchange(self, stage: int) -> ColumnExchange:
        del stage
        return self.columns

    def describe(self) -> dict[str, Any]:
        layout = self.plan.layouts[False]
        assert isinstance(layout, TensorLayout)
        ops = layout.work.outline(layout.traits, training=False) if self.group.size > 1 else ()
        plans = [layout.attention(op.op, op.hop) for op in ops if isinstance(op.op, EdgeSoftmax)]
        explanations = [op.explain(self.work.itemsize, layout.num_remote) for op in plans]
        facts = super().describe() | self.describe_planned_bytes()
        return facts | ({"attention": explanations} if explanations else {})


class TensorPlan(ResidentPlan):
    """Plan of `tensor`, exact: the ranks' loads differ by at most one row and one column."""

    name = "tensor"
    options_type = TensorOptions
    placed_type = PlacedTensor
    flags = ("nn_device",)
    optimisations = ("reach", "pipeline")
    traits = SPREAD._replace(
        block_error="strategy tensor cannot run a layer that reads whole source rows (view.block, or PyG's own code), "
        "because a rank holds only some columns of every row: use --strategy hybrid, communicated, cached, offload or "
        "pipeline, or on one rank single"
    )
    options: TensorOptions
    layout: TensorLayout

    def solve(self, state: Any) -> None:
        super().solve(state)
        if self.work.row_dtype != self.work.dtype and self.layout.chunking is not None:
            raise InputError(
                f"--dtype {dtype_name(self.work.row_dtype)}: chunks add up gradients of rows one after the other, "
                "which would round them each time: leave out --device-memory and --chunks"
            )

    def find_receptive_field(self, *, training: bool) -> ReceptiveField | str:
        field = super().find_receptive_field(training=training)
        if isinstance(field, str):
            return field
        if self.layout.chunking is not None:
            return "chunks are of the whole graph"
        operations = self.work.outline(self.traits, training=training)
        if any(op.op == "embed" or isinstance(op.op, ByRelation) for op in operations):
            return "rows of types are assigned by their vertices"
        return field

    def make_layout(self) -> TensorLayout:
        return TensorLayout(self.work, self.size, self.traits, self.options)

    def check_fits(self) -> None:
        limit = self.options.device_bytes
        if limit is not None and (least := self.least_bytes()) > limit:
            raise limit_error(limit, least)

    def least_bytes(self) -> int:
        """Return the device bytes of the largest aggregate with a single vertex per chunk."""
        work = self.work
        aggregates = {(op.op, op.width) for op in work.outline(self.traits, training=True) if op.is_aggregate}
        working_sets = [
            (op, self.layout.chunk_working_set(op, width)) for op, width in aggregates if isinstance(op, Aggregate)
        ]
        return max((least_bytes(work.graph.in_edges, op, needs) for op, needs in working_sets), default=0)

    def peak_memory(self, rank: int = 0) -> MemoryUse:
        """Return the peak bytes of a rank in a run.

        Aggregates in chunks also need buffers (rounds). Below a limit, the device has only the working set of a chunk,
        and the rows that chunks read are in files.
        """
        whole_use, chunking = super().peak_memory(rank), self.layout.chunking
        if chunking is None:
            return whole_use
        rounds = self.layout.meta_rounds[rank].values()
        stored = sum(each.stored_bytes for each in rounds)
        if chunking.limit is None:
            return whole_use._replace(device=whole_use.device + stored + sum(each.topology_bytes for each in rounds))
        device = max((each.num_bytes for each in rounds), default=0)
        on_host = whole_use.device if self.options.device not in ("", "cpu") else max(whole_use.device - device, 0)
        return MemoryUse(device, on_host, stored, whole_use.shared)
